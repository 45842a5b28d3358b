"""The kernels that answer untuned problems of one signature, and the choice among them by the fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from cutegen.families.gemm.perf_model.fitted import KernelColumns, load_fit
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Space, as_flag, as_integer

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from cutegen.families.gemm.perf_model.fitted import Array

__all__ = ["KernelSet", "default_kernels", "kernel_set"]

#: What the space's rules allow at most; whoever they forbid the more is asked last, so few are asked in vain.
_SPLIT_TILES, _SWAPPED_ROWS = 1024, 4096
#: Splits of k are tried that fill the GPU so many times over.
_ROUNDS = (1, 2)


class KernelSet:
    """Default candidates in the arrays that the fit takes: those that split k come once for each round.

    Args:
        space: Where configs come from.
        problem: Of the signature that the kernels are for.
        sm_count: SMs of the GPU.
    """

    def __init__(self, space: Space, problem: Problem, sm_count: int) -> None:
        import numpy as np

        self._space, self._sm_count = space, sm_count
        kernels = default_kernels(space, problem)
        found = [(c, r) for c in kernels for r in (_ROUNDS if c["split_k"] != 1 else (0,))]
        self._configs = [config for config, _ in found]
        self._columns = KernelColumns(self._configs, sm_count)
        self._rounds = np.array([rounds for _, rounds in found], np.float32)
        domain = [as_integer(value) for value in space.domains["split_k"]]
        self._most = next(value for value in domain if value + 1 not in domain)
        c = self._columns
        #: What the kernel's m and n must be above, so that clusters are not more than twice as tall or wide.
        self._least_m = np.where(c.cluster_m > 1, c.side_m / 2, 0)
        self._least_n = np.where(c.cluster_n > 1, c.side_n / 2, 0)
        self._last: tuple[Problem, Config, float] | None = None
        self._orders = list(product(space.domains["swizzle_size"], space.domains["raster_along_m"]))

    def by_time(self, problem: Problem) -> Iterator[tuple[float, Config]]:
        """Yield microseconds and configs that are valid for ``problem``, the fastest predicted first."""
        splits, likely = self._splits(problem)
        for time_us, at in load_fit().fastest(problem, self._columns, splits, likely):
            config = self._configs[at].replace(split_k=int(splits[at]))
            if not self._space.explain(problem, config):
                yield time_us, self._ordered(problem, config)

    def fastest(self, problem: Problem) -> Config | None:
        """Return the first of :meth:`by_time`, None if no kernel is valid."""
        time_us, config = next(self.by_time(problem), (0.0, None))
        if config is not None:
            self._last = problem, config, time_us
        return config

    def last_us(self, problem: Problem, config: Config) -> float | None:
        """Return the microseconds of ``config`` if :meth:`fastest` chose it last, else None."""
        last = self._last
        return last[2] if last is not None and last[:2] == (problem, config) else None

    def _splits(self, problem: Problem) -> tuple[Array, NDArray[numpy.bool_]]:
        """``split_k`` of each kernel, which fills the GPU as far as there are k steps for it; and whether
        the kernel is valid by those rules of the space that forbid most."""
        import numpy as np

        c = self._columns
        rows = np.where(c.swap_ab, problem.n, problem.m)
        cols = np.where(c.swap_ab, problem.m, problem.n)
        clusters = np.ceil(rows / c.side_m) * np.ceil(cols / c.side_n) * problem.batch
        most = np.minimum(self._most, problem.k // (4 * c.tile_k))
        fitting = np.clip(np.floor(self._rounds * c.resident / clusters), 2, np.maximum(2, most))
        found: Array = np.where(self._rounds > 0, fitting, 1).astype(np.float32)
        fits = (rows > self._least_m) & (cols > self._least_n)
        if problem.m > _SWAPPED_ROWS:
            fits &= ~c.swap_ab
        return found, fits & ((self._rounds == 0) | ((most >= 2) & (clusters * c.blocks <= _SPLIT_TILES)))

    def _ordered(self, problem: Problem, config: Config) -> Config:
        """``config`` with the rasterization of least traffic; the simplest if all tiles run at once."""
        tiling = Tiling(problem, self._sm_count, find_machine(self._space.arch))
        geometry = tiling.geometry(config)
        orders = self._orders if geometry.clusters > geometry.resident else self._orders[:1]
        swizzle, along = min(orders, key=lambda o: tiling.traffic(config, as_integer(o[0]), as_flag(o[1])))
        return config.replace(swizzle_size=swizzle, raster_along_m=along)


def default_kernels(space: Space, problem: Problem) -> list[Config]:
    """Return the space's default candidates for the signature of ``problem``, valid at its sizes or not."""
    safe = space.default(problem)
    return [safe.replace(**knobs) for knobs in space.default_candidates(problem)]


@dataclass(frozen=True)
class _Key:
    """What a set of kernels depends on; the rest is what it is made from."""

    arch: str
    signature: object
    sm_count: int
    space: Space = field(compare=False)
    problem: Problem = field(compare=False)


@lru_cache(maxsize=64)
def _made(key: _Key) -> KernelSet:
    return KernelSet(key.space, key.problem, key.sm_count)


def kernel_set(space: Space, problem: Problem, sm_count: int) -> KernelSet:
    """Return the kernels for the signature of ``problem``, prepared once."""
    return _made(_Key(space.arch.name, problem.signature, sm_count, space, problem))
