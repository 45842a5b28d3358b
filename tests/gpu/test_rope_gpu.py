"""Rotary embeddings on a real GPU: every style, table and norm against fp64, broken kernels, the operator."""

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
SPACE = find_space("rope", ARCH)
LINES = (
    "rope 4096x32x8x128x64x1 bf16",
    "rope 4096x32x8x128x64x9000 bf16 table=positions norm",
    "rope 1000x128x1x192x32x4096 bf16 style=interleaved table=positions index=int32",
    "rope 999x16x16x256x32x1 fp16 table_dtype=same",
    "rope 777x28x4x80x16x1 fp32 style=interleaved inverse",
    "rope 777x7x3x192x32x1 bf16 norm",
    "rope 777x7x3x192x32x1 bf16 norm style=interleaved",
    "rope 77x7x3x50x13x1 bf16 norm",
    "rope 333x5x2x33x9x1 fp32",
    "rope 1x32x8x128x64x1 bf16",
    "rope 300x32x8x128x64x1 bf16 unaligned",
)
PLAIN, NORMED, PART = (
    "rope 1000x32x8x128x64x1 bf16",
    "rope 1000x32x8x128x64x300 bf16 table=positions norm",
    "rope 1000x8x2x192x32x1 bf16",
)
BELOW = "            store(below, of_head(y, token, head, low))\n"
LAST = "            if place == x.shape[0] - 1 and head == heads - 1:\n"
FIFTH = "            if place == 5 and head == HEADS_K and lane == 0:\n"  # one of q
#: The problem, a text of the kernel for it, what takes its place, and what the check must say.
BROKEN = {
    "last keys unwritten": (
        PLAIN,
        "(groups_of(heads) * lanes) - 1) // THREADS + 1",
        "(groups_of(heads) * lanes) - 1) // THREADS",
        r"(q_out|k_out): \d+ of \d+ elements .*never written",
    ),
    "a head left out": (
        PLAIN,
        "place < x.shape[0] and head < heads:",
        "place < x.shape[0] and head < heads and head + place != 31:",
        r"(q_out|k_out): \d+ of \d+ elements .*never written",
    ),
    "beyond the last head": (
        PLAIN,
        BELOW,
        BELOW + LAST + "                y[token, head, D] = X(0.0)\n",
        r"elements outside of the output were written",
    ),
    "input modified": (
        PLAIN,
        BELOW,
        BELOW + FIFTH + "                x[token, 0, 3] = X(77.0)\n",
        r"wrote its input q, first at \(5, 0, 3\)",
    ),
    "turned the other way": (PLAIN, "a * c - b * s for", "a * c + b * s for", r"_out\[\d+.* should be"),
    "the next token's table": (
        PLAIN,
        "row = cutlass.Int64(token)",
        "row = cutlass.Int64(token ^ 1)",
        r"_out\[\d+.* should be",
    ),
    "a position too far": (NORMED, "positions[token])", "positions[token]) + 1", r"_out\[\d+.* should be"),
    "eps compiled in": (NORMED, "+ eps, fastmath", "+ 1e-6, fastmath", r"_out\[\d+.* should be"),
    "sum over half a head": (
        NORMED,
        "threads_in_group=LANES",
        "threads_in_group=LANES // 2",
        r"_out\[\d+.* should be",
    ),
    "tail not copied": (
        PART,
        "    k_tail_end = q_tail_end + copies(k, k_out, HEADS_K)\n",
        "    k_tail_end = q_tail_end\n",
        r"k_out: \d+ of \d+ elements .*never written, first at \(0, 0, 64\)",
    ),
}


def varied(problem: Problem) -> list[Config]:
    """The default config, and about three from all over the space."""
    configs = list(SPACE.configs(problem))
    every = max(1, len(configs) // 3) | 1  # the last knob has two values
    return list(dict.fromkeys([SPACE.default(problem), *islice(configs, 0, None, every)]))


def mutant(name: str) -> tuple[Source, Problem, Config]:
    line, old, new, _ = BROKEN[name]
    problem = parse_problem(line)
    config = SPACE.default(problem).replace(heads_per_thread=2)
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
    candidate = ("kernel", result.shared_object, result.symbol, SPACE, config, problem, GPU.sm_count)
    return bench.check(Candidate.of(*candidate))


@pytest.mark.parametrize(("problem", "config"), CASES, ids=[f"{p} | {c}" for p, c in CASES])
def test_a_config_turns_heads(
    problem: Problem, config: Config, compiled: dict[Source, object], bench: Bench
) -> None:
    """The problem and a few tokens agree with fp64, apart and in place, and again with the same bits."""
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
def test_a_packed_projection_is_turned_in_place() -> None:
    """Like new tensors; the values and what is not turned stay as they are; the gradient turns back."""
    import torch

    import cutegen

    heads = torch.randn(2, 500, 12, 128, device="cuda", dtype=torch.bfloat16)
    before = heads.clone()
    q, k = heads[:, :, :8], heads[:, :, 8:10]
    angles = torch.arange(500, device="cuda")[:, None] / 10000 ** (torch.arange(32, device="cuda") / 32)
    cos, sin = angles.cos(), angles.sin()
    want = cutegen.rope(q, k, cos, sin)
    cutegen.rope_(q, k, cos, sin)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])
    assert torch.equal(heads[:, :, 10:], before[:, :, 10:])
    assert torch.equal(heads[..., 64:], before[..., 64:])
    a, b = before[:, :, :8, :32].double(), before[:, :, :8, 32:64].double()
    c, s = cos.double()[:, None], sin.double()[:, None]
    assert torch.allclose(q[..., :32].double(), a * c - b * s, rtol=2**-7, atol=1e-3)
    x = torch.randn(2, 500, 8, 128, device="cuda", requires_grad=True)
    y, _ = cutegen.rope(x, k.float(), cos, sin)
    y.square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * x, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch makes an empty graph first, and warns of it
@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_compiles(mode: str) -> None:
    """torch.compile traces it without a break, in place too, and a step reuses its memory."""
    import torch

    import cutegen

    packed = torch.randn(64, 12, 128, device="cuda", dtype=torch.bfloat16)
    cos, sin = (torch.randn(64, 64, device="cuda") for _ in range(2))

    def step(packed: torch.Tensor) -> torch.Tensor:
        heads = packed * 2
        q, k = cutegen.rope_(heads[:, :8], heads[:, 8:10], cos, sin)
        return q.sum(1) + k.sum(1) + heads[:, 10:].sum(1)

    run = torch.compile(step, mode=mode, fullgraph=True)
    want = step(packed)
    for _ in range(4):
        assert torch.allclose(run(packed).float(), want.float(), rtol=2**-6, atol=0.25)
