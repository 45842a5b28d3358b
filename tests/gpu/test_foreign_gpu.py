"""Kernels of others on a real GPU: the authors' defaults and other configs against fp64, on tails too.

Those that are not installed, or fetched by tools/fetch_foreign.py, are left out.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deployments import write_table
from hopper import GPU, NEEDS_HOPPER
from own_registry import without_user_families

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.deploy import pin_table
from cutegen.families.registry import find_space, load_kernel, parse_problem
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.search.defaults import default_config
from cutegen.space import Config, Value
from tools.bench_foreign import DECLARATIONS

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
ARCH = find_arch("sm_90a")
#: A problem, the package or folder that it needs, and knobs that differ from the author's default.
CASES: tuple[tuple[str, str, dict[str, Value]], ...] = (
    ("quack_rmsnorm 300x4096 bf16 rstd", "quack", {"threads": 256, "reload": "smem", "late_weight": True}),
    ("quack_rmsnorm 77x32768 fp32", "quack", {"cluster": 2}),
    ("quack_softmax 300x8192 bf16", "quack", {"online": False, "cluster": 2}),
    ("nvidia_gemm 520x392x1032 fp16", "helpers.fmha_helpers", {"tile_n": 256, "cluster_m": 2}),
    ("nvidia_fmha 2x300x300x8x2x128 bf16 causal", "helpers.fmha_helpers", {"tile_n": 64, "persistent": True}),
    ("nvidia_fmha 2x300x300x8x2x64 fp16", "helpers.fmha_helpers", {"tile_n": 96}),
    ("flash_attention 2x300x500x8x2x128 bf16 causal", "flash_attn", {"tile_n": 144, "packed": False}),
    ("flash_attention 2x300x300x8x2x256 bf16 causal", "flash_attn", {"tile_n": 64}),
    ("flash_attention 2x300x300x6x6x64 fp16", "flash_attn", {"weights": "smem", "tile_n": 96}),
    ("flash_attention_varlen 1000x9x8x2x128 bf16 causal", "flash_attn", {"tile_n": 96, "overlap": False}),
    ("flash_attention_varlen 1000x9x8x2x64 bf16", "flash_attn", {"stages": 1}),
    ("quack_cross_entropy 300x4096 bf16 gradient", "quack", {"online": False}),
    ("quack_topk 300x1024x32 fp32", "quack", {}),
    ("nvidia_add 300x1000 fp32", "helpers.fmha_helpers", {"copy_bits": 64}),
)


def _is_there(module: str) -> bool:
    top = importlib.util.find_spec(module.partition(".")[0])
    return top is not None and importlib.util.find_spec(module) is not None


def chosen(line: str, knobs: dict[str, Value]) -> tuple[Problem, dict[str, Config]]:
    """Return the problem, and the author's config beside another."""
    name = line.partition(" ")[0]
    load_kernel(DECLARATIONS / f"{name}.py")
    problem = parse_problem(line)
    default = default_config(find_space(name, ARCH), problem)
    return problem, {"default": default, "other": default.replace(**knobs)}


@pytest.fixture(scope="module")
def compiled(store: Store, asked: list[dict[str, Any]]) -> dict[Source, object]:
    wanted = [each for each in asked if "module" in each and _is_there(each["module"])]
    there = [chosen(each["line"], each["knobs"]) for each in wanted]
    sources = [render(problem, config, ARCH) for problem, both in there for config in both.values()]
    with Builder(store) as builder:
        return dict(builder.build(sources))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(timeout_s=60) as opened:
        yield opened


@pytest.mark.parametrize(("line", "module", "knobs"), CASES, ids=[case[0] for case in CASES])
def test_unmodified_kernels_compute_what_their_declarations_say(
    line: str, module: str, knobs: dict[str, Value], compiled: dict[Source, object], bench: Bench
) -> None:
    """Also on tails, with rows apart, other scalars, and outputs in the place of inputs where declared."""
    if not _is_there(module):
        pytest.skip(f"needs {module}: see tools/fetch_foreign.py")
    assert GPU is not None
    problem, configs = chosen(line, knobs)
    space = find_space(problem.family, ARCH)
    bench.open(problem)
    for name, config in configs.items():
        assert not space.explain(problem, config), config
        result = compiled[render(problem, config, ARCH)]
        assert isinstance(result, Artifact), result
        files = (result.shared_object, result.symbol)
        subject = Candidate.of(name, *files, space, config, problem, GPU.sm_count)
        assert subject.tail_problem is not None
        checked = bench.check(subject)
        assert checked.ok, f"{config}: {checked.error}"


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[None]:
    """Calls wait for their kernels, which a result then comes from."""
    import cutegen
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(Dispatcher(kernels=Kernels(Store(tmp_path), build="allow")))
    yield
    cutegen.use(before)


@pytest.mark.usefixtures("calls")
@pytest.mark.skipif(not _is_there("flash_attn"), reason="needs flash_attn: see tools/fetch_foreign.py")
def test_flash_attention_is_called_as_pytorchs_attention_is() -> None:
    """On a stream of its own and in a graph, beside cuDNN's kernel on the same tensors."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import cutegen

    attention: Any = cutegen.load(DECLARATIONS / "flash_attention.py")
    shapes = ((2, 1000, 8, 128), (2, 1000, 2, 128), (2, 1000, 2, 128))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    scale = 128**-0.5
    turned = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        want = torch.nn.functional.scaled_dot_product_attention(
            *turned, is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    out = attention(q, k, v, scale, causal=True)
    torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-6)
    stream, graph, again = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.empty_like(out)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention(q, k, v, scale, causal=True, o=again)
    stream.synchronize()
    assert torch.equal(out, again)
    with torch.cuda.graph(graph):
        attention(q, k, v, scale, causal=True, o=again)
    again.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, again)


@pytest.mark.usefixtures("calls")
@pytest.mark.skipif(not _is_there("flash_attn"), reason="needs flash_attn: see tools/fetch_foreign.py")
@pytest.mark.parametrize(
    "behind",
    [
        1000.0,
        pytest.param(
            float("nan"),
            marks=pytest.mark.xfail(strict=True, reason="its kernel multiplies it by weights of 0"),
        ),
    ],
)
def test_sequences_end_before_their_tensors_do(behind: float) -> None:
    """What is behind the last does not count and is not written; empty sequences do no harm."""
    import torch

    import cutegen

    attention: Any = cutegen.load(DECLARATIONS / "flash_attention_varlen.py")
    ends = [0, 0, 1, 130, 130, 517]
    q, k, v = (torch.randn(640, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    for tensor in (q, k, v):
        tensor[ends[-1] :] = behind
    out = torch.full_like(q, 7.0)
    borders = torch.tensor(ends, dtype=torch.int32, device="cuda")
    attention(q, k, v, borders, 128**-0.5, causal=True, o=out)
    assert bool((out[ends[-1] :] == 7).all())
    for low, high in pairwise(ends):
        if low < high:
            each = (x[None, low:high].transpose(1, 2).double() for x in (q, k, v))
            want = torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
            torch.testing.assert_close(
                out[low:high].double(), want[0].transpose(0, 1), rtol=2**-6, atol=2**-6
            )


#: Run by a new interpreter that finds torch and the folder, and nothing of what made it.
CALLS = """
import sys
made_of = "cutegen cutlass jinja2 nvidia_cutlass_dsl quack flash_attn cute helpers".split()
for name in made_of:
    sys.modules[name] = None
import torch
sys.path.insert(0, sys.argv[1])
import pinned

def rows(*shape):
    return torch.randn(shape, device="cuda").bfloat16()

def near(got, want, unit=2.0**-6):
    torch.testing.assert_close(got.double(), want.double(), rtol=unit, atol=unit)

def in_a_graph(name, output, **values):
    out = pinned.call(name, **values)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pinned.call(name, **values, **{output: out})
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first)
    return first

def refused(said, name, **values):
    try:
        pinned.call(name, **values)
    except pinned.PinnedError as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"{name} took what it must not: {said}")

held = sys.argv[2].split(",")
if "flash_attention" in held:
    q, k, v = rows(2, 1000, 8, 128), rows(2, 1000, 2, 128), rows(2, 1000, 2, 128)
    values = {"q": q, "k": k, "v": v, "scale": 128**-0.5, "causal": True}
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
    near(in_a_graph("flash_attention", "o", **values), want.transpose(1, 2))
    across = v.transpose(2, 3).contiguous().transpose(2, 3)
    refused("v has strides", "flash_attention", **{**values, "v": across})
    refused("no kernel of flash_attention is pinned", "flash_attention", **{**values, "k": k.half()})
    refused("must be on one GPU", "flash_attention", **{**values, "k": k.cpu()})
if "nvidia_gemm" in held:
    a, b = rows(512, 1024), rows(384, 1024)
    near(in_a_graph("nvidia_gemm", "c", a=a, b=b), a.double() @ b.double().T, 2.0**-5)
    refused("b has shape", "nvidia_gemm", a=a, b=rows(384, 1000))
if "quack_rmsnorm" in held:
    x, weight = rows(300, 4096), rows(4096)
    near(in_a_graph("quack_rmsnorm", "out", x=x, weight=weight, eps=1e-6),
         torch.nn.functional.rms_norm(x.double(), (4096,), weight.double(), 1e-6))
    refused("eps is", "quack_rmsnorm", x=x, weight=weight, eps="1")
assert all(sys.modules[name] is None for name in made_of)
print("all right", *held)
"""


def test_pinned_folders_need_neither_cutegen_nor_the_authors_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are called from a process that can import none of these, also in a CUDA graph."""
    without_user_families(monkeypatch)
    lines = {
        "flash_attn": "flash_attention 2x1000x1000x8x2x128 bf16 causal",
        "helpers.fmha_helpers": "nvidia_gemm 512x384x1024 bf16",
        "quack": "quack_rmsnorm 300x4096 bf16",
    }
    there = [line for module, line in lines.items() if _is_there(module)]
    if not there:
        pytest.skip("none of them is there: see tools/fetch_foreign.py")
    names = [line.partition(" ")[0] for line in there]
    for name in names:
        load_kernel(DECLARATIONS / f"{name}.py")
    table = write_table(tmp_path / "table.json", tuple(there))
    pin_table(table, tmp_path / "deploy", kernels=Kernels(Store(tmp_path / "store"), build="allow"))
    command = [sys.executable, "-c", CALLS, str(tmp_path / "deploy"), ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["all", "right", *names]


@pytest.mark.usefixtures("calls")
@pytest.mark.skipif(not _is_there("helpers.fmha_helpers"), reason="see tools/fetch_foreign.py")
def test_a_kernel_that_knows_no_stream_runs_on_that_of_the_call() -> None:
    """It waits for what came before on that stream, and a graph captures it."""
    import torch

    import cutegen

    add: Any = cutegen.load(DECLARATIONS / "nvidia_add.py")
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    add(a, b)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    late = torch.zeros_like(a)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # about 50 ms
        late.copy_(a)
        found = add(late, b)
    stream.synchronize()
    assert torch.equal(found, a + b)
    with torch.cuda.graph(graph):
        add(a, b, c=found)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, a + b)
