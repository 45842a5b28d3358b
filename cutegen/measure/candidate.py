"""What travels to the measuring process and back: candidates, and results of checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegen.digest import Json
from cutegen.errors import MeasureError
from cutegen.families.registry import find_family, parse_problem
from cutegen.family import Problem
from cutegen.measure.check import Verdict
from cutegen.measure.context import PREDECESSOR
from cutegen.space import Config, Launch, Space

__all__ = ["REFERENCE", "Candidate", "CheckResult"]

#: The name of the baseline among the entries that are timed; no candidate may have it.
REFERENCE = "torch"
#: Tails are launched as if on a GPU with this many SMs, so that persistent kernels compute several tiles per
#: block; larger tails, for configs whose last wave matters, are launched for the real GPU.
_TAIL_SM_COUNT = 8
_LARGE_TAIL = 2**22


@dataclass(frozen=True)
class Candidate:
    """A compiled kernel with the run-time arguments of one config on one problem.

    Attributes:
        name: Names it in results; unique within a call.
        shared_object: The library to load.
        symbol: The function in it.
        launch: Run-time scalars and workspace for ``problem``.
        problem: What it is to compute.
        tail_problem: A smaller problem with odd sizes for the same artifact; None skips that check.
        tail_launch: Run-time scalars and workspace for ``tail_problem``.

    Raises:
        MeasureError: The name is empty or stands for something else, or a tail lacks its launch.
    """

    name: str
    shared_object: Path
    symbol: str
    launch: Launch
    problem: Problem
    tail_problem: Problem | None = None
    tail_launch: Launch | None = None

    def __post_init__(self) -> None:
        if self.name in ("", REFERENCE, PREDECESSOR):
            raise MeasureError(
                f"candidate cannot be named {self.name!r}; the reference is {REFERENCE!r}, what runs before "
                f"each launch {PREDECESSOR!r}"
            )
        if (self.tail_problem is None) != (self.tail_launch is None):
            raise MeasureError(f"candidate {self.name} has a tail problem or a tail launch, but not both")

    @classmethod
    def of(
        cls,
        name: str,
        shared_object: Path,
        symbol: str,
        space: Space,
        config: Config,
        problem: Problem,
        sm_count: int,
    ) -> Candidate:
        """Return the candidate for ``config``, with the smallest tail problem on which it is valid.

        Args:
            name: Names it in results.
            shared_object: The artifact's library.
            symbol: The artifact's function.
            space: The space that ``config`` comes from; it turns configs into run-time arguments.
            config: A valid config.
            problem: What is to be computed.
            sm_count: SMs of the GPU.
        """
        tail = next(
            (p for p in find_family(problem.family).tails(problem) if not space.explain(p, config)), None
        )
        large = tail is not None and _outputs(tail) > _LARGE_TAIL
        tail_sm_count = sm_count if large else min(sm_count, _TAIL_SM_COUNT)
        return cls(
            name=name,
            shared_object=shared_object,
            symbol=symbol,
            launch=space.launch(config, problem, sm_count),
            problem=problem,
            tail_problem=tail,
            tail_launch=None if tail is None else space.launch(config, tail, tail_sm_count),
        )

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; the path becomes absolute."""
        return {
            "name": self.name,
            "shared_object": str(self.shared_object.absolute()),
            "symbol": self.symbol,
            "launch": _launch_to_json(self.launch),
            "problem": str(self.problem),
            "tail_problem": None if self.tail_problem is None else str(self.tail_problem),
            "tail_launch": None if self.tail_launch is None else _launch_to_json(self.tail_launch),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Candidate:
        """Return the candidate that :meth:`to_json` described."""
        tail, launch = data["tail_problem"], data["tail_launch"]
        return cls(
            name=data["name"],
            shared_object=Path(data["shared_object"]),
            symbol=data["symbol"],
            launch=_launch_from_json(data["launch"]),
            problem=parse_problem(data["problem"]),
            tail_problem=None if tail is None else parse_problem(tail),
            tail_launch=None if launch is None else _launch_from_json(launch),
        )


def _outputs(problem: Problem) -> int:
    """Return the elements that a kernel for ``problem`` writes."""
    arguments = find_family(problem.family).arguments(problem)
    return sum(math.prod(argument.shape) for argument in arguments if argument.kind == "out")


def _launch_to_json(launch: Launch) -> dict[str, Json]:
    return {
        "scalars": list(launch.scalars),
        "workspace_bytes": launch.workspace_bytes,
        "zeroed": launch.zeroed,
    }


def _launch_from_json(data: Mapping[str, Any]) -> Launch:
    return Launch(tuple(data["scalars"]), data["workspace_bytes"], data["zeroed"])


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a candidate against the reference.

    Attributes:
        outcome: ``ok``, ``wrong_result``, ``launch_failed`` or ``timeout``.
        error: Why not ok, in words; empty when ok.
        verdict: The comparison on the problem itself; None if it did not take place.
        tail: The comparison on the tail problem; None if it did not take place.
        seconds: Time the check took.
    """

    outcome: str
    error: str = ""
    verdict: Verdict | None = None
    tail: Verdict | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the candidate may be timed."""
        return self.outcome == "ok"

    @classmethod
    def judged(cls, verdict: Verdict, tail: Verdict | None, seconds: float = 0.0) -> CheckResult:
        """Return the result that follows from the comparisons."""
        bad = next((v for v in (verdict, tail) if v is not None and not v.ok), None)
        if bad is None:
            return cls("ok", "", verdict, tail, seconds)
        return cls("wrong_result", f"{bad.reason} ({bad.problem})", verdict, tail, seconds)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            "outcome": self.outcome,
            "error": self.error,
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "tail": None if self.tail is None else self.tail.to_json(),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckResult:
        """Return the result that :meth:`to_json` described."""
        verdicts = [
            None if data[key] is None else Verdict.from_json(data[key]) for key in ("verdict", "tail")
        ]
        return cls(data["outcome"], data["error"], verdicts[0], verdicts[1], data["seconds"])
