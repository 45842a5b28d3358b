"""What answers before anybody measured."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.errors import ProblemError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_family, find_space, find_spaces, parse_problem, space_of
from cutegen.families.same_kind import problems_of_kind
from cutegen.search.defaults import default_config, default_set, predictor
from cutegen.space import Config, Space
from tools.bringup_parts.random_problems import random_problem

SPACE = find_space("gemm", find_arch("sm_90a"))


def require_legal(problem: Any, config: Config, space: Space) -> None:
    """Raise unless ``config`` is valid in the space of its own kernel."""
    space_of(config, problem.family, space.arch).require(problem, config)


def test_a_default_is_legal_for_every_problem() -> None:
    """Whatever the dtype, layout, epilogue, batch and alignment."""
    generator = Random(3)
    for _ in range(150):
        problem = random_problem(generator)
        if not SPACE.explain(problem, {}):
            require_legal(problem, default_config(SPACE, problem), SPACE)


def test_every_starter_is_legal_somewhere() -> None:
    """One that never is would be a typing error; with 8-bit operands too."""
    for dtype in ("bf16", "e4m3", "int8"):
        problems = [
            Problem(*mnk, ab_dtype=dtype) for mnk in ((8192, 4096, 4096), (512, 4096, 4096), (64, 4096, 4096))
        ]
        for number, _ in enumerate(SPACE.default_candidates(problems[0])):
            configs = [
                (p, SPACE.default(p).replace(**list(SPACE.default_candidates(p))[number])) for p in problems
            ]
            assert any(not SPACE.explain(*pair) for pair in configs), configs


def test_defaults_are_few_kernels() -> None:
    """However many shapes a program has, it compiles no more kernels of one kind than default candidates."""
    generator = Random(5)
    views = set()
    for _ in range(200):
        m, n, k = (8 * int(2 ** generator.uniform(0, 10)) for _ in range(3))
        config = default_config(SPACE, Problem(m, n, k))
        views.add(space_of(config, "gemm", SPACE.arch).compile_view(config))
    spaces = find_spaces("gemm", SPACE.arch)
    assert 8 <= len(views) <= sum(len(list(space.default_candidates(Problem(8, 8, 8)))) for space in spaces)


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (Problem(1, 8192, 8192), {"algorithm": "few_rows"}),
        (Problem(8, 8192, 8192), {"swap_ab": True}),
        (Problem(8192, 8192, 8192), {"pingpong": True, "swap_ab": False}),
        (Problem(24, 8192, 1024), {"swap_ab": True, "split_k": 1}),
    ],
    ids=str,
)
def test_the_default_fits_the_regime(problem: Problem, wanted: dict[str, object]) -> None:
    """One row needs no tensor cores, few are swapped, large squares are not."""
    config = default_config(SPACE, problem)
    assert {knob: config[knob] for knob in wanted} == wanted


def test_deep_k_and_few_tiles_split_k() -> None:
    """Four tiles of 128x128 on 132 multiprocessors would leave most of them idle."""
    config = default_config(SPACE, Problem(256, 256, 65536))
    assert isinstance(config["split_k"], int) and config["split_k"] > 8
    few = default_config(SPACE, Problem(256, 256, 65536), sm_count=16)
    assert isinstance(few["split_k"], int) and few["split_k"] < config["split_k"]


def test_without_a_model_the_space_decides() -> None:
    """Nothing is known of the speed of products with scale factors along k."""
    space = find_space("gemm_blockscaled", find_arch("sm_100a"))
    problem = parse_problem("gemm_blockscaled 4096x4096x4096 mxfp8_e4m3 kk")
    assert predictor(space, problem) is None
    assert default_config(space, problem) == space.default(problem)


def random_kin(problem: Any, generator: Random) -> Any:
    """A problem of the same signature at random sizes."""
    while True:
        sizes = {name: int(2 ** generator.uniform(0, 14)) for name in problem.sizes}
        fixed = {s.name for s in find_family(problem.family).sizes if not s.free}
        step = 16 if problem.family == "gemm" else 1
        sizes = {
            name: problem.sizes[name] if name in fixed else -(-v // step) * step for name, v in sizes.items()
        }
        if "batch" in sizes:
            sizes["batch"] = 1 if problem.sizes["batch"] == 1 else 1 + sizes["batch"] % 7
        if "n" in sizes and "n" not in fixed:
            sizes["n"] += problem.sizes["n"] % step
        if "m" in sizes and not generator.randrange(4):
            sizes["m"] = generator.randrange(1, 9)
        sizes = {**sizes, "m": max(1, sizes["m"] - generator.randrange(step))} if "m" in sizes else sizes
        try:
            kin = problem.with_sizes(**sizes)
        except ProblemError:
            continue
        if kin.signature == problem.signature:
            return kin


KINDS = [
    ("sm_90a", "gemm 64x64x64 bf16 kk"),
    ("sm_90a", "gemm 64x64x64 fp16 kn bias=n act=gelu"),
    ("sm_90a", "gemm 64x64x64 bf16 mk out=fp32"),
    ("sm_90a", "gemm 4x64x64x64 bf16 kk"),
    ("sm_90a", "gemm 64x63x64 bf16 kk"),
    ("sm_90a", "gemm 64x64x64 e4m3 kk promote"),
    ("sm_90a", "rmsnorm 64x4096 bf16"),
    ("sm_90a", "rmsnorm 64x20000 fp32"),
    ("sm_100a", "gemm 64x64x64 bf16 kk"),
]


@pytest.mark.parametrize(("arch", "line"), KINDS, ids=[f"{line} {arch}" for arch, line in KINDS])
def test_the_default_set_holds_every_default(arch: str, line: str) -> None:
    """Whatever the sizes, the default's kernel is in the set of its signature, each there once and valid."""
    problem = parse_problem(line)
    space = find_space(problem.family, find_arch(arch))
    found = default_set(space, problem)

    def view(config: Config) -> Config:
        return space_of(config, problem.family, space.arch).compile_view(config)

    views = [view(config) for _, config in found]
    assert len(set(views)) == len(views) > 0
    for kin, config in found:
        assert kin.signature == problem.signature
        require_legal(kin, config, space)
    generator = Random(7)
    for _ in range(60):
        kin = random_kin(problem, generator)
        if not space.explain(kin, {}):
            assert view(default_config(space, kin)) in views, kin


def test_a_target_without_kernels_has_an_empty_set() -> None:
    """int8 does not exist on sm_103a."""
    problem = parse_problem("gemm 64x64x64 int8 kk")
    assert not default_set(find_space("gemm", find_arch("sm_103a")), problem)


def test_problems_of_a_kind_share_a_signature() -> None:
    """They come smallest first, each once, and the problem itself is among them."""
    for line in ("gemm 100x72x64 bf16 kk", "gemm 3x8x63x16 bf16 mk beta", "rmsnorm 17x1000 bf16"):
        problem = parse_problem(line)
        kin = problems_of_kind(problem)
        assert problem in kin and len(set(kin)) == len(kin) > 10
        assert {p.signature for p in kin} == {problem.signature}
        assert kin[0].flops < problem.flops < kin[-1].flops


def test_families_that_borrow_candidates_take_those_that_were_measured_there() -> None:
    """Further ones are for GEMMs alone."""
    arch = find_arch("sm_90a")
    knobs = ("tile_shape_mn", "cluster_shape_mn", "mma_warpgroups", "pingpong", "swap_ab")
    further = ((64, 224), (2, 1), 1, False, False)
    for line, has in (
        ("gemm 512x4096x4096 bf16 kk", True),
        ("gated_gemm 512x4096x4096", False),
        ("grouped_gemm 512x4096x4096x8", False),
    ):
        problem = parse_problem(line)
        candidates = list(find_space(problem.family, arch).default_candidates(problem))
        assert candidates and (further in [tuple(c.get(knob) for knob in knobs) for c in candidates]) == has


@pytest.mark.parametrize("family", ["grouped_gemm", "grouped_gated_gemm"])
def test_grouped_gemms_answer_with_kernels_that_a_warm_up_compiles(family: str) -> None:
    """The GEMM has candidates that were not measured there."""
    rng = Random(family)
    space = find_space(family, find_arch("sm_90a"))
    warm: dict[object, set[Config]] = {}
    for _ in range(60):
        sizes = f"{rng.randint(1, 20000)}x{8 * rng.randint(16, 500)}x{8 * rng.randint(16, 900)}"
        problem = parse_problem(f"{family} {sizes}x{rng.randint(2, 64)} bf16")
        if problem.signature not in warm:
            kernels = default_set(space, problem, 132)
            warm[problem.signature] = {space.compile_view(config) for _, config in kernels}
        config = default_config(space, problem, 132)
        assert space.compile_view(config) in warm[problem.signature], f"{problem}: {config}"
