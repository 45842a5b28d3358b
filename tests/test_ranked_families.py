"""Every family can be searched as every effort does it, also where power limits what is heavy."""

from __future__ import annotations

import pytest

from cutegen.arch import ARCHES, Arch
from cutegen.families.registry import families, find_family, find_spaces, has_space
from cutegen.family import Problem, is_heavy
from cutegen.search.defaults import default_of_algorithm, strategy_of
from cutegen.search.strategies import likely, rank, refine
from cutegen.tuning.request import EFFORTS

#: Families whose kernels multiply matrices: of these some problem must be heavy, or the test misses a path.
PRODUCTS = ("gemm", "gemm_blocks", "gated_gemm", "grouped_gemm", "grouped_gated_gemm", "grouped_gemm_blocks")
CASES = [(name, arch) for name in families() for arch in ARCHES.values() if has_space(name, arch)]


def asked(name: str, arch: Arch) -> list[Problem]:
    """The problems of a family with the most and the fewest operations, of those that the target computes."""
    space = find_spaces(name, arch)[0]
    found = [p for p in find_family(name).typical() if next(space.configs(p), None) is not None]
    found.sort(key=lambda problem: problem.flops)
    return list(dict.fromkeys([found[-1], found[0]]))


@pytest.mark.parametrize(("name", "arch"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_family_can_be_searched(name: str, arch: Arch) -> None:
    """By all algorithms, with as many kernels as each effort asks for, and refined around what was found."""
    problems = asked(name, arch)
    if name in PRODUCTS and arch.name == "sm_90a":
        assert any(map(is_heavy, problems)), f"no example of {name} is heavy: add one"
    for problem in problems:
        for space in find_spaces(name, arch):
            if next(space.configs(problem), None) is None:
                continue
            default = default_of_algorithm(space, problem, arch.nominal_sm_count)
            limits = sorted({effort.kernels for effort in EFFORTS.values()})
            all_of_them = strategy_of(space) is not None and problem is problems[0]
            for limit in limits if all_of_them else limits[:1]:
                known = likely(space, problem, arch.nominal_sm_count, limit, everywhere=True)
                found = rank(space, problem, arch.nominal_sm_count, limit, default=default)
                assert found[0] == default and all(space.is_valid(problem, c) for c in [*known, *found])
            times: dict[object, float] = {config: 100.0 + at for at, config in enumerate(found)}
            more = refine(space, problem, times, 4, sm_count=arch.nominal_sm_count)  # type: ignore[arg-type]
            assert all(space.is_valid(problem, config) for config in more)
