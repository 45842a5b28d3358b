"""The space of softmax: that of the kernels over rows, without a weight."""

from __future__ import annotations

import pytest

from cutegen.arch import ARCHES
from cutegen.families.registry import find_space, parse_problem
from cutegen.families.softmax.family import SOFTMAX

HOPPER = find_space("softmax", ARCHES["sm_90a"])
LENGTHS = (1, 2, 7, 17, 64, 128, 1000, 1024, 2880, 4099, 8192, 16384, 28672, 32771, 65536, 100_008)
LENGTHS += (128_256, 131_072, 151_936, 202_048, 262_143, 262_144)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("m", [1, 64, 16384, 1_000_000])
def test_every_length_of_row_has_a_default(m: int, dtype: str) -> None:
    for n in LENGTHS:
        for options in ({"dtype": dtype}, {"dtype": dtype, "unaligned": True}):
            problem = SOFTMAX.problem({"m": m, "n": n}, options)
            assert not HOPPER.explain(problem, HOPPER.default(problem)), problem


def test_there_is_no_weight_to_load() -> None:
    norm = find_space("rmsnorm", ARCHES["sm_90a"])
    assert {*norm.domains} - {*HOPPER.domains} == {"prefetch_weight"}
    missing = {rule.name for rule in norm.rules} - {rule.name for rule in HOPPER.rules}
    assert missing == {"row_fits_registers", "weight_is_late_where_registers_are_short"}


def test_a_row_must_fit_the_registers() -> None:
    problem = parse_problem("softmax 64x32768 bf16")
    config = HOPPER.default(problem).replace(threads_per_row=512, cluster_n=1)
    assert {v.rule for v in HOPPER.explain(problem, config)} == {"bare_row_fits_registers"}


@pytest.mark.parametrize("arch", [arch for arch in ARCHES.values() if arch.name != "sm_90a"], ids=str)
def test_blackwell_has_the_same_space(arch: object) -> None:
    space = find_space("softmax", arch)  # type: ignore[arg-type]
    problem = parse_problem("softmax 16384x4096 bf16")
    assert list(space.configs(problem)) == list(HOPPER.configs(problem))


def test_every_knob_value_is_reached_by_an_example() -> None:
    assert not HOPPER.unreachable(SOFTMAX.typical())
