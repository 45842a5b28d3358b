"""Calibration: default kernels timed on designed problems of one GPU, and the model fitted to them.

Every trial is written down as soon as it is known. A calibration that was interrupted leaves no file; the
same command measures what is missing, on the same GPU and driver.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

from cutegen import __version__
from cutegen.digest import Json, digest
from cutegen.errors import DeviceError, MeasureError
from cutegen.families.gemm.perf_model.fitted import fit_of, is_fitted
from cutegen.families.gemm.perf_model.fitting import MachineRefit, Measured, Refit, refit, refit_machine
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.strategy import defaults_by_time
from cutegen.families.gemm.perf_model.torch_mm import torch_mm_of
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure.context import BACK_TO_BACK
from cutegen.measure.device import Device
from cutegen.measure.statistics import median
from cutegen.records.calibrations import made_on, packaged_arch
from cutegen.space import Config
from cutegen.system.publish import publish
from cutegen.tuning.candidate_runner import PROBLEM_FAILURES
from cutegen.tuning.progress import Progress
from cutegen.tuning.range_request import SizeRequest
from cutegen.tuning.request import Effort
from cutegen.tuning.screening import Screening, SourceCache
from cutegen.tuning.session import Session

__all__ = ["FEWEST", "Calibrated", "CalibrationRun", "designed"]

#: A fit to fewer problems than this says little.
FEWEST = 24
#: Most operations of a problem: a few milliseconds on an H200.
_MOST_FLOPS = 1.5e12
#: Sizes: m to 8192, n and k multiples of 64 between these. Source: those of the recorded sweep.
_MOST_M, _STEP, _N, _K = 8192, 64, (512, 32768), (512, 16384)
#: Values of m that are measured with the same n and k.
_ROWS_EACH = 3
#: Of the kernels timed on a problem, this many are drawn at random from the first so many by prediction.
_DRAWN, _DRAWN_OF = 3, 30


def designed(count: int) -> list[Problem]:
    """Return problems that cover the sizes evenly, in the order in which they are measured.

    The first of them cover the sizes too, so a calibration may end early.
    """
    found: list[Problem] = []
    at = 0
    while len(found) < count:
        at += 1
        n, k = (_between(low, high, _halton(at, base)) for (low, high), base in ((_N, 3), (_K, 5)))
        for row in range(_ROWS_EACH):
            m = round(_MOST_M ** _halton(at * _ROWS_EACH + row, 2))
            problem = Problem(m, n, k)
            if problem.flops <= _MOST_FLOPS and len(found) < count:
                found.append(problem)
    return found


def _halton(at: int, base: int) -> float:
    """Return the ``at``-th number of the Halton sequence of ``base``, between 0 and 1."""
    found, share = 0.0, 1.0
    while at:
        at, digit = divmod(at, base)
        share /= base
        found += digit * share
    return found


def _between(low: int, high: int, share: float) -> int:
    return _STEP * round(low / _STEP * math.exp(share * math.log(high / low)))


@dataclass(frozen=True)
class Calibrated:
    """A finished calibration.

    Attributes:
        device: The GPU.
        problems: How many were measured.
        points: Timed kernels, in all.
        fit: What was fitted.
        document: What the file holds.
        seconds: Of this run.
    """

    device: Device
    problems: int
    points: int
    fit: Refit | MachineRefit
    document: dict[str, Json] = field(repr=False)
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        """Write the file in one step; raises :class:`StoreError`."""
        publish(path, (json.dumps(self.document) + "\n").encode(), "calibration")


class CalibrationRun:
    """Measures and fits; an interrupted one continues where it stopped.

    Args:
        session: Where and with what.
        problems: How many are measured.
        kernels: How many are timed on each.

    Raises:
        ArchError: There is no model of that target.
        DeviceError: There is no GPU.
    """

    def __init__(self, session: Session, *, problems: int, kernels: int) -> None:
        device = session.setting.device
        if device is None:
            raise DeviceError("a calibration measures the GPU at hand, and there is none")
        self._device = device
        self._arch = packaged_arch(device)  # proposals must not follow from an earlier calibration
        self._problems = designed(problems)
        find_machine(self._arch)  # refuses a target without a model
        self._fitted = is_fitted(self._problems[0], self._arch)
        self._children = session.children
        self._kernels = kernels
        self._observe, self._clock = session.observe, session.clock
        self._space = find_space("gemm", self._arch)
        self._render = SourceCache()
        self._start = session.clock()
        run = digest(["calibration", problems, kernels, device.key, time.time_ns() if session.again else 0])
        self._screening = Screening(session, run, self._render)

    def run(self, budget_s: float | None = None) -> Calibrated:
        """Measure what is not known yet, and fit.

        Args:
            budget_s: No further problem is begun after so many seconds.

        Raises:
            MeasureError: Too few problems were measured; the same command continues.
            CutegenError: As :meth:`~cutegen.tuning.AutoTuner.tune`.
        """
        asked = {problem: self._candidates(problem) for problem in self._problems}
        self._children.start_bench()
        found: list[Measured] = []
        for number, (problem, configs) in enumerate(asked.items()):
            if budget_s is not None and self._clock() - self._start >= budget_s:
                break
            self._submit_some(list(asked.items())[number : number + 4])
            one = self._measure(problem, configs)
            found += [] if one is None else [one]
            self._tell("screen", problem, number + 1)
        if len(found) < FEWEST:
            raise MeasureError(
                f"the calibration has {len(found)} problems, and a fit needs {FEWEST} at least; the same "
                "command continues, with a larger --budget if it ended by that"
            )
        return self._conclude(found)

    def _candidates(self, problem: Problem) -> list[Config]:
        """Return the kernels that are predicted to be the fastest, and a few drawn from the next ones."""
        likely = list(islice(defaults_by_time(self._space, problem, self._device.sm_count), _DRAWN_OF))
        count = max(1, self._kernels - _DRAWN)
        rest = likely[count:]
        return likely[:count] + random.Random(str(problem)).sample(rest, min(_DRAWN, len(rest)))

    def _submit_some(self, asked: Sequence[tuple[Problem, Sequence[Config]]]) -> None:
        self._children.submit(
            self._render(problem, config, self._arch) for problem, configs in asked for config in configs
        )

    def _measure(self, problem: Problem, configs: Sequence[Config]) -> Measured | None:
        """Time ``configs`` beside each other and ``torch.mm``; None if fewer than two of them work."""
        request = SizeRequest(
            problem=problem,
            arch=self._arch,
            sm_count=self._device.sm_count,
            effort=replace(Effort(), chunk=len(configs) + 1),
            context=BACK_TO_BACK,
        )
        run = self._screening.start(request)
        try:
            run.screen(configs)
        except PROBLEM_FAILURES:
            return None
        timed = {
            config: attempt.timing
            for config, attempt in run.attempts.items()
            if attempt.timing is not None and not attempt.timing.contended_by
        }
        torch = [timing.reference_us for timing in timed.values() if timing.reference_us is not None]
        if len(timed) < 2 or not torch:
            return None
        times = [timing.paired.mid for timing in timed.values()]
        return Measured(problem, list(timed), times, median(torch))

    def _conclude(self, found: Sequence[Measured]) -> Calibrated:
        sms = self._device.sm_count
        fit: Refit | MachineRefit
        if self._fitted:
            fit = refit(found, sms, fit_of(self._arch), torch_mm_of(self._arch))
        else:
            fit = refit_machine(found, self._space, sms)
        points = sum(len(each.us) for each in found)
        sizes = [list(each.problem.sizes.values())[:3] for each in found]
        provenance: dict[str, Json] = {
            "gpu": self._device.name,
            "driver": self._device.driver_version,
            "cutegen": __version__,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "shapes": len(found),
            "points": points,
            "kernels": len({self._space.compile_view(c) for each in found for c in each.configs}),
            "dtype": "bf16",
            "layout": "kk",
            "smallest": [min(column) for column in zip(*sizes, strict=True)],
            "largest": [max(column) for column in zip(*sizes, strict=True)],
            "regret": fit.judged,
        }
        header: dict[str, Json] = {"arch": self._arch.name, "made_on": made_on(self._device)}
        document = {**header, "provenance": provenance, **fit.to_json()}
        self._tell("done", found[-1].problem, len(self._problems))
        return Calibrated(self._device, len(found), points, fit, document, self._clock() - self._start)

    def _tell(self, stage: str, problem: Problem, done: int) -> None:
        elapsed = self._clock() - self._start
        self._observe(Progress(problem, stage, done, len(self._problems), elapsed_s=elapsed))
