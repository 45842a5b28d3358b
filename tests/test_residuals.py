"""What measurements teach about the model: a knob that it favours wrongly is found out, noise is not."""

from __future__ import annotations

import random
from math import exp, log

import pytest

from cutegen.arch import find_arch
from cutegen.families.gemm.perf_model.proposals import rank, refine
from cutegen.families.gemm.perf_model.ranking import Ranker
from cutegen.families.gemm.perf_model.residuals import Lessons
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config, Query

SPACE = find_space("gemm", find_arch("sm_90a"))
PROBLEM = Problem(128, 24576, 1536)


def tried(limit: int = 40) -> list[Config]:
    return rank(Query(SPACE, PROBLEM, 132), limit)


def test_a_knob_that_the_model_misjudges_is_found_out() -> None:
    """Swapped kernels are 20 % faster than predicted: corrections are nearly that far apart."""
    configs = tried()
    errors = [(c, -0.2 if c["swap_ab"] else 0.0) for c in configs]
    assert 3 < sum(error < 0 for _, error in errors) < len(errors) - 3
    lessons = Lessons(SPACE, errors)
    plain = SPACE.default(PROBLEM).replace(swap_ab=False)
    swapped = plain.replace(swap_ab=True)
    same_part = swapped.replace(tile_shape_mn=(plain["tile_shape_mn"][1], plain["tile_shape_mn"][0]))  # type: ignore[index]
    apart = lessons.corrected(same_part, 10.0) - lessons.corrected(plain, 10.0)
    assert -0.3 < apart < -0.1


def test_an_error_that_all_share_changes_no_order() -> None:
    """Everything takes 1.5 times what was predicted."""
    configs = tried()
    lessons = Lessons(SPACE, [(c, log(1.5)) for c in configs])
    for config in configs:
        assert exp(lessons.corrected(config, 10.0)) == pytest.approx(15.0)


def test_one_measurement_teaches_little() -> None:
    """A single slow kernel does not condemn the values of its knobs."""
    configs = tried()
    lessons = Lessons(SPACE, [(c, 0.5 if c == configs[0] else 0.0) for c in configs])
    assert lessons.corrected(configs[0], 10.0) < log(10.0) + 0.3


def test_refinement_goes_where_measurements_point() -> None:
    """Without tile widths of n % 16 == 8 at first, and these 10 % faster than predicted with few examples."""
    ranker = Ranker(SPACE, PROBLEM, 132, None)
    noise = random.Random(0)

    def measured(config: Config) -> float:
        return ranker.predict(config) * (0.8 if config["swap_ab"] else 1.0) * exp(noise.gauss(0, 0.02))

    results: dict[Config, float | None] = {config: measured(config) for config in tried(48)}
    found = refine(Query(SPACE, PROBLEM, 132), results, 16)
    assert len(found) == len(set(found)) and not set(found) & set(results)
    assert sum(c["swap_ab"] is True for c in found[-16:]) > 12
    known = {SPACE.compile_view(config) for config in results}
    assert len({SPACE.compile_view(config) for config in found} - known) > 16, "beyond the neighbours"
    few = {config: results[config] for config in list(results)[:8]}
    assert len(refine(Query(SPACE, PROBLEM, 132), few, 16)) <= 32
