"""``gemm``, ``linear`` and pinned folders on a real GPU: answers, streams, graphs, threads, refusals."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from family_kernels import compile_together
from hopper import GPU, NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.deploy import pin_table  # noqa: E402
from cutegen.errors import LaunchError, OperandError  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402

pytestmark = NEEDS_HOPPER
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def dispatcher(store: Store) -> Iterator[Dispatcher]:
    """One cache for the file; defaults answer, since no table is there."""
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    yield cutegen.use(Dispatcher(kernels=Kernels(store, build="allow"), fallback="none"))
    cutegen.use(before)


@pytest.fixture(autouse=True)
def _use(dispatcher: Dispatcher) -> None:
    cutegen.use(dispatcher)
    gc.collect()  # to destroy a graph of another test while one is captured would end the capture


@pytest.fixture(scope="module")
def _layouts(dispatcher: Dispatcher) -> None:
    """Kernels of all layouts, compiled side by side: calls would compile them one after the other."""
    kinds = product(("", "3x"), ("bf16", "fp16"), ("kk", "kn", "mn", "mk"), ("", " out=fp32"))
    lines = [f"gemm {batch}136x248x328 {dtype} {letters}{out}" for batch, dtype, letters, out in kinds]
    compile_together(dispatcher, map(Problem.parse, lines))


def rand(*shape: int, dtype: Any = BF16, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.rand(shape, generator=generator, device="cuda") * 2 - 1).to(dtype)


def near(found: Any, want: Any, k: int) -> None:
    """Within output rounding and fp32 accumulation of values uniform in [-1, 1]."""
    assert not found.isnan().any()
    torch.testing.assert_close(found.float(), want.float(), rtol=1e-2, atol=1e-2 * max(1.0, k**0.5) / 4)


def split_config(problem: Problem, parts: int) -> cutegen.Config:
    """The default with its k range divided, so that a workspace is needed."""
    space = find_space("gemm", find_arch("sm_90a"))
    config = space.default(problem).replace(split_k=parts, use_tma_store=False)
    space.require(problem, config)
    return config


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_keep_what_is_not_a_number(activation: str) -> None:
    """As torch's do: a row of NaN stays one, for a network that diverges must be seen to."""
    a, b = rand(64, 128), rand(128, 96)
    a[5] = float("nan")
    found = cutegen.gemm(a, b, activation=activation)
    assert found[5].isnan().all()
    others = torch.arange(64, device="cuda") != 5
    near(found[others], cutegen.gemm(a[others], b, activation=activation), 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("letters", ["kk", "kn", "mn", "mk"])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.usefixtures("_layouts")
def test_every_layout(dtype: Any, letters: str, batch: tuple[int, ...]) -> None:
    """All layouts, plain and batched, into a poisoned output and into each output dtype."""
    m, n, k = 136, 248, 328
    a = rand(*batch, m, k, dtype=dtype) if letters in ("kk", "kn") else rand(*batch, k, m, dtype=dtype).mT
    b = rand(*batch, k, n, dtype=dtype) if letters in ("kn", "mn") else rand(*batch, n, k, dtype=dtype).mT
    want = a.float() @ b.float()
    for out_dtype in (dtype, torch.float32):
        out = torch.full((*batch, m, n), float("nan"), device="cuda", dtype=out_dtype)
        assert cutegen.gemm(a, b, out=out) is out
        near(out, want, k)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 8, 8), (1, 4096, 512), (17, 1000, 64), (300, 1, 128), (129, 257, 72), (2048, 2048, 64)],
)
def test_odd_sizes(m: int, n: int, k: int) -> None:
    """Any m and n; k only in steps of 16 bytes."""
    x, w = rand(m, k), rand(n, k)
    near(cutegen.linear(x, w), x.float() @ w.float().t(), k)


def test_outputs_of_any_pitch_and_address_stay_inside() -> None:
    """Odd pitches and addresses are right, and what is around the output is untouched."""
    a, b = rand(100, 256), rand(72, 256).t()
    want = a.float() @ b.float()
    for pitch, offset in ((72, 0), (80, 0), (73, 0), (72, 1), (79, 5)):
        buffer = torch.full((100 * pitch + 64,), 7.0, device="cuda", dtype=BF16)
        out = torch.as_strided(buffer, (100, 72), (pitch, 1), offset)
        cutegen.gemm(a, b, out=out)
        near(out, want, 256)
        out.fill_(7.0)
        assert (buffer == 7.0).all(), (pitch, offset)


def test_epilogues_match_torch() -> None:
    """Each part of the epilogue, also with split k; in place into C as well."""
    a, b, c = rand(128, 1024), rand(256, 1024).t(), rand(128, 256)
    row, column = rand(256), rand(128, 1)
    product = a.float() @ b.float()
    for options, want in (
        ({"alpha": 0.5}, 0.5 * product),
        ({"c": c, "beta": -2.0}, product - 2 * c.float()),
        ({"c": c * float("nan"), "beta": 0.0}, product),
        ({"bias": row}, product + row.float()),
        ({"bias": column}, product + column.float()),
        ({"activation": "gelu"}, torch.nn.functional.gelu(product)),
        (
            {"activation": "silu", "bias": row, "alpha": 0.1},
            torch.nn.functional.silu(0.1 * product + row.float()),
        ),
    ):
        near(cutegen.gemm(a, b, **options), want, 1024)
    accumulated = c.clone()
    cutegen.gemm(a, b, c=accumulated, out=accumulated)
    near(accumulated, product + c.float(), 1024)
    split = split_config(Problem(128, 256, 1024), 4)
    near(cutegen.gemm(a, b, bias=row, config=split), product + row.float(), 1024)


def test_bad_operands_leave_the_gpu_usable() -> None:
    """Each refusal names its operand, warm or cold, and the next call is right."""
    a, b = rand(64, 128), rand(128, 64)
    odd = rand(64 * 128 + 1)[1:].view(64, 128)
    cutegen.gemm(a, b)
    for x, y, message in (
        (a.cpu(), b, "a is on cpu"),
        (a, b.cpu(), "b is on cpu"),
        (odd, b, "a starts 2 bytes behind"),
        (a, b[:, ::2], "neither its rows nor its columns"),
        (a.float(), b.float(), "a has dtype torch.float32"),
        (a, rand(120, 64), "its 120 rows must be the 128 columns"),
    ):
        with pytest.raises(OperandError, match=message):
            cutegen.gemm(x, y)
        near(cutegen.gemm(a, b), a.float() @ b.float(), 128)
    if torch.cuda.device_count() > 1:
        with pytest.raises(OperandError, match="b is on cuda:1 but a is on cuda:0"):
            cutegen.gemm(a, b.to("cuda:1"))


def test_streams_and_threads() -> None:
    """Concurrent calls on their own streams, and on one stream from many threads, split k included."""
    split = split_config(Problem(64, 512, 8192), 8)
    pairs = [(rand(64, 8192, seed=i), rand(512, 8192, seed=i).t()) for i in range(4)]
    wants = [a.float() @ b.float() for a, b in pairs]
    torch.cuda.synchronize()
    failures: list[Exception] = []

    def work(at: int, stream: Any) -> None:
        try:
            with torch.cuda.stream(stream):
                outs = [cutegen.gemm(*pairs[at], config=split) for _ in range(50)]
            stream.synchronize()
            for out in outs:
                near(out, wants[at], 8192)
        except (AssertionError, RuntimeError, cutegen.CutegenError) as error:
            failures.append(error)

    for streams in ([torch.cuda.Stream() for _ in pairs], [torch.cuda.Stream()] * len(pairs)):
        threads = [threading.Thread(target=work, args=(at, s)) for at, s in enumerate(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


def test_graphs_replay_beside_eager_calls() -> None:
    """A captured call keeps its own workspace; replays and eager calls on another stream do not disturb."""
    split = split_config(Problem(64, 512, 8192), 8)
    a, b, x = rand(64, 8192), rand(512, 8192).t(), rand(64, 8192, seed=9)
    out = torch.empty(64, 512, device="cuda", dtype=BF16)
    cutegen.gemm(a, b, out=out, config=split)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        cutegen.gemm(a, b, out=out, config=split)
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        out.zero_()
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            eager.append(cutegen.gemm(x, b, config=split))
        torch.cuda.synchronize()
        near(out, a.float() @ b.float(), 8192)
    for found in eager:
        near(found, x.float() @ b.float(), 8192)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_new_kernel_during_capture_is_refused(tmp_path: Path) -> None:
    """Nothing is compiled or loaded in a capture; the error says what to do, and doing it works."""
    cutegen.use(Dispatcher(kernels=Kernels(Store(tmp_path), build="allow"), fallback="none"))
    a, b = rand(64, 128), rand(128, 64)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match="once before the capture"), torch.cuda.graph(graph):
        cutegen.gemm(a, b)
    torch.cuda.synchronize()
    cutegen.gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cutegen.gemm(a, b)
    graph.replay()
    near(out, a.float() @ b.float(), 128)


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_match_eager() -> None:
    """torch.compile with its default backend keeps the operators whole and the result the same."""

    @torch.compile(fullgraph=True)
    def block(x: Any, w: Any, bias: Any) -> Any:
        return cutegen.linear(x * 2, w, bias, activation="relu") + 1

    x, w, bias = rand(4, 32, 128), rand(64, 128), rand(64)
    near(block(x, w, bias), cutegen.linear(x * 2, w, bias, activation="relu") + 1, 128)


def test_fp8_matches_scaled_mm() -> None:
    """Per-tensor scales, promoted and fast sums, against torch's own product of the same operands."""
    a, b = rand(256, 512).to(torch.float8_e4m3fn), rand(128, 512).to(torch.float8_e4m3fn).t()
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(3.0, device="cuda")
    want = 1.5 * (a.float() @ b.float())
    for fast in (False, True):
        near(cutegen.scaled_gemm(a, b, *scales, fast_accum=fast), want, 512)


FIRST_CALL = """
import sys, time
import torch
a = torch.rand(64, 8192, device="cuda").to(torch.bfloat16)
b = torch.rand(512, 8192, device="cuda").to(torch.bfloat16).t()
sys.path.insert(0, {folder!r})
for name in ("cutegen", "cutlass", "jinja2"):
    sys.modules[name] = None
import pinned
c = pinned.gemm(a, b)
torch.testing.assert_close(c, a @ b, rtol=2e-2, atol=1.0)
print("right", "tvm_ffi" in sys.modules)
"""


def test_pinned_folder_computes_without_cutegen(dispatcher: Dispatcher, tmp_path: Path) -> None:
    """In a process of its own, from torch and tvm-ffi's library; eager, in a graph, and split k."""
    assert GPU is not None
    plain, deep = Problem(512, 512, 512), Problem(64, 512, 8192)
    entries = [Entry(plain, dispatcher.explain(plain).config), Entry(deep, split_config(deep, 8))]
    Table(Fingerprint.of(GPU), entries).save(tmp_path / "table.json")
    folder = tmp_path / "deploy"
    pin_table(tmp_path / "table.json", folder, kernels=dispatcher.kernels)
    code = FIRST_CALL.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["right", "False"], done.stderr
    spec = importlib.util.spec_from_file_location("pinned_on_gpu", folder / "pinned.py")
    assert spec is not None and spec.loader is not None
    pinned = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pinned)
    for problem in (plain, deep):
        a, b = rand(problem.m, problem.k), rand(problem.n, problem.k).t()
        out = pinned.gemm(a, b)
        near(out, a.float() @ b.float(), problem.k)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pinned.gemm(a, b, out=out)
        out.zero_()
        graph.replay()
        near(out, a.float() @ b.float(), problem.k)
    with pytest.raises(RuntimeError, match="no kernel is pinned for m=512 n=512 k=520"):
        pinned.gemm(rand(512, 520), rand(512, 520).t())


def test_pinned_calls_look_at_every_tensor_each_time(dispatcher: Dispatcher, tmp_path: Path) -> None:
    """After a good call of the same shapes, too: another device, freed memory, or memory that out shares."""
    assert GPU is not None
    problem = Problem.parse("gemm 256x256x256 bf16 kk beta bias=n")
    folder = tmp_path / "deploy"
    entries = [Entry(problem, dispatcher.explain(problem).config)]
    Table(Fingerprint.of(GPU), entries).save(tmp_path / "table.json")
    pin_table(tmp_path / "table.json", folder, kernels=dispatcher.kernels)
    spec = importlib.util.spec_from_file_location("pinned_places", folder / "pinned.py")
    assert spec is not None and spec.loader is not None
    pinned = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pinned)
    given = {"a": rand(256, 256), "b": rand(256, 256, seed=1).t(), "c": rand(256, 256, seed=2)}
    given |= {"bias": rand(256), "out": torch.empty(256, 256, device="cuda", dtype=BF16)}
    want = given["a"].float() @ given["b"].float() + given["c"].float() + given["bias"].float()

    def call(**changes: Any) -> Any:
        return pinned.gemm(**{**given, **changes})

    near(call(), want, 256)
    places = ["cpu", *(["cuda:1"] if torch.cuda.device_count() > 1 else [])]
    for name, place in ((name, place) for name in given for place in places):
        with pytest.raises(RuntimeError, match=r"operands are on .*; they must be on one GPU"):
            call(**{name: given[name].to(place)})
    freed = given["c"].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="an operand has no memory"):
        call(c=freed)
    for name in ("a", "b"):
        with pytest.raises(RuntimeError, match=f"out shares memory with {name}"):
            call(out=given[name] if name == "a" else given[name].t())
    near(call(), want, 256)
    near(call(out=given["c"]), want, 256)
