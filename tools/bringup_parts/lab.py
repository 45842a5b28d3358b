"""Points in, outcomes out: kernels compiled or found in a bundle, checked in a child process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cutegen.arch import Arch
from cutegen.build import Artifact, Builder
from cutegen.build.artifact import Failure, Result
from cutegen.build.render import Source, render
from cutegen.digest import Json
from cutegen.errors import CutegenError, DeviceError
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.space import Space
from tools.bringup_parts.points import Point
from tools.bringup_parts.tiers import Tier

__all__ = ["UNMEASURED", "Edit", "Kernels", "Lab", "Record", "outcomes"]

#: The outcome where checking itself failed: the reference does not run, or the operands do not fit.
UNMEASURED = "unmeasured"
#: Changes a rendered kernel; returns it unchanged where there is nothing to change.
Edit = Callable[[str], str]


@dataclass(frozen=True)
class Record:
    """How one trial ended.

    Attributes:
        tier: The tier that it belongs to; ``bisection of`` one for trials that follow a failure.
        point: What was tried.
        outcome: ``ok``, ``build_failed``, ``launch_failed``, ``wrong_result``, ``timeout`` or ``unmeasured``.
        error: Why not ok, in words.
        tail: Whether a tail problem was checked as well.
        repeats: Further runs asked for; None for the engine's own number.
        seconds: Time in the measuring process.
        edited: Whether the kernel was broken on purpose.
    """

    tier: str
    point: Point
    outcome: str
    error: str = ""
    tail: bool = False
    repeats: int | None = None
    seconds: float = 0.0
    edited: bool = False

    @property
    def ok(self) -> bool:
        """Whether it computed the right thing, every time."""
        return self.outcome == "ok"

    @property
    def failed(self) -> bool:
        """Whether the kernel is at fault; where it could not be checked nobody knows."""
        return self.outcome not in ("ok", UNMEASURED)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            "tier": self.tier,
            "problem": str(self.point.problem),
            "config": str(self.point.config),
            "outcome": self.outcome,
            "error": self.error[:500],
            "tail": self.tail,
            "repeats": self.repeats,
            "seconds": round(self.seconds, 4),
            "edited": self.edited,
        }


class Kernels:
    """Compiled kernels by point.

    Args:
        builder: Compiles them, or holds those of a bundle.
        arch: The target.
        compiles: Whether what is missing may be compiled; without it only the store is looked at.
        edit: Breaks every kernel that has its text.
    """

    def __init__(self, builder: Builder, arch: Arch, *, compiles: bool = True, edit: Edit | None = None):
        self._builder = builder
        self._arch = arch
        self._compiles = compiles
        self._edit = edit
        self._found: dict[str, Result | None] = {}
        self._sources: dict[Point, tuple[Source, bool]] = {}

    def source(self, point: Point) -> tuple[Source, bool]:
        """Return the text of a point's kernel, and whether it was broken on purpose."""
        if point not in self._sources:
            source = render(point.problem, point.config, self._arch)
            text = self._edit(source.text) if self._edit else source.text
            self._sources[point] = replace(source, text=text), text != source.text
        return self._sources[point]

    def provide(self, points: Iterable[Point]) -> None:
        """Compile or find what these points need, many at a time.

        Raises:
            BuildError: There is no compiler.
        """
        sources = {source.digest: source for source in (self.source(point)[0] for point in points)}
        missing = [source for name, source in sources.items() if name not in self._found]
        if self._compiles:
            self._found |= {source.digest: result for source, result in self._builder.build(missing)}
        else:
            self._found |= {source.digest: self._builder.find(source) for source in missing}

    def find(self, point: Point) -> Result | None:
        """Return a point's artifact or why there is none; None if it may not be compiled here."""
        self.provide([point])
        return self._found[self.source(point)[0].digest]

    def at_hand(self, tiers: Sequence[Tier]) -> tuple[Tier, ...]:
        """Return the tiers with only those points whose kernels can be had."""
        self.provide(point for tier in tiers for point in tier.points)
        return tuple(
            replace(tier, points=tuple(point for point in tier.points if self.find(point))) for tier in tiers
        )


class Lab:
    """Tries points and keeps a record of each.

    Args:
        kernels: Where kernels come from.
        bench: Checks them in a child process.
        space: Where configs come from.
        sm_count: SMs of the GPU.
        note: Is told of every record.

    Attributes:
        records: Every trial, in order.
    """

    def __init__(
        self, kernels: Kernels, bench: Bench, space: Space, sm_count: int, note: Callable[[Record], None]
    ) -> None:
        self._kernels = kernels
        self._bench = bench
        self._space = space
        self._sm_count = sm_count
        self._note = note
        self._clean: Problem | None = None
        self.records: list[Record] = []

    def attempt(self, point: Point, tier: Tier, name: str = "") -> Record | None:
        """Check a point as ``tier`` does; None if its kernel is not at hand.

        Args:
            point: What to check.
            tier: Says whether tails are run and how often.
            name: What to call the tier in the record, if not by its own name.

        Raises:
            DeviceError: There is no GPU any more.
            BuildError: There is no compiler.
        """
        result = self._kernels.find(point)
        if result is None:
            return None
        edited = self._kernels.source(point)[1]
        record = replace(self._judge(point, tier, result), tier=name or tier.name, edited=edited)
        self.records.append(record)
        self._note(record)
        return record

    def _judge(self, point: Point, tier: Tier, result: Artifact | Failure) -> Record:
        if isinstance(result, Failure):
            return Record(tier.name, point, "build_failed", result.message)
        candidate = self._candidate(point, tier, result)
        try:
            if self._clean != point.problem:
                self._clean = None
                self._bench.open(point.problem)
                self._clean = point.problem
            done = self._bench.check(candidate, tier.repeats)
        except DeviceError:
            raise
        except CutegenError as error:  # the reference, not the kernel
            self._clean = None
            return Record(tier.name, point, UNMEASURED, str(error))
        if not done.ok:
            self._clean = None  # it may have written anywhere
        tail = candidate.tail_problem is not None
        return Record(tier.name, point, done.outcome, done.error, tail, tier.repeats, done.seconds)

    def _candidate(self, point: Point, tier: Tier, artifact: Artifact) -> Candidate:
        candidate = Candidate.of(
            f"trial{len(self.records)}",
            artifact.shared_object,
            artifact.symbol,
            self._space,
            point.config,
            point.problem,
            self._sm_count,
        )
        return candidate if tier.tail else replace(candidate, tail_problem=None, tail_launch=None)

    def run(self, tier: Tier, enough: int) -> list[Record]:
        """Try every point of a tier whose kernel is at hand; stop after ``enough`` failures.

        Raises:
            DeviceError: There is no GPU any more.
            BuildError: There is no compiler.
        """
        self._kernels.provide(tier.points)
        records: list[Record] = []
        for point in tier.points:
            record = self.attempt(point, tier)
            if record is not None:
                records.append(record)
            if sum(each.failed for each in records) >= enough:
                break
        return records


def outcomes(records: Sequence[Record]) -> dict[str, int]:
    """Return how many trials ended how."""
    return dict(Counter(record.outcome for record in records))
