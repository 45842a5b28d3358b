"""A trial: one config tried on one problem, how it ended, and the evidence."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, TypeVar

from cutegen.build import Resources
from cutegen.digest import Json, canonical_json
from cutegen.errors import MeasureError
from cutegen.families.registry import SOURCES, parse_problem
from cutegen.family import Problem
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.space import Config
from cutegen.text import shown

__all__ = ["ORIGINS", "OUTCOMES", "Key", "Trial"]

#: How a trial can end. ``build_interrupted``: the compiler had no memory, so another run tries again.
#: ``pruned`` was valid and correct but too slow to be measured to the end.
OUTCOMES = (
    "ok",
    "invalid",
    "build_failed",
    "build_interrupted",
    "launch_failed",
    "wrong_result",
    "timeout",
    "pruned",
)
#: Whose kernel it was.
ORIGINS = (*SOURCES, "torch")

#: What was run: artifact key and run-time scalars. The key covers text, target and toolchain, so a recorded
#: trial is valid exactly as long as the same kernel would be built.
Key = tuple[str, tuple[int, ...]]

_T = TypeVar("_T")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


#: Whether a value that is read back is valid for a field, by the field's annotation.
_HOLDS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": lambda value: type(value) is int,
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "tuple[int, int]": lambda value: [type(item) for item in value] == [int, int],
    "tuple[int, ...]": lambda value: all(type(item) is int for item in value),
}


@dataclass(frozen=True)
class Trial:
    """One config (or the baseline) tried on one problem, and how it ended.

    Attributes:
        problem: What was computed.
        outcome: One of :data:`OUTCOMES`.
        config: All knobs; None for the baseline.
        origin: Whose kernel: ``cutegen``, ``operators`` or ``torch``.
        arch: Compile target.
        source_digest: Names the rendered text; empty when it was not rendered.
        artifact_key: Names the compiled kernel, whether or not compiling it worked.
        launch: Run-time scalars.
        error: What went wrong, for people.
        resources: Registers, spills, shared memory and so on, as the builder reports them.
        timing: What was measured; only trials that ran to the end, or were pruned, have one.
        policy: How it was measured; None if it was not.
        device: The GPU; None where there was none.
        build_s: Seconds of compilation; None if nothing was compiled for it.
        run: Names the tuning run.
        id: A name that no other trial has.
        created_at: Time in UTC, ISO 8601.

    Raises:
        MeasureError: The outcome is unknown, or contradicts the timing; the origin is unknown, or is not that
            of the config.
    """

    problem: Problem
    outcome: str
    config: Config | None = None
    origin: str = "cutegen"
    arch: str = ""
    source_digest: str = ""
    artifact_key: str = ""
    launch: tuple[int, ...] = ()
    error: str = ""
    resources: Mapping[str, Json] | None = None
    timing: Timing | None = None
    policy: Policy | None = None
    device: Device | None = None
    build_s: float | None = None
    run: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    created_at: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    )

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise MeasureError(f"unknown outcome {self.outcome!r}; valid: {', '.join(OUTCOMES)}")
        if self.origin not in ORIGINS:
            raise MeasureError(f"unknown origin {self.origin!r}; valid: {', '.join(ORIGINS)}")
        if self.config is not None and self.config.source != self.origin:
            raise MeasureError(f"a config of {self.config.source} was recorded as one of {self.origin}")
        if self.timing is None:
            return
        if self.outcome not in ("ok", "pruned"):
            raise MeasureError(f"a trial that ended in {self.outcome} has no time, but was given one")
        if self.policy is None:
            raise MeasureError("a timing without its policy says nothing; give both")
        if not (math.isfinite(self.timing.median_us) and self.timing.median_us > 0):
            raise MeasureError(f"time of {self.timing.median_us} us must be positive and finite")

    @property
    def key(self) -> Key:
        """What was run; the baseline's key is ``("torch", ())``."""
        return ("torch", ()) if self.origin == "torch" else (self.artifact_key, self.launch)

    @property
    def device_key(self) -> str:
        """The kind of GPU, as :attr:`cutegen.measure.device.Device.key`; empty without one."""
        return self.device.key if self.device else ""

    def to_row(self) -> tuple[Any, ...]:
        """Return the values of the database's columns."""
        return (
            self.id,
            str(self.problem),
            self.origin,
            self.outcome,
            _dump(self.config),
            self.arch,
            self.source_digest,
            self.artifact_key,
            canonical_json(list(self.launch)),
            self.error,
            None if self.resources is None else canonical_json(self.resources),
            _dump(self.timing),
            _dump(self.policy),
            self.policy.digest if self.policy else "",
            _dump(self.device),
            self.device_key,
            self.build_s,
            self.created_at,
            self.run,
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Trial:
        """Return the trial of a database row.

        Raises:
            ValueError: A value is not what this version writes. Likewise TypeError, LookupError,
                AttributeError, OverflowError and RecursionError, as the value is malformed.
        """
        resources = _load(row["resources"], _mapping)
        Resources.from_json(resources or {})  # raises now, not when they are needed
        trial = cls(
            problem=parse_problem(row["problem"]),
            outcome=row["outcome"],
            config=_load(row["config"], Config.from_json),
            origin=row["origin"],
            arch=row["arch"],
            source_digest=row["source_digest"],
            artifact_key=row["artifact_key"],
            launch=_whole_numbers(json.loads(row["launch"])),
            error=row["error"],
            resources=resources,
            timing=_checked(_load(row["timing"], Timing.from_json)),
            policy=_checked(_load(row["policy"], Policy.from_json)),
            device=_checked(_load(row["device"], Device.from_json)),
            build_s=row["build_s"],
            run=row["run"],
            id=row["id"],
            created_at=row["created_at"],
        )
        return _checked(trial)


def _dump(value: Config | Timing | Policy | Device | None) -> str | None:
    return None if value is None else canonical_json(value.to_json())


def _load(text: str | None, make: Callable[[Any], _T]) -> _T | None:
    return None if text is None else make(json.loads(text))


def _mapping(data: Any) -> dict[str, Json]:
    if not isinstance(data, dict):
        raise TypeError(f"{shown(data)} is no object")
    return data


def _whole_numbers(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list):
        raise TypeError(f"{shown(data)} is no list")
    return tuple(data)


def _checked(value: _T) -> _T:
    """Return ``value``, None or a dataclass, if its plain fields hold what their annotations say.

    Raises:
        ValueError: One does not.
    """
    for name, holds in _CHECKS.get(type(value), ()):
        if not holds(getattr(value, name)):
            raise ValueError(f"{name} is {shown(getattr(value, name))}, which is of the wrong type")
    return value


_CHECKS: Mapping[type, Sequence[tuple[str, Callable[[Any], bool]]]] = {
    kind: [(each.name, _HOLDS[str(each.type)]) for each in fields(kind) if str(each.type) in _HOLDS]
    for kind in (Trial, Timing, Policy, Device)
}
