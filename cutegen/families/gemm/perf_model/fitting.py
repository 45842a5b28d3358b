"""Fits the model to what was measured on one GPU, starting from the fit that the package ships.

First the two rates, by which a GPU differs most from the one that was measured at length: they are facts of
the GPU, and few points tell them. Then trees on what is left, as far as they choose better on matrices that
they have not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from cutegen.families.gemm.perf_model.blackwell import estimator_of
from cutegen.families.gemm.perf_model.boosting import Boosting
from cutegen.families.gemm.perf_model.fitted import Fit
from cutegen.families.gemm.perf_model.gpu_params import Factors, find_machine, scaled
from cutegen.families.gemm.perf_model.judging import (
    behind_best,
    folds,
    matrices,
    nearness,
    regret,
    regrets,
)
from cutegen.families.gemm.perf_model.roofline import FEATURES, Rates, rooflines_of
from cutegen.families.gemm.perf_model.torch_mm import TorchMm, describe
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Space

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Doubles = NDArray[numpy.float64]

__all__ = ["MachineRefit", "Measured", "Refit", "find_rates", "refit", "refit_machine"]

#: Few and shallow: there are some thousand points at most.
_TREES = Boosting(trees=60, depth=4, rate=0.15, hold=6.0, borders=24)
_TORCH_TREES = Boosting(trees=20, depth=2, rate=0.2, hold=6.0, borders=12)
#: Steps by which rates are sought, as factors.
_STEPS = (1.3, 1.1, 1.03)


@dataclass(frozen=True)
class Measured:
    """Kernels timed on one problem.

    Attributes:
        problem: In 16 bits.
        configs: Of the default kernels, with their ``split_k``.
        us: Microseconds of each.
        torch_us: Microseconds of ``torch.mm``.
    """

    problem: Problem
    configs: Sequence[Config]
    us: Sequence[float]
    torch_us: float


@dataclass(frozen=True)
class Refit:
    """A fit to one GPU.

    Attributes:
        rates: How fast the GPU is beside the H200.
        trees: Corrections of the kernels' times, those of the first fit among them.
        torch_trees: Corrections of the time of ``torch.mm``, likewise.
        judged: Regret of the choice on matrices left out: by the first fit alone (``shipped``), with the
            rates (``rates``), with the trees (``trees``); and which of the last two was ``taken``.
    """

    rates: Rates
    trees: Trees
    torch_trees: Trees
    judged: dict[str, Any]

    @property
    def scales(self) -> dict[str, float]:
        """The rates by name."""
        return self.rates._asdict()

    def to_json(self) -> dict[str, Any]:
        """Return what :func:`~cutegen.families.gemm.perf_model.fitted.read_fit` reads, without a header."""
        return {
            "features": list(FEATURES),
            "rates": self.rates._asdict(),
            **self.trees.to_json(),
            "torch_mm": self.torch_trees.to_json(),
        }


@dataclass(frozen=True)
class MachineRefit:
    """What a target that nobody had measured turned out to be.

    Attributes:
        factors: By what the constants of its machine are multiplied.
        judged: Regret of the choice among what was measured, by the model that the package ships
            (``shipped``) and with the factors (``factors``), which are ``taken``. Five numbers leave nothing
            to hold out.
    """

    factors: Factors
    judged: dict[str, Any]

    @property
    def scales(self) -> dict[str, float]:
        """The factors by name."""
        return self.factors._asdict()

    def to_json(self) -> dict[str, Any]:
        """Return what :func:`~cutegen.families.gemm.perf_model.gpu_params.read_factors` reads."""
        return {"factors": self.scales}


def refit(measured: Sequence[Measured], sm_count: int, start: Fit, torch_start: TorchMm) -> Refit:
    """Return the fit to ``measured``.

    Args:
        measured: At least two shapes.
        sm_count: SMs of the GPU.
        start: The fit to correct.
        torch_start: The same for ``torch.mm``.
    """
    import numpy as np

    us, shape = _timed(measured)
    weight = nearness(behind_best(shape, us))
    shipped = _predict(measured, sm_count, start, start.rates)[0]
    rates = find_rates(measured, sm_count, start)
    logs, features = _predict(measured, sm_count, start, rates)
    wanted, fold = np.log(us) - logs, folds(matrices([each.problem for each in measured]))
    left_out = _TREES.left_out(features, wanted, weight, fold[shape])
    judged: dict[str, Any] = {
        name: regret(regrets(shape, us, found))
        for name, found in (("shipped", shipped), ("rates", logs), ("trees", logs + left_out))
    }
    better = judged["trees"]["first"] <= judged["rates"]["first"]
    judged["taken"] = "trees" if better else "rates"
    trees = _TREES.fit(features, wanted, weight) if better else _constant(float(np.median(wanted)))
    return Refit(
        rates, start.trees.joined(trees), _torch_trees(measured, sm_count, torch_start, fold), judged
    )


def _timed(measured: Sequence[Measured]) -> tuple[Doubles, NDArray[numpy.intp]]:
    """Return the microseconds of all points, and the number of each one's problem."""
    import numpy as np

    us = np.concatenate([np.array(each.us, float) for each in measured])
    return us, np.repeat(np.arange(len(measured)), [len(each.us) for each in measured])


def _predict(measured: Sequence[Measured], sm_count: int, fit: Fit, rates: Rates) -> tuple[Doubles, Doubles]:
    """Return the logarithms of predicted times, and the features of each point as a row."""
    import numpy as np

    logs, rows = [], []
    for each in measured:
        time, features = rooflines_of(each.problem, each.configs, sm_count, rates)
        logs.append(np.log(time.astype(float)) + fit.trees.sums(features) + fit.trees.base)
        rows.append(features.T)
    return np.concatenate(logs), np.concatenate(rows).astype(float)


def refit_machine(measured: Sequence[Measured], space: Space, sm_count: int) -> MachineRefit:
    """Return what fits the machine of a target that nobody had measured to ``measured``.

    The physics stays as it is; what was taken from public sources or assumed is scaled until it is least off.
    """
    import numpy as np

    us, shape = _timed(measured)
    weight, start = nearness(behind_best(shape, us)), find_machine(space.arch)
    derived = [[space.derive(c, each.problem, space.arch) for c in each.configs] for each in measured]

    def predicted(factors: Factors) -> Doubles:
        machine, found = scaled(start, factors), []
        for each, numbers in zip(measured, derived, strict=True):
            estimator = estimator_of(each.problem, space.arch, sm_count, machine)
            pairs = zip(each.configs, numbers, strict=True)
            found += [estimator.estimate(config, number).time_us for config, number in pairs]
        return np.log(found)

    def error(factors: Factors) -> float:
        return float((abs(np.log(us) - predicted(factors)) * weight).sum() / weight.sum())

    best, least = Factors(), error(Factors())
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for name, factor in product(Factors._fields, (1 / step, step)):
                tried = best._replace(**{name: getattr(best, name) * factor})
                if (off := error(tried)) < least:
                    best, least, moved = tried, off, True
    judged: dict[str, Any] = {
        name: regret(regrets(shape, us, predicted(factors)))
        for name, factors in (("shipped", Factors()), ("factors", best))
    }
    return MachineRefit(best, {**judged, "taken": "factors"})


def find_rates(measured: Sequence[Measured], sm_count: int, fit: Fit) -> Rates:
    """Return the rates under which ``fit`` is least off ``measured``, found by steps that become smaller."""
    import numpy as np

    us, shape = _timed(measured)
    wanted, weight = np.log(us), nearness(behind_best(shape, us))

    def error(rates: Rates) -> float:
        off = abs(wanted - _predict(measured, sm_count, fit, rates)[0])
        return float((off * weight).sum() / weight.sum())

    best, least = fit.rates, error(fit.rates)
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for clock, memory in product((1 / step, 1.0, step), repeat=2):
                tried = Rates(best.clock * clock, best.memory * memory)
                off = least if tried == best else error(tried)
                if off < least:
                    best, least, moved = tried, off, True
    return best


def _torch_trees(
    measured: Sequence[Measured], sm_count: int, start: TorchMm, fold: NDArray[numpy.intp]
) -> Trees:
    """Return corrections of the time of ``torch.mm``: trees where they help on what they have not seen."""
    import numpy as np

    sizes = [(each.problem.m, each.problem.n, each.problem.k) for each in measured]
    features = np.array([describe(*mnk, sm_count)[1] for mnk in sizes])
    known = np.log([start.time_us(*mnk, sm_count) for mnk in sizes])
    wanted = np.log([each.torch_us for each in measured]) - known
    middle = float(np.median(wanted))
    left_out = _TORCH_TREES.left_out(features, wanted, None, fold)
    better = abs(wanted - left_out).mean() < abs(wanted - middle).mean()
    return start.trees.joined(_TORCH_TREES.fit(features, wanted) if better else _constant(middle))


def _constant(value: float) -> Trees:
    """Return no trees, but what is added before them."""
    import numpy as np

    none = np.zeros((1, 0))
    return Trees(none.astype(np.intp), none.astype(np.float32), np.zeros((0, 2), np.float32), 1, value)
