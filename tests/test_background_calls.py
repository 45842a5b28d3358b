"""Calls whose kernels are compiled in the background: right results before and after, from every entrance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu  # noqa: E402
from test_norms import FakeNorms, tensor, wanted  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.build.render import Source  # noqa: E402
from cutegen.dtypes import TORCH_DTYPES  # noqa: E402
from cutegen.errors import BuildError, LaunchError  # noqa: E402
from cutegen.families.declared import DeclaredFamily, read, update  # noqa: E402
from cutegen.families.registry import find_family, find_space, parse_problem  # noqa: E402
from cutegen.family import Inputs, Option, Size  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.workspace import Workspaces  # noqa: E402
from cutegen.search.defaults import default_set  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from cutegen.torch_ops.registration import pack  # noqa: E402

BF16 = torch.bfloat16
SPACE = find_space("gemm", find_arch("sm_90a"))
ENOUGH_S = 120.0


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Calls go to kernels on the CPU, compiled in the background when the gate opens."""
    yield from _used(FakeGpu(tmp_path), monkeypatch)


@pytest.fixture
def norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """The same with kernels of RMSNorm."""
    yield from _used(FakeNorms(tmp_path), monkeypatch)


def _used(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake.gate.clear()
    cutegen.gemm, cutegen.rms_norm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(fake.dispatcher(build="background"))
    buffers = Workspaces(lambda _, n, zeroed: torch.zeros(n), lambda _: 0, lambda _: False)
    monkeypatch.setattr(ops, "_workspaces", buffers)
    yield fake
    fake.gate.set()
    cutegen.use(before)


def rand(*shape: int, dtype: Any = BF16) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator) * 2 - 1).to(dtype)


def near(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=1e-2, atol=1e-2)


def open_gate(fake: FakeGpu) -> None:
    fake.gate.set()
    assert cutegen.wait_for_kernels(ENOUGH_S)


def test_torch_multiplies_until_the_kernel_is_ready(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits; the first one after the kernel is ready launches it, and later ones ask nobody."""
    a, b, out = rand(16, 32), rand(32, 24), torch.empty(16, 24, dtype=BF16)
    for _ in range(3):
        out.zero_()
        assert cutegen.gemm(a, b, out=out) is out
        near(out, a.float() @ b.float())
    assert not gpu.calls and not cutegen.wait_for_kernels(0.01)
    open_gate(gpu)
    cutegen.gemm(a, b, out=out)
    assert len(gpu.calls) == 1 and gpu.calls[0][2] is out
    monkeypatch.setattr(Dispatcher, "serve", lambda *_, **__: pytest.fail("asked again"))
    monkeypatch.setattr(ops, "_plan", lambda *_: pytest.fail("planned again"))
    out.zero_()
    cutegen.gemm(a, b, out=out)
    near(out, a.float() @ b.float())
    assert len(gpu.calls) == 2 and len(gpu.compiled) == 1


def test_every_kind_of_call_is_right_before_and_after(gpu: FakeGpu) -> None:
    """Layouts, batches, epilogues, views: the same result, first without a kernel."""
    a, b, c = rand(16, 32), rand(32, 24), rand(16, 24)
    at, bt, a3, b3 = rand(32, 16).t(), rand(24, 32).t(), rand(3, 16, 32), rand(3, 32, 24)
    row, column, x = rand(24), rand(16, 1), rand(2, 3, 32)
    product, torch_f = a.float() @ b.float(), torch.nn.functional
    cases: list[tuple[Callable[[], Any], Any]] = [
        (lambda: cutegen.gemm(a, b), product),
        (lambda: cutegen.gemm(a[:1], b), product[:1]),
        (lambda: cutegen.gemm(at, bt), at.float() @ bt.float()),
        (lambda: cutegen.gemm(a, b, out_dtype=torch.float32), product),
        (lambda: cutegen.gemm(a3, b3), a3.float() @ b3.float()),
        (lambda: cutegen.gemm(a, b, alpha=2.0, c=c, beta=-0.5), 2 * product - 0.5 * c.float()),
        (lambda: cutegen.gemm(a, b, c=c.clone()), product + c.float()),
        (lambda: cutegen.gemm(a, b, bias=row, activation="gelu"), torch_f.gelu(product + row.float())),
        (lambda: cutegen.gemm(a, b, bias=column, activation="silu"), torch_f.silu(product + column.float())),
        (lambda: cutegen.linear(x, bt.t()), x.float() @ bt.float()),
        (lambda: cutegen.gemm(a, bt[:, :23]), a.float() @ bt[:, :23].float()),
    ]
    for call, want in cases:
        near(call(), want)
    assert not gpu.calls
    open_gate(gpu)
    for call, want in cases:
        near(call(), want)
    assert len(gpu.calls) == len(cases)


def test_a_config_that_the_caller_chose_is_waited_for(gpu: FakeGpu) -> None:
    """Nothing else is what was asked for."""
    a, b = rand(16, 32), rand(32, 24)
    config = SPACE.default(parse_problem("gemm 16x24x32 bf16 kn")).replace(swizzle_size=2)
    near(cutegen.gemm(a, b, config=config), a.float() @ b.float())
    assert len(gpu.calls) == 1


def test_c_may_be_the_output(gpu: FakeGpu) -> None:
    """What stands in reads c before it writes the result there."""
    a, b, c = rand(16, 32), rand(32, 24), rand(16, 24)
    want = a.float() @ b.float() + c.float()
    near(cutegen.gemm(a, b, c=c, out=c), want)


def test_the_operators_of_torch_swap_too(gpu: FakeGpu) -> None:
    """The registered operator, and a compiled function: their plans are their own, and wait likewise."""
    a, b = rand(16, 32), rand(32, 24)
    arguments = pack((None, 1.0, 1.0, None, "relu", None, None, None))
    compiled = torch.compile(lambda a, b: cutegen.gemm(a, b, activation="relu") + 1, backend="eager")
    want = torch.relu(a.float() @ b.float())
    for _ in range(2):
        near(torch.ops.cutegen.gemm(a, b, *arguments), want)
        near(compiled(a, b), want + 1)
    assert not gpu.calls
    open_gate(gpu)
    for count in (2, 4):
        near(torch.ops.cutegen.gemm(a, b, *arguments), want)
        near(compiled(a, b), want + 1)
        assert len(gpu.calls) == count
    assert len(gpu.compiled) == 1


def test_threads_race_through_the_swap(gpu: FakeGpu) -> None:
    """Each call is right, whoever of them swaps; one kernel is compiled."""
    a, b = rand(16, 32), rand(32, 24)
    want = a.float() @ b.float()
    failures: list[BaseException] = []
    begun, stop = threading.Barrier(7), threading.Event()

    def call() -> None:
        try:
            begun.wait()
            while not stop.is_set():
                near(cutegen.gemm(a, b), want)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    begun.wait()
    open_gate(gpu)
    before = len(gpu.calls)
    while len(gpu.calls) < before + 50 and not failures:
        pass
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures and len(gpu.compiled) == len(gpu.loaded) == 1


def test_what_fails_to_compile_stays_with_torch(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; every later call is served as the first was."""
    gpu.failure = lambda source: BuildError("boom")
    a, b = rand(16, 32), rand(32, 24)
    cutegen.gemm(a, b)
    open_gate(gpu)
    for _ in range(3):
        near(cutegen.gemm(a, b), a.float() @ b.float())
        near(cutegen.gemm(a, b, activation="relu"), torch.relu(a.float() @ b.float()))
        assert cutegen.wait_for_kernels(ENOUGH_S)
    assert not gpu.calls
    assert ["boom" in r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [True]


def test_configure_sets_the_policy(gpu: FakeGpu) -> None:
    """Of the operators, whatever they have compiled; other values are refused."""
    a, b = rand(16, 32), rand(32, 24)
    assert ops.default_dispatcher().kernels.build == "background"
    assert cutegen.configure(build="never") is ops.default_dispatcher()
    with pytest.raises(LaunchError, match="build='never'"):
        cutegen.gemm(a, b)
    cutegen.configure(build="allow")
    cutegen.gemm(a, b)
    assert len(gpu.calls) == 1 and not gpu.builders
    cutegen.configure(build="background")
    cutegen.gemm(a, b)
    assert len(gpu.calls) == 2 and not gpu.builders
    with pytest.raises(ValueError, match="build='soon'"):
        cutegen.configure(build="soon")


def test_the_default_is_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who has not asked for it waits for a compiler."""
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path))
    assert Dispatcher().kernels.build == "background"


def test_rms_norm_is_served_and_swapped(norms: FakeGpu) -> None:
    """Its reference stands in, in place too; then the kernel, which has replaced it in the plan."""
    x, w, residual = tensor(40, 64), tensor(64), tensor(40, 64)
    for opened in (False, True):
        for eps in (1e-6, 0.25):
            near(cutegen.rms_norm(x, w, eps), wanted(x, w, eps))
        y, h = cutegen.rms_norm(x, w, residual=residual, residual_out=True)
        near(y, wanted(x, w, 1e-6, residual))
        near(h, x.float() + residual.float())
        mine, sums = x.clone(), residual.clone()
        cutegen.rms_norm(mine, w, residual=sums, residual_out=sums, out=mine)
        near(mine, wanted(x, w, 1e-6, residual))
        near(sums, h)
        compiled = torch.compile(lambda x: cutegen.rms_norm(x, w), backend="eager")
        near(compiled(x), wanted(x, w, 1e-6))
        assert len(norms.calls) == (5 if opened else 0)
        open_gate(norms)


@pytest.mark.parametrize("kind", ["gemm", "rms_norm"])
def test_a_plan_that_a_new_dispatcher_overtakes_is_not_kept(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that another thread changes while a call is planned hold for the calls behind it."""
    fake = request.getfixturevalue("gpu" if kind == "gemm" else "norms")
    old, new = fake.dispatcher(build="allow"), fake.dispatcher(build="allow")
    asked: list[Dispatcher] = []

    def serve(self: Dispatcher, *arguments: Any, **more: Any) -> Any:
        asked.append(self)
        if self is old:
            cutegen.use(new)
        return serve_as_ever(self, *arguments, **more)

    serve_as_ever = Dispatcher.serve
    monkeypatch.setattr(Dispatcher, "serve", serve)
    cutegen.use(old)
    for _ in range(3):
        if kind == "gemm":
            near(cutegen.gemm(rand(16, 32), rand(32, 24)), rand(16, 32).float() @ rand(32, 24).float())
        else:
            near(cutegen.rms_norm(tensor(40, 64), tensor(64)), wanted(tensor(40, 64), tensor(64), 1e-6))
    assert asked == [old, new]


# --- stand-ins ---

LINES = [
    "gemm 33x40x72 bf16 kk",
    "gemm 33x40x72 bf16 kk bias=n",
    "gemm 33x40x72 bf16 kn alpha",
    "gemm 5x8x40x64 fp16 mk alpha beta",
    "gemm 33x40x72 fp16 kn alpha beta bias=n act=gelu_tanh",
    "gemm 5x8x40x64 bf16 mk beta bias=m act=silu",
    "gemm 40x24x72 bf16 mn out=fp32",
    "gemm 33x40x80 e4m3 kk scale act=relu",
    "gemm 33x40x80 e4m3 kk promote out=fp32",
    "gemm 33x48x80 e5m2 kk alpha bias=n",
    "gemm 33x40x4096 int8 kk",
    "gemm 33x40x80 int8 kk out=bf16 scale bias=n",
    "rmsnorm 33x100 bf16 residual residual_out rstd",
    "rmsnorm 5x64 fp32 weight=none",
    "rmsnorm 5x64 fp16 weight=fp32",
]


@pytest.mark.parametrize("line", LINES)
def test_stand_ins_pass_the_check_of_kernels(line: str) -> None:
    """Every output element is as near to the reference as is asked of a kernel."""
    problem = parse_problem(line)
    family = find_family(problem.family)
    inputs = family.inputs(problem, torch.Generator().manual_seed(3), awkward=True)
    reference = family.reference(problem, inputs)
    arguments = {a.name: a for a in family.arguments(problem) if a.kind == "out"}
    outputs = {
        name: torch.full(a.shape, 77, dtype=getattr(torch, TORCH_DTYPES[a.dtype]))
        for name, a in arguments.items()
    }
    stand_in = family.stand_in(problem)
    assert stand_in is not None
    stand_in(inputs, outputs)
    for name, got in outputs.items():
        for chunk in reference.chunks(name, got):
            assert ((chunk.got - chunk.want).abs() <= chunk.allowed).all(), name


def test_operands_without_a_torch_dtype_have_no_stand_in() -> None:
    """No call poses such problems."""
    for line in ("gemm 32x32x32 tf32 kk", "gemm_blockscaled 32x32x64 nvfp4 kk"):
        assert find_family(line.split()[0]).stand_in(parse_problem(line)) is None


def test_a_declared_family_is_updated_in_place() -> None:
    """What is read and written is read first, rows or not."""
    family = DeclaredFamily(
        "running",
        "x += y",
        sizes=(Size("m", "rows"), Size("n", "columns")),
        options=(Option("dtype", "of x", ("fp32", "bf16"), "fp32"),),
        arguments=(update("x", "dtype", ("m", "n")), read("y", "dtype", ("m", "n"))),
        reference=lambda x, y: {"x": x + y},
    )
    problem = family.problem({"m": 3, "n": 5}, {})
    x, y = torch.ones(3, 5), torch.arange(15.0).view(3, 5)
    family.stand_in(problem)(Inputs({"x": x, "y": y}), {"x": x})
    assert torch.equal(x, y + 1)


# --- after a warm-up ---


def test_a_program_of_200_random_shapes_compiles_nothing(gpu: FakeGpu) -> None:
    """The default set is all that untuned calls of its kind need; no thread is ever started."""
    cutegen.configure(build="allow")
    kernels = ops.default_dispatcher().kernels
    for line in ("gemm 8x8x8 bf16 kk", "gemm 8x8x8 bf16 kk act=silu bias=n"):
        for problem, config in default_set(SPACE, parse_problem(line)):
            kernels.get(problem, config, SPACE.arch)
    warmed: list[Source] = list(gpu.compiled)
    cutegen.configure(build="background")
    generator = Random(11)
    for _ in range(200):
        m, n, k = (8 * int(2 ** generator.uniform(0, 5)) for _ in range(3))
        m = max(1, m - generator.randrange(8))
        a, w = rand(m, k), rand(n, k)
        if generator.random() < 0.5:
            near(cutegen.linear(a, w), a.float() @ w.float().t())
        else:
            bias = rand(n)
            want = torch.nn.functional.silu(a.float() @ w.float().t() + bias.float())
            near(cutegen.linear(a, w, bias, "silu"), want)
    assert gpu.compiled == warmed and not gpu.builders
    assert len(gpu.calls) == 200
