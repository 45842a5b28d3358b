"""How a campaign searches: refinement in rounds, and how groups of candidates compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_tuning import SMALL, Rig, quick_search  # noqa: F401
from test_tuner import view

from cutegen.policy import Policy, Timing
from cutegen.problem import Problem
from cutegen.space import Config
from cutegen.tuner import TuneResult
from cutegen.tuner.choose import comparable_us


def test_refinement_goes_on_while_it_finds_something_better(tmp_path: Path) -> None:
    """If every new kernel is faster it takes all its turns; if none is, one."""

    def count(behaviour: Callable[[Config], str], refinements: int) -> int:
        effort = replace(SMALL, classes=1, refine=1, refinements=refinements)
        folder = tmp_path / f"{behaviour.__name__}{refinements}"
        rig = Rig(folder, behaviour, effort=effort)
        request = rig.tuner.request(Problem(4096, 4096, 4096), None, {"cluster_shape_mn": ((1, 1),)})
        (result,) = rig.tuner.run([request])
        assert isinstance(result, TuneResult)
        return sum(result.outcomes.values())

    def all_alike(config: Config) -> str:
        return "200"

    def never_enough(config: Config) -> str:
        fresh = view(config)
        return f"{1000 * 0.9 ** met.setdefault(fresh, len(met)):g}"

    met: dict[Config, int] = {}
    assert count(all_alike, 1) == count(all_alike, 3)
    assert count(never_enough, 1) < count(never_enough, 3)


def test_groups_compare_by_what_is_common_to_them() -> None:
    """In bursts that is the clock, whatever the vendor library took; under load it is the library."""
    calm = Timing.of([10.0] * 3, [12.0] * 3)
    odd = Timing.of([10.0] * 3, [13.0] * 3)
    burst, loaded = Policy.screen(), Policy.screen(loaded=True)
    assert comparable_us(calm, burst) == comparable_us(odd, burst) == 10.0
    assert comparable_us(calm, loaded) == pytest.approx(comparable_us(odd, loaded) * 13 / 12)
    slower_clock = Timing.of([11.0] * 3, [13.2] * 3)
    assert comparable_us(calm, loaded) == pytest.approx(comparable_us(slower_clock, loaded))
