"""What a tuning run over a range of sizes is asked to do, and how much it tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cutegen.digest import Json, digest
from cutegen.errors import UsageError
from cutegen.families.ranges import Range
from cutegen.family import Problem
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from cutegen.text import shown
from cutegen.tuning.request import Effort, Request, find_effort

__all__ = [
    "RANGE_EFFORTS",
    "LoadedRequest",
    "RangeEffort",
    "RangeRequest",
    "SizeRequest",
    "find_range_effort",
]


@dataclass(frozen=True)
class RangeEffort:
    """How much to try. Source of the numbers: tests/simulated_gpu.py, and a limit of 30 s on 16 cores.

    More sizes pay better than more contenders: over 48 sizes of a range on an H200 the best of 12 contenders
    was 0.14 % behind the best of 14 in the geometric mean, while answers for every other size, estimated from
    the rest, were 1.2 % behind. On simulated GPUs with errors of 2 %, three matrices and two seeds each,
    answers for 257 to 1024 rows are 2.2 % behind the best of 120 kernels. With 80 kernels, of which none had
    to be proven, 64 loaded sizes of six contenders came to 2.3 % as well as 96 of four, and 48 of six to
    2.8 %. They were 5.9 % behind when few sizes had ten contenders, and elsewhere the answer ran beside three
    more.

    Attributes:
        ranked: Sizes at which kernels are proposed.
        proposed: Kernels proposed at each.
        kernels: Kernels to compile, at most.
        sizes: Sizes over the range. Those that are not among the loaded ones are measured first.
        loaded: Sizes at which candidates are then timed under load beside a library's call, where this
            changes between sizes. With 0 such sizes are measured as others.
        doubtful: Most sizes that are measured after these, where an answer may be wrong.
        random: Sizes taken at random to see how good the answers are.
        contenders: Candidates that are measured beside each other at a size.
        loaded_contenders: The same at a loaded size.
        seconds: No loaded size, and none in doubt, is begun this many seconds after the run began.
    """

    ranked: int = 96
    proposed: int = 16
    kernels: int = 112
    sizes: int = 40
    loaded: int = 64
    doubtful: int = 48
    random: int = 4
    contenders: int = 10
    loaded_contenders: int = 6
    seconds: float = 24.0


#: How much to try, by the names of :data:`~cutegen.tuning.request.EFFORTS`.
RANGE_EFFORTS: Mapping[str, RangeEffort] = {
    "quick": RangeEffort(
        ranked=48,
        kernels=64,
        sizes=24,
        loaded=40,
        doubtful=8,
        random=4,
        contenders=12,
        seconds=18.0,
    ),
    "standard": RangeEffort(),
    "exhaustive": RangeEffort(
        ranked=160,
        kernels=320,
        sizes=96,
        loaded=192,
        doubtful=96,
        random=24,
        contenders=32,
        loaded_contenders=24,
        seconds=300.0,
    ),
}


def find_range_effort(given: RangeEffort | None, effort: Effort | str) -> RangeEffort:
    """Return the effort that is given; without one that of the name of another effort, if it is by name.

    Raises:
        UsageError: What is given is no effort for a range, or there is none of that name.
    """
    find_effort(effort)
    if given is None:
        return RANGE_EFFORTS[effort] if isinstance(effort, str) else RangeEffort()
    if not isinstance(given, RangeEffort):
        raise UsageError(
            f"range_effort is {shown(given)}; valid: a RangeEffort, or None for as much as effort names"
        )
    return given


#: Launches in a round of a long kernel, and how many times longer than usual the round may become for that.
#: Source: with one or two launches a round, one of two equally fast twins was up to 5 % ahead on an H200.
_LAUNCHES, _LONGEST = 8, 2
#: Most extra rounds of the entries that are tied for fastest, and of the baseline. Source: with three rounds
#: on an H200 whose clock oscillates, ratios to torch.mm at m of 5000 and more were up to 8 % too good.
_DECIDING = 4
#: Seconds of load before a size that the power limit may slow down: which config is fastest hardly depends on
#: it. Source: of 92 sizes of 7680x4608 on an H200 the fastest of five configs was another one after more load
#: at nine, by 1 % to 4 %.
_SETTLE_S = 0.1
#: The same for other sizes, before which the GPU has computed another one. Source: judgement.
_WAKE_S = 0.02
#: Seconds of load before the first loaded size, as before a quick tuning under load, and before the next
#: ones, which follow at once. Source: judgement.
_LOAD_S, _STAY_S = 1.2, 0.02
#: Rounds there, and the shortest turn of an entry in microseconds. Source: judgement; with four configs and
#: torch.mm a size took 0.15 s on an H200.
_LOADED_ROUNDS, _LOADED_US = 5, 2000.0
#: Floating-point operations per microsecond. Source: NVIDIA H200 datasheet, dense bf16, less a third.
_FLOPS_US = 7e8


@dataclass(frozen=True)
class SizeRequest(Request):
    """The request of one size of a range: as of a single problem, but timed in shorter rounds."""

    @property
    def screen_policy(self) -> Policy:
        """How candidates are timed: with a short burn-in, since the GPU is warm from the size before.

        There are no bursts and no launches back to back, which would take as long as another size.
        """
        usual = super().screen_policy.without_regimes()
        long_us = _LAUNCHES * self.problem.flops / _FLOPS_US
        round_us = max(usual.round_us / 2, min(long_us, _LONGEST * usual.round_us))
        settle_s = min(usual.settle_s, _SETTLE_S if usual.clock == "settled" else _WAKE_S)
        extra = max(usual.extra_rounds, _DECIDING)
        return replace(usual, round_us=round_us, settle_s=settle_s, extra_rounds=extra)


@dataclass(frozen=True)
class LoadedRequest(SizeRequest):
    """The request of a size that is timed under load.

    Attributes:
        first: Whether the GPU may have been idle before.
    """

    first: bool = False

    @property
    def screen_policy(self) -> Policy:
        """How candidates are timed: as they run in a program that keeps the GPU busy."""
        usual = super().screen_policy
        return replace(
            usual,
            clock="settled",
            rounds=_LOADED_ROUNDS,
            min_rounds=_LOADED_ROUNDS,
            round_us=max(usual.round_us, _LOADED_US),
            settle_s=_LOAD_S if self.first else _STAY_S,
            prune=0.0,
            extra_rounds=0,
        )


@dataclass(frozen=True)
class RangeRequest:
    """A range to tune and everything that decides what is tried.

    Attributes:
        range: What is to be computed.
        base: The request of its smallest problem: target, restrictions, objective and so on.
        effort: How much to try.

    Raises:
        UsageError: The request asks for what ranges do not have.
    """

    range: Range
    base: Request
    effort: RangeEffort = field(default_factory=RangeEffort)

    def __post_init__(self) -> None:
        if self.base.objective != "time":
            raise UsageError(f"{self.range}: ranges are tuned for time, not for {self.base.objective}")
        if self.base.explicit or self.base.sources != ("cutegen",):
            raise UsageError(f"{self.range}: a range has no candidates but cutegen's own; give single sizes")

    def at(self, size: int) -> SizeRequest | None:
        """Return the request of one size, None if the layout does not allow it."""
        problem = self.range.at(size)
        return None if problem is None else SizeRequest(**self._of_size(problem))

    def under_load(self, size: int, *, first: bool) -> LoadedRequest | None:
        """Return the request of one size that is timed under load, None if the layout forbids the size.

        Args:
            size: Which.
            first: Whether the GPU may have been idle before.
        """
        problem = self.range.at(size)
        return None if problem is None else LoadedRequest(**self._of_size(problem), first=first)

    def _of_size(self, problem: Problem) -> dict[str, Any]:
        base = self.base
        return {
            "problem": problem,
            "arch": base.arch,
            "sm_count": base.sm_count,
            "effort": replace(base.effort, chunk=max(base.effort.chunk, self.effort.contenders + 1)),
            "fixed": base.fixed,
            "seed": base.seed,
            "context": base.context,
        }

    def run_name(self, device: Device | None, toolchain: str) -> str:
        """Return the name of this run: equal names mean that the same question was asked."""
        base = self.base.run_name(device, toolchain)
        question: dict[str, Json] = {"range": str(self.range), "effort": asdict(self.effort), "base": base}
        return digest(question, length=16)
