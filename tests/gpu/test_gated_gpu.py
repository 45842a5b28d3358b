"""Gates on a real GPU: every layout and activation against fp64, broken kernels, the operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hopper import GPU, NEEDS_HOPPER

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.candidate import CheckResult
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
ARCH = find_arch("sm_90a")
LINES = (
    "gated 600x14336 bf16",
    "gated 2000x5120 fp16 layout=interleaved activation=gelu",
    "gated 777x4096 fp32 layout=split activation=gelu_tanh",
    "gated 3000x2880 bf16 layout=split activation=relu",
    "gated 1x14336 bf16",
    "gated 700x1001 bf16 layout=interleaved",
    "gated 333x17 fp32",
    "gated 300x2880 bf16 unaligned",
    "gated_backward 600x14336 bf16",
    "gated_backward 2000x5120 bf16 layout=interleaved activation=gelu",
    "gated_backward 777x4096 fp32 layout=split activation=gelu_tanh",
    "gated_backward 3000x2880 fp16 activation=relu",
    "gated_backward 700x1001 bf16 layout=split",
    "gated_backward 333x17 fp32 layout=interleaved",
)
FORWARD, BACKWARD = "gated 1024x4096 bf16", "gated_backward 1024x4096 bf16 layout=interleaved"
STORE = "            store(outs, at_place(out, row, column))\n"
#: The problem, a text of the kernel for it, what takes its place, and what the check must say.
BROKEN = {
    "last tile unwritten": (
        FORWARD,
        "VECTORS - 1) // TILE + 1\n",
        "VECTORS - 1) // TILE\n",
        r"out: \d+ of \d+ elements .*never written",
    ),
    "a vector left out": (
        FORWARD,
        "if at < total:",
        "if at < total and at != 700:",
        r"out: 8 of \d+ elements .*never written, first at \(1, 1504\)",
    ),
    "one element past the end": (
        FORWARD,
        STORE,
        STORE + "            if at == total - 1:\n                out[row, N] = X(0.0)\n",
        r"out: 1 elements outside of the output were written",
    ),
    "input modified": (
        FORWARD,
        STORE,
        STORE + "            if at == 5 * VECTORS:\n                x[row, 3] = X(77.0)\n",
        r"wrote its input x, first at \(5, 3\)",
    ),
    "gate and up exchanged": (
        FORWARD,
        "return vector(start), vector(start + N)",
        "return vector(start + N), vector(start)",
        r"out\[\d+.* should be",
    ),
    "wrong slope": (BACKWARD, "return y, s + y * (1.0 - s)", "return y, s + y", r"dx\[\d+.* should be"),
    "gradients exchanged": (
        BACKWARD,
        "zip(gates, ups, strict=True) for value in pair]\n    return both[:ELEMENTS]",
        "zip(ups, gates, strict=True) for value in pair]\n    return both[:ELEMENTS]",
        r"dx\[\d+.* should be",
    ),
    "half of a pair unwritten": (
        BACKWARD,
        "            store(dhigh, high)\n",
        "            if at != 3:\n                store(dhigh, high)\n",
        r"dx: 8 of \d+ elements .*never written, first at \(0, 56\)",
    ),
}


def varied(problem: Problem) -> list[Config]:
    """The default config, and about three from all over the space."""
    space = find_space(problem.family, ARCH)
    configs = list(space.configs(problem))
    every = max(1, len(configs) // 3) | 1  # the last knob has two values
    return list(dict.fromkeys([space.default(problem), *islice(configs, 0, None, every)]))


def mutant(name: str) -> tuple[Source, Problem, Config]:
    line, old, new, _ = BROKEN[name]
    problem = parse_problem(line)
    space = find_space(problem.family, ARCH)
    config = space.default(problem).replace(threads=128, vectors_per_thread=2, ctas_per_sm=0, streamed=False)
    sound = render(problem, config, ARCH)
    assert sound.text.count(old) == 1, f"{name}: the kernel's text has changed"
    return replace(sound, text=sound.text.replace(old, new)), problem, config


PAIRS = [parse_problem(line) for line in LINES] if GPU is not None else []
CASES = [(problem, config) for problem in PAIRS for config in varied(problem)]
MUTANTS = {name: mutant(name) for name in BROKEN}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def compiled(store: Store, request: pytest.FixtureRequest) -> dict[Source, object]:
    """The kernels of the tests that are asked for."""
    items = [item for item in request.session.items if item.path == request.path]
    asked: list[Any] = [vars(item)["callspec"].params for item in items if "callspec" in vars(item)]
    sources = {render(p["problem"], p["config"], ARCH) for p in asked if "config" in p}
    sources |= {MUTANTS[p["name"]][0] for p in asked if "name" in p}
    with Builder(store) as builder:
        return dict(builder.build(sources))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """What PyTorch offers is not compiled: nothing is timed here."""
    with Bench(timeout_s=60) as opened:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
            opened.start()
        yield opened


def check(bench: Bench, result: object, problem: Problem, config: Config) -> CheckResult:
    assert GPU is not None
    assert isinstance(result, Artifact), result
    if bench.opened != problem:
        bench.open(problem)
    space = find_space(problem.family, ARCH)
    candidate = ("kernel", result.shared_object, result.symbol, space, config, problem, GPU.sm_count)
    return bench.check(Candidate.of(*candidate))


@pytest.mark.parametrize(("problem", "config"), CASES, ids=[f"{p} | {c}" for p, c in CASES])
def test_a_config_computes_the_gate(
    problem: Problem, config: Config, compiled: dict[Source, object], bench: Bench
) -> None:
    """The problem and a few rows of it agree with fp64, apart and in place, and again with the same bits."""
    result = check(bench, compiled[render(problem, config, ARCH)], problem, config)
    assert result.ok, result.error


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_rejected(name: str, compiled: dict[Source, object], bench: Bench) -> None:
    source, problem, config = MUTANTS[name]
    result = check(bench, compiled[source], problem, config)
    assert not result.ok
    assert re.search(BROKEN[name][3], result.error), result.error


@pytest.fixture
def own_kernels(store: Store) -> Iterator[None]:
    """Calls wait for their kernels, which a result then comes from."""
    import cutegen
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(Dispatcher(kernels=Kernels(store, build="allow")))
    yield
    cutegen.use(before)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("layout", ["halves", "interleaved", "split"])
def test_the_operator_and_its_gradient_agree_with_torch(layout: str) -> None:
    import torch

    import cutegen

    def parts(x: Any) -> tuple[Any, Any]:
        return (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)

    x = torch.randn(3, 50, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    gate, up = parts(wide)
    want = torch.nn.functional.silu(gate) * up
    got = cutegen.swiglu(*parts(x)) if layout == "split" else cutegen.swiglu(x, layout=layout)
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-4)
    grad = torch.randn_like(got)
    got.backward(grad)
    want.backward(grad.double())
    assert torch.allclose(x.grad.double(), wide.grad, rtol=2**-8, atol=1e-4)
    extremes = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 3e38, float("nan"), 1.0]], device="cuda")
    ones = torch.ones_like(extremes)
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        values = torch.nn.functional.gelu(extremes, approximate="tanh" if name == "gelu_tanh" else "none")
        values = {"silu": torch.nn.functional.silu, "relu": torch.relu}.get(name, lambda x, v=values: v)(
            extremes
        )
        assert torch.allclose(cutegen.gated(extremes, ones, name), values, rtol=1e-5, equal_nan=True), name


@pytest.mark.filterwarnings("ignore")  # torch makes an empty graph first, and warns of it
@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_compiles(mode: str) -> None:
    """torch.compile traces it without a break, forward and backward, and a step reuses its memory."""
    import torch

    import cutegen

    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return cutegen.swiglu(x * 2) + 1

    run = torch.compile(step, mode=mode, fullgraph=True)
    wide = x.detach().double().requires_grad_()
    gate, up = (2 * wide).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up + 1
    want.sum().backward()
    for _ in range(4):
        x.grad = None
        got = run(x)
        assert torch.allclose(got.double(), want, rtol=2**-6, atol=2**-6)
        got.sum().backward()
        assert x.grad is not None and torch.allclose(x.grad.double(), wide.grad, rtol=2**-6, atol=2**-6)
