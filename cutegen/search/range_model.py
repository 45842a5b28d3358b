"""What configs take at sizes where they were not measured: the model's prediction, mended by measurements.

A config that ran a tenth longer than predicted at one size will do so at the next. How far that holds depends
on how far the sizes are apart, and on whether the tiles along the size became more in between: a config is
another one with one tile and with two. Where a config was not measured nearby, what alike configs taught
counts instead, and little is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from math import exp, log, log2
from typing import TYPE_CHECKING, NamedTuple

from cutegen.space import Config

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Doubles = NDArray[numpy.float64]

__all__ = ["Estimate", "Estimates", "Predict", "TileOf"]

#: Predicted microseconds of a config at a size; None if it is not valid there.
Predict = Callable[[int, Config], "float | None"]
#: How many values of the size share a tile of a config; 1 where tiles do not matter.
TileOf = Callable[[Config], int]

# Source of the numbers below: chosen on simulated GPUs on which kernels are off the model by errors of the
# size that it has on an H200 (tests/simulated_gpu.py), then tried on the sweep of an H200: 147 shapes,
# each estimated from the other m of its (n, k), were 1.2 % behind the best of about 90 configs in the
# geometric mean, against 1.3 % for the model's own choice. Regret is flat around them in both.
#: Doublings over which a config's own error fades, and over which that of alike configs does.
_OWN_REACH, _SHARED_REACH = 0.4, 1.0
#: What one more tile counts as, in doublings, where there was one.
_NEW_TILE = 1.0
#: By what factor a config that differs in one knob more teaches less.
_UNLIKE = 0.6
#: Weight of what alike configs taught, beside a measurement at the very size.
_SHARED_WEIGHT = 0.3
#: By how much an estimate may be off that no measurement of the config supports, as a logarithm. Source: of
#: the kernels in docs/results/wide_tiles.json.xz the fit is off by 0.01 to 0.035 in most kinds of tiles.
_DOUBT = 0.03


class Estimate(NamedTuple):
    """Microseconds, and how well they are known: from 0, by nothing but alike configs, towards 1."""

    time_us: float
    sureness: float

    @property
    def cautious_us(self) -> float:
        """As long as it may well be: for answers, so that none was never seen."""
        return self.time_us * exp(_DOUBT * (1 - self.sureness))

    @property
    def hopeful_us(self) -> float:
        """As short as it may well be: for what to measure."""
        return self.time_us * exp(_DOUBT * (self.sureness - 1))


class Estimates:
    """Learns from measurements of configs at some sizes of a range and estimates all others.

    Args:
        predict: The model.
        tile_of: Tiles along the size.
    """

    def __init__(self, predict: Predict, tile_of: TileOf) -> None:
        self._predict = predict
        self._tile_of = tile_of
        self._measured: dict[int, dict[Config, float]] = {}
        self._errors: dict[Config, dict[int, float]] = {}
        self._sizes: set[int] = set()
        self._alike: dict[Config, Doubles] = {}
        self._around: dict[int, tuple[Doubles, Doubles]] = {}

    @property
    def measured(self) -> Mapping[int, Mapping[Config, float]]:
        """Microseconds of each config at each size that was measured."""
        return self._measured

    def learn(self, size: int, times_us: Mapping[Config, float]) -> None:
        """Take in what configs took at ``size``, measured beside each other."""
        self._measured.setdefault(size, {}).update(times_us)
        self._around.clear()
        self._sizes.add(size)
        for config, took in times_us.items():
            predicted = self._predict(size, config)
            if predicted is not None:
                self._errors.setdefault(config, {})[size] = log(took / predicted)

    def estimate(self, size: int, config: Config) -> Estimate | None:
        """Return what ``config`` takes at ``size``, measured or estimated; None if it is not valid there."""
        known = self._measured.get(size, {}).get(config)
        if known is not None:
            return Estimate(known, 1.0)
        predicted = self._predict(size, config)
        if predicted is None:
            return None
        errors, weight = self._own(size, config)
        total = weight + _SHARED_WEIGHT
        error = (errors + _SHARED_WEIGHT * self._shared(size, config)) / total
        return Estimate(predicted * exp(error), weight / total)

    def _own(self, size: int, config: Config) -> tuple[float, float]:
        """Return the sum of the config's errors by weight, and the sum of the weights."""
        tile, errors, weights = self._tile_of(config), 0.0, 0.0
        tiles = -(-size // tile)
        for other, error in self._errors.get(config, {}).items():
            there = -(-other // tile)
            away = abs(log2(size / other)) + _NEW_TILE * abs(tiles - there) / min(tiles, there)
            weight = exp(-away / _OWN_REACH)
            errors += weight * error
            weights += weight
        return errors, weights

    def _shared(self, size: int, config: Config) -> float:
        """Return the mean error of configs near ``size``, of those most that are most alike."""
        errors, weights = self._errors_around(size)
        alike = self._likeness(config)
        return float(alike @ errors) / (float(alike @ weights) + 1e-9)

    def _likeness(self, config: Config) -> Doubles:
        """Return how alike each measured config is."""
        import numpy as np

        known = self._alike.get(config)
        seen = 0 if known is None else len(known)
        if known is None or seen < len(self._errors):
            new = [_likeness(config, other) for other in islice(self._errors, seen, None)]
            known = self._alike[config] = np.array(new if known is None else [*known.tolist(), *new])
        return known

    def _errors_around(self, size: int) -> tuple[Doubles, Doubles]:
        """Return each config's errors, summed by nearness of their sizes, and the sums of the nearness."""
        import numpy as np

        known = self._around.get(size)
        if known is None:
            near = {at: exp(-abs(log2(size / at)) / _SHARED_REACH) for at in self._sizes}
            errors = [sum(near[at] * error for at, error in e.items()) for e in self._errors.values()]
            weights = [sum(map(near.__getitem__, found)) for found in self._errors.values()]
            known = self._around[size] = (np.array(errors), np.array(weights))
        return known


def _likeness(a: Config, b: Config) -> float:
    return float(_UNLIKE ** sum(a.get(knob) != b.get(knob) for knob in {*a, *b}))
