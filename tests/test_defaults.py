"""What answers before anybody measured."""

from __future__ import annotations

from random import Random

import pytest
from walk import random_problem

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.search.defaults import default_config

SPACE = find_space("gemm", find_arch("sm_90a"))


def test_a_default_is_legal_for_every_problem() -> None:
    """Whatever the dtype, layout, epilogue, batch and alignment."""
    generator = Random(3)
    for _ in range(150):
        problem = random_problem(generator)
        if not SPACE.explain(problem, {}):
            SPACE.require(problem, default_config(SPACE, problem))


def test_every_starter_is_legal_somewhere() -> None:
    """One that never is would be a typing error; with 8-bit operands too."""
    for dtype in ("bf16", "e4m3", "int8"):
        problems = [Problem(*mnk, ab_dtype=dtype) for mnk in ((4096, 4096, 4096), (64, 4096, 4096))]
        for number, _ in enumerate(SPACE.starters(problems[0])):
            configs = [(p, SPACE.default(p).replace(**list(SPACE.starters(p))[number])) for p in problems]
            assert any(not SPACE.explain(*pair) for pair in configs), configs


def test_defaults_are_few_kernels() -> None:
    """However many shapes a program has, it compiles no more kernels of one kind than there are starters."""
    generator = Random(5)
    views = set()
    for _ in range(200):
        m, n, k = (8 * int(2 ** generator.uniform(0, 10)) for _ in range(3))
        views.add(SPACE.compile_view(default_config(SPACE, Problem(m, n, k))))
    assert 8 <= len(views) <= len(list(SPACE.starters(Problem(8, 8, 8))))


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (Problem(1, 8192, 8192), {"swap_ab": True}),
        (Problem(4096, 4096, 4096), {"pingpong": True, "swap_ab": False}),
        (Problem(1024, 1024, 1024), {"tile_shape_mn": (64, 128)}),
    ],
    ids=str,
)
def test_the_default_fits_the_regime(problem: Problem, wanted: dict[str, object]) -> None:
    """Few rows are swapped, squares are not; small squares take small tiles."""
    config = default_config(SPACE, problem)
    assert {knob: config[knob] for knob in wanted} == wanted


def test_deep_k_and_few_tiles_split_k() -> None:
    """Four tiles of 128x128 on 132 multiprocessors would leave most of them idle."""
    config = default_config(SPACE, Problem(256, 256, 65536))
    assert isinstance(config["split_k"], int) and config["split_k"] > 8
    few = default_config(SPACE, Problem(256, 256, 65536), sm_count=16)
    assert isinstance(few["split_k"], int) and few["split_k"] < config["split_k"]


def test_without_a_model_the_space_decides() -> None:
    """Nothing is known of Blackwell's speed."""
    space = find_space("gemm", find_arch("sm_100a"))
    problem = Problem(4096, 4096, 4096)
    assert default_config(space, problem) == space.default(problem)
