"""Boosted trees: fits that ask about drawn features and points, and sums of several fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cutegen.families.gemm.perf_model.boosting import Boosting

CHANCE = np.random.default_rng(5)
FEATURES = CHANCE.random((400, 6))
WANTED = np.where(FEATURES[:, 0] > 0.5, 1.0, 0.0) + 0.5 * (FEATURES[:, 3] > 0.25)
COLUMNS = np.ascontiguousarray(FEATURES.T.astype(np.float32))
WHOLE = Boosting(trees=150, depth=3, rate=0.2, hold=1.0, borders=16)
DRAWN = replace(WHOLE, asked=0.5, sampled=0.6)


@pytest.mark.parametrize("boosting", [WHOLE, DRAWN], ids=["all features", "drawn features"])
def test_trees_come_near_what_is_wanted(boosting: Boosting) -> None:
    trees = boosting.fit(FEATURES, WANTED)
    off = trees.sums(COLUMNS) + trees.base - WANTED
    assert np.sqrt((off**2).mean()) < 0.15 * WANTED.std()


def test_draws_follow_from_the_seed() -> None:
    first, again, other = (replace(DRAWN, seed=seed).fit(FEATURES, WANTED) for seed in (1, 1, 2))
    assert first.to_json() == again.to_json() != other.to_json()


def test_a_fit_of_all_features_does_not_depend_on_the_seed() -> None:
    assert WHOLE.fit(FEATURES, WANTED).to_json() == replace(WHOLE, seed=9).fit(FEATURES, WANTED).to_json()


def test_the_mean_of_fits_is_the_sum_of_scaled_ones() -> None:
    fits = [replace(DRAWN, seed=seed).fit(FEATURES, WANTED) for seed in (1, 2)]
    mean = fits[0].scaled(0.5).joined(fits[1].scaled(0.5))
    expected = sum(fit.sums(COLUMNS) + fit.base for fit in fits) / 2
    assert mean.sums(COLUMNS) + mean.base == pytest.approx(expected, abs=1e-5)
