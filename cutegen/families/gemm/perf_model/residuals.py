"""What measured kernels teach about the model's errors: which knobs it favours too much on this problem."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log, log2

from cutegen.space import Config, Space

__all__ = ["Lessons"]

#: How strongly corrections are held back; about so many kernels must agree before a knob is believed to
#: matter. Source: sweeps of 30 shapes on an H200, where 1 to 10 did equally well.
_HOLD = 3.0


class Lessons:
    """A linear correction of the logarithm of predicted times, by knob, from what was measured.

    Numbers count by their logarithm, pairs by both of theirs and by the tile's part of the output, words and
    switches by whether they have a value. Ridge regression keeps what few kernels say small.

    Args:
        space: Whose configs are measured.
        errors: Configs with the logarithm of measured over predicted time, at least one.
    """

    def __init__(self, space: Space, errors: Sequence[tuple[Config, float]]) -> None:
        self._space = space
        rows = [self._features(config) for config, _ in errors]
        self._mean = sum(error for _, error in errors) / len(errors)
        centred = [error - self._mean for _, error in errors]
        width = len(rows[0])
        self._middle = [sum(row[i] for row in rows) / len(rows) for i in range(width)]
        rows = [[x - m for x, m in zip(row, self._middle, strict=True)] for row in rows]
        normal = [
            [sum(row[i] * row[j] for row in rows) + (_HOLD if i == j else 0.0) for j in range(width)]
            for i in range(width)
        ]
        pull = [sum(row[i] * error for row, error in zip(rows, centred, strict=True)) for i in range(width)]
        self._weights = _solve(normal, pull)

    def corrected(self, config: Config, time_us: float) -> float:
        """Return the logarithm of the time that ``config`` should take if the model says ``time_us``."""
        features = self._features(config)
        shift = sum(w * (x - m) for w, x, m in zip(self._weights, features, self._middle, strict=True))
        return log(time_us) + self._mean + shift

    def _features(self, config: Config) -> list[float]:
        found: list[float] = []
        for knob, domain in self._space.domains.items():
            value = config.get(knob, domain[0])
            if isinstance(value, tuple):
                found += [log2(extent) for extent in value]
            elif isinstance(value, (bool, str)):
                found += [float(value == other) for other in domain[1:]]
            else:
                found.append(log2(value) if isinstance(value, int) and value > 0 else 0.0)
        return found + list(_footprint(config))


def _footprint(config: Config) -> Iterable[float]:
    """Logarithms of rows and columns of the output that a tile covers."""
    tiles = (config.pair(knob) for knob in ("tile_shape_mn", "mma_tiler_mn") if knob in config)
    rows, columns = (log2(extent) for extent in next(tiles, (1, 1)))
    return (columns, rows) if config.get("swap_ab") else (rows, columns)


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve a positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found
