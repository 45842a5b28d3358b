"""Gated products on a real GPU: tails, clusters, split k, both outputs, broken kernels, the operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
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
PINGPONG = {"mma_warpgroups": 1, "pingpong": True}
SPLIT = {"use_tma_store": False, "cluster_shape_mn": (1, 1), "mma_warpgroups": 1}
#: A problem, and knobs that differ from its default config.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("700x2048x1024 bf16", {"tile_shape_mn": (128, 256), "mma_warpgroups": 2, "cluster_shape_mn": (2, 1)}),
    ("1000x2880x2880 bf16 layout=interleaved", {"tile_shape_mn": (128, 192), **PINGPONG}),
    ("333x1001x1024 fp16 activation=gelu_tanh", {}),
    ("1000x2048x1032 bf16", {"tile_shape_mn": (64, 48), "cluster_shape_mn": (4, 1), "mma_warpgroups": 1}),
    (
        "1000x2048x1032 bf16",
        {"tile_shape_mn": (64, 128), "cluster_shape_mn": (1, 4), "tile_k": 128, "mma_warpgroups": 1},
    ),
    ("700x2048x520 fp16", {"tile_shape_mn": (192, 128), "mma_warpgroups": 3, "cluster_shape_mn": (1, 2)}),
    ("3000x3904x512 bf16 activation=relu", {"tile_shape_mn": (128, 224), "stream_k": True}),
    ("600x2048x2056 bf16 layout=interleaved pre", {"tile_shape_mn": (64, 160), **PINGPONG}),
    ("16x14336x4096 bf16", {}),
    ("1x8192x4096 fp16 layout=interleaved", {"use_pdl": True}),
    ("37x4096x1024 bf16 unaligned", {}),
    ("64x4096x8192 bf16 activation=gelu", {"tile_shape_mn": (128, 64), "split_k": 4, **SPLIT}),
    ("100x2048x4096 bf16 pre", {"swap_ab": True, "tile_shape_mn": (128, 104), **PINGPONG}),
    ("100x2048x4096 fp16 layout=interleaved pre", {"tile_shape_mn": (64, 64), "split_k": 3, **SPLIT}),
    (
        "100x2048x4096 bf16 pre",
        {"swap_ab": True, "tile_shape_mn": (256, 32), "split_k": 3, **SPLIT, "mma_warpgroups": 2},
    ),
    ("257x509x128 bf16 pre", {}),
    ("37x1x64 bf16", {}),
    ("1x7x8 fp16 layout=interleaved pre", {}),
)
SOUND = "gated_gemm 700x2048x1032 bf16 pre"
KNOBS: dict[str, Any] = {"tile_shape_mn": (128, 128), "mma_warpgroups": 2, "cluster_shape_mn": (2, 1)}
#: A text of the kernel of SOUND, what takes its place, and what the check must say.
BROKEN = {
    "gates are what they multiply": (
        "    frag[v] = acc[rep",
        "    frag[v] = acc[UP + rep",
        r"out\[\d+.* should be",
    ),
    "halves one row too close": (
        "cutlass.Int64(places) *",
        "cutlass.Int64(places - 1) *",
        r"\[\d+.* should be",
    ),
    "wrong activation": ("cute.math.exp(-x)", "cute.math.exp(x)", r"out\[\d+.* should be"),
    "end of k left out": (
        "cute.ceil_div(g_a.shape[1], TILE_K)",
        "(g_a.shape[1] // TILE_K)",
        r"\[\d+.* should be",
    ),
    "one output half written": (
        "for half in cutlass.range_constexpr(2):\n        out.store(",
        "for half in cutlass.range_constexpr(1):\n        out.store(",
        r"pre: \d+ of \d+ elements .*never written",
    ),
    "last columns unwritten": (
        "cutlass.max(m_d.shape[1] - D_N, 0)",
        "cutlass.max(m_d.shape[1] - D_N - 8, 0)",
        r"never written",
    ),
}


def case(line: str, changes: dict[str, Any]) -> tuple[Problem, Config]:
    problem = parse_problem(f"gated_gemm {line}")
    config = find_space("gated_gemm", ARCH).default(problem)
    return problem, config.replace(**changes)


def mutant(name: str) -> tuple[Source, Problem, Config]:
    old, new, _ = BROKEN[name]
    problem, config = case(SOUND.partition(" ")[2], KNOBS)
    sound = render(problem, config, ARCH)
    assert sound.text.count(old) == 1, f"{name}: the kernel's text has changed"
    return replace(sound, text=sound.text.replace(old, new)), problem, config


PAIRS = [case(*given) for given in CASES] if GPU is not None else []
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


@pytest.mark.parametrize(("problem", "config"), PAIRS, ids=[f"{p} | {c}" for p, c in PAIRS])
def test_a_config_computes_the_product(
    problem: Problem, config: Config, compiled: dict[Source, object], bench: Bench
) -> None:
    """The problem and awkward sizes with NaN between rows agree with fp64, and again with the same bits."""
    result = check(bench, compiled[render(problem, config, ARCH)], problem, config)
    assert result.ok, result.error


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_rejected(name: str, compiled: dict[Source, object], bench: Bench) -> None:
    source, problem, config = MUTANTS[name]
    result = check(bench, compiled[source], problem, config)
    assert not result.ok
    assert re.search(BROKEN[name][2], result.error), result.error


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
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_the_operator_agrees_with_torch_eager_and_compiled(layout: str) -> None:
    import torch

    import cutegen

    x = torch.randn(3, 50, 2048, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2 * 1024, 2048, device="cuda", dtype=torch.bfloat16) / 32
    both = x.double() @ w.double().T
    gate, up = (both[..., ::2], both[..., 1::2]) if layout == "interleaved" else both.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up

    def step(x: torch.Tensor) -> torch.Tensor:
        return cutegen.gated_gemm(x, w, layout=layout)

    for run in (step, torch.compile(step, fullgraph=True)):
        assert torch.allclose(run(x).double(), want, rtol=2**-7, atol=1e-3)
    out, pre = cutegen.gated_gemm(x, w, layout=layout, return_pre=True)
    assert torch.allclose(pre.double(), both, rtol=2**-7, atol=1e-3)
    assert torch.equal(out, step(x))
