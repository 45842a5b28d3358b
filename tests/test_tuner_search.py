"""How a campaign searches: refinement in rounds, and how groups of candidates compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_tuning import SMALL, Rig, quick_search  # noqa: F401
from test_tuner import DEFAULT, PROBLEM, view

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


def test_given_kernels_are_varied_in_what_needs_no_compiler(tmp_path: Path) -> None:
    """A bundle's kernel wins with another walk over the tiles than it came with, if that is asked for."""
    given = DEFAULT.replace(tile_shape_mn=(128, 128), swizzle_size=1, raster_along_m=False)

    def prefers_a_walk(config: Config) -> str:
        return "50" if view(config) == view(given) else "200"

    def tune(name: str, *, vary: bool) -> tuple[Rig, TuneResult]:
        rig = Rig(tmp_path / name, prefers_a_walk)
        request = replace(rig.tuner.request(PROBLEM, [given]), vary=vary)
        (result,) = rig.tuner.run([request])
        assert isinstance(result, TuneResult)
        return rig, result

    rig, result = tune("varied", vary=True)
    kernels = {view(row.config) for row in result.rows}
    walks = {(row.config["swizzle_size"], row.config["raster_along_m"]) for row in result.rows}
    assert kernels == {view(given), view(DEFAULT)} and len(walks) > 2
    assert len({source.digest for source in rig.compiler.compiled}) == 2
    _, fixed = tune("fixed", vary=False)
    assert {row.config for row in fixed.rows} == {given, DEFAULT}
