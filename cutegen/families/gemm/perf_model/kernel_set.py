"""Kernels for problems of one signature, and the choice among them by the fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

from cutegen.families.gemm.perf_model.fitted import KEPT, Found, Look, fit_of
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.native_model import SOURCE, NativeModel
from cutegen.families.gemm.perf_model.roofline import Cover, KernelColumns, memory_bytes_us, scalars
from cutegen.families.gemm.perf_model.traffic import KEPT as KEPT_IN_L2
from cutegen.families.gemm.perf_model.traffic import NEAR, Tiling, element_bytes
from cutegen.families.gemm.perf_model.wave_order import Order, least_loads, orders_of
from cutegen.families.gemm.problem import Problem, Signature
from cutegen.space import Config, Space, Value, as_integer
from cutegen.space.checks import Checks, Left, all_hold
from cutegen.strategy import Default
from cutegen.system.remembered import Remembered

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from cutegen.families.gemm.perf_model.roofline import Array
    from cutegen.strategy import OpenLibrary

__all__ = ["KernelSet", "default_kernels", "every_kernel", "kernel_set"]

#: What the space's rules allow at most; whoever they forbid the more is asked last, so few are asked in vain.
_SPLIT_TILES, _SWAPPED_ROWS = 1024, 6144
#: Where D is not aligned, swapped kernels read C along its columns: with more rows than this they are not
#: likely. Source: two such products on an H200 took 1.4 and 1.9 times as long as predicted, others 1.13 times
#: at most.
_SWAPPED_C = 32
#: Splits of k are tried that fill the GPU so many times over.
_ROUNDS = (1, 2)


class KernelSet:
    """Kernels in the arrays that the fit takes: those that split k come once for each round.

    Args:
        space: Where configs come from.
        problem: Of the signature that the kernels are for.
        sm_count: SMs of the GPU.
        kernels: A config of each.
        kept: So many of those that a first look puts first are looked at closely.
    """

    def __init__(
        self, space: Space, problem: Problem, sm_count: int, kernels: Sequence[Config], kept: int = KEPT
    ) -> None:
        import numpy as np

        self._space, self._sm_count, self._kept = space, sm_count, kept
        self._problem = problem
        whole = [config for config in kernels if config["split_k"] == 1]
        divided = [(config, rounds) for config in kernels if config["split_k"] != 1 for rounds in _ROUNDS]
        self._configs = whole + [config for config, _ in divided]
        self._valid = _Valid(space, problem, self._configs)
        self._fit = fit_of(space.arch)
        self._columns = c = KernelColumns(self._configs, sm_count, self._fit.rates)
        self._whole = len(whole)
        domain = [as_integer(value) for value in space.domains["split_k"]]
        self._most = next(value for value in domain if value + 1 not in domain)
        #: How many clusters fill the GPU, so many times over; and elements of k that a part needs.
        self._filling = np.array([rounds for _, rounds in divided], float) * c.resident[self._whole :]
        self._part = 4 * c.tile_k[self._whole :]
        #: What the kernel's m and n must be above, so that clusters are not more than twice as tall or wide.
        self._least = np.where(c.sharing[::-1] > 1, c.sides / 2, 0)
        self._native: NativeModel | None = None
        #: Complete configs by kernel, ``split_k`` and order of tiles: problems ask for the same few again.
        self._complete: dict[tuple[int, int, Order], Config] = {}
        self._machine = find_machine(space.arch)
        self._orders = orders_of(space.domains["swizzle_size"], space.domains["raster_along_m"])

    def by_time(self, problem: Problem, *, rest: bool = True) -> Iterator[tuple[float, Config]]:
        """Yield microseconds and configs that are valid for ``problem``, the fastest predicted first.

        Those that hardly suit it follow if the ``rest`` is asked for.
        """
        tiling = self._tiling(problem)
        for found in self._found(problem):
            if (rest or found.likely) and self._valid(found.at, found.split, problem):
                order = self._best_order(problem, found, tiling)
                yield found.time_us, self._config(found.at, found.split, order)

    def fastest(self, problem: Problem) -> Default | None:
        """Return the first of :meth:`by_time`; None if no kernel is valid."""
        for found in self._found(problem):
            if self._valid(found.at, found.split, problem):
                order = self._best_order(problem, found)
                return Default(self._config(found.at, found.split, order), found.time_us)
        return None

    def ordered(
        self,
        problem: Problem,
        config: Config,
        split: int = 1,
        among: Mapping[str, Sequence[Value]] = MappingProxyType({}),
    ) -> Config:
        """``config`` with the order of tiles that is best, of values in ``among`` for knobs that it names.

        It is as it was where the space has no such order.
        """
        orders = [
            (swizzle, along)
            for swizzle, along in self._orders
            if swizzle in among.get("swizzle_size", (swizzle,))
            and along in among.get("raster_along_m", (along,))
        ]
        if not orders:
            return config
        swizzle, along = self._order(self._tiling(problem), config, split, orders)
        return config.replace(split_k=split, swizzle_size=swizzle, raster_along_m=along)

    def _best_order(self, problem: Problem, found: Found, tiling: Tiling | None = None) -> Order:
        """Return the best of all orders for a kernel that was found.

        Args:
            problem: What is computed.
            found: The kernel.
            tiling: Of the problem, where several kernels are asked about.
        """
        order = self._native.best_order(problem, found.at, found.split) if self._native else None
        if order is not None:
            return order
        tiling = tiling or self._tiling(problem)
        return self._order(tiling, self._configs[found.at], found.split, self._orders)

    def _order(self, tiling: Tiling, config: Config, split: int, orders: list[Order]) -> Order:
        least = self._native.least_loads if self._native else least_loads
        return tiling.best_order(config, split, orders, least)

    def _config(self, at: int, split: int, order: Order) -> Config:
        known = self._complete.get((at, split, order))
        if known is None:
            knobs = {"split_k": split, "swizzle_size": order[0], "raster_along_m": order[1]}
            known = self._complete[at, split, order] = self._configs[at].replace(**knobs)
        return known

    def _tiling(self, problem: Problem) -> Tiling:
        return Tiling(problem, self._sm_count, self._machine)

    def prepare(self, library: OpenLibrary) -> None:
        """Ask now what a first choice would ask, and leave looks to a library, if it is there."""
        for at in range(self._whole):
            self._valid.prepare(at, 1)
        opened = library(SOURCE) if self._native is None else None
        if opened is None:
            return
        known, c = scalars(), self._columns
        names = ("fixed_us", "reduce_us", "most_waves", "most_clusters")
        numbers = {name: float(getattr(known, name)) for name in names}
        in_bytes, out_bytes = element_bytes(self._problem)
        traffic: dict[str, float] = {
            "in_bytes": in_bytes,
            "out_bytes": out_bytes,
            "l2_bytes": self._machine.l2_bytes,
            "memory_bytes_us": memory_bytes_us(self._fit.rates),
        }
        arrays = {"least": self._least, "filling": self._filling, "part": self._part}
        self._native = NativeModel(
            opened,
            c,
            arrays,
            {
                **numbers,
                **traffic,
                "kept": KEPT_IN_L2,
                "near": NEAR,
                "split_tiles": _SPLIT_TILES,
                "most_split": self._most,
            },
            self._whole,
            self._kept,
            self._fit,
            self._orders,
        )

    def _found(self, problem: Problem) -> Iterator[Found]:
        """Yield all kernels, the fastest predicted first; few ever ask for more than a library finds."""
        known = 0
        if self._native is not None:
            yield from self._native.best(problem, swapped=self._swapped_is_likely(problem))
            known = self._native.most
        yield from islice(self._fit.fastest(self._look(problem), self._kept), known, None)

    def _look(self, problem: Problem) -> Look:
        cover = Cover.of(problem, self._columns)
        splits, likely = self._splits(problem, cover)
        return self._fit.look(problem, self._columns, splits, likely, cover)

    def _swapped_is_likely(self, problem: Problem) -> bool:
        most = _SWAPPED_C if problem.epilogue.beta and problem.unaligned_out else _SWAPPED_ROWS
        return problem.m <= most

    def _splits(self, problem: Problem, cover: Cover) -> tuple[Array, NDArray[numpy.bool_]]:
        """``split_k`` of each kernel, which fills the GPU as far as there are k steps for it; and whether
        the kernel is valid by those rules of the space that forbid most."""
        import numpy as np

        first, c = self._whole, self._columns
        inside = cover.extents > self._least
        likely = inside[0] & inside[1]
        if not self._swapped_is_likely(problem):
            likely &= ~c.swap_ab
        count = cover.total[first:]
        most = np.minimum(self._most, np.floor(np.float32(problem.k) / self._part))
        splits = np.ones(len(likely), np.float32)
        fitting = np.maximum(np.floor(self._filling / count), 2)
        splits[first:] = np.minimum(fitting, np.maximum(most, 2))
        likely[first:] &= (most >= 2) & (count * c.blocks[first:] <= _SPLIT_TILES)
        return splits, likely


class _Valid:
    """Says whether kernels are valid; what sizes do not decide is asked once for a value of ``split_k``."""

    def __init__(self, space: Space, problem: Problem, configs: Sequence[Config]) -> None:
        self._checks, self._configs = Checks(space, problem), configs
        #: By kernel and ``split_k``; None for what is never valid.
        self._left: dict[tuple[int, int], Left | None] = {}

    def __call__(self, at: int, split: int, problem: Problem) -> bool:
        if (at, split) not in self._left:
            self.prepare(at, split)
        left = self._left[at, split]
        return left is not None and all_hold(left, problem)

    def prepare(self, at: int, split: int) -> None:
        """Ask the rules that sizes do not decide."""
        config = self._configs[at]
        config = config if config["split_k"] == split else config.replace(split_k=split)
        self._left[at, split] = self._checks.left(config)


def default_kernels(space: Space, problem: Problem) -> list[Config]:
    """Return the space's default candidates for the signature of ``problem``, valid at its sizes or not."""
    safe = space.default(problem)
    return [safe.replace(**knobs) for knobs in space.default_candidates(problem)]


def every_kernel(
    space: Space, problem: Problem, fixed: Mapping[str, Sequence[Value]] | None = None
) -> Iterator[Config]:
    """Yield a config of each kernel that is valid for ``problem`` and of which a fit says something.

    Args:
        space: Where configs come from.
        problem: What is computed.
        fixed: Knobs restricted to some values. Others that overlap launches, add partial sums or store D
            are as in :func:`default_kernels`. Knobs that the space of a family beside the GEMM lacks do not
            count.
    """
    usual, fixed = space.default(problem), fixed or {}
    names = ("swizzle_size", "raster_along_m", "stream_k", "reduction")  # families that borrow may lack some
    plain = {knob: (usual[knob],) for knob in names if knob in usual}
    allowed = [as_integer(value) for value in fixed.get("split_k", (1, 2))]
    once, parted = [s for s in allowed if s == 1], [s for s in allowed if s > 1][:1]
    for splits, staged in ((once, usual.flag("use_tma_store")), (parted, False)):
        if splits:
            kind = {**plain, "use_pdl": (True,), "use_tma_store": (staged,), **fixed, "split_k": splits}
            yield from space.configs(problem, {k: v for k, v in kind.items() if k in space.domains})


#: Sets of default kernels by what they depend on.
_sets: Remembered[tuple[Space, Signature, int], KernelSet] = Remembered(64)


def kernel_set(space: Space, problem: Problem, sm_count: int) -> KernelSet:
    """Return the default kernels for the signature of ``problem``, prepared once."""
    key = space, problem.signature, sm_count
    found = _sets.get(key)
    if found is None:
        found = _sets.keep(key, KernelSet(space, problem, sm_count, default_kernels(space, problem)))
    return found
