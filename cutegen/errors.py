"""Every exception cutegen raises.

::

    CutegenError
    ├── UsageError    (ValueError)  a command line, a shape or a shapes file is malformed
    ├── ResourceError               a template, a space or a family is missing
    ├── ProblemError  (ValueError)  a problem is ill-formed
    ├── OperandError  (ValueError)  a tensor cannot be an operand: names the operand and the rule
    ├── ArchError     (ValueError)  an architecture is unknown
    ├── SpaceError                  a space is declared wrongly: its author's mistake
    ├── FamilyError                 a kernel family is declared wrongly: names the file and the argument
    ├── ConfigError   (ValueError)  a config breaks rules: carries ``violations``
    ├── RenderError                 a template and its config disagree
    ├── BuildError                  a source did not become an artifact: carries ``outcome`` and ``log``
    ├── DeviceError                 no usable GPU, or the wrong one
    ├── LaunchError                 a kernel could not be loaded or launched
    │   └── FrozenError             its kernel was not loaded before cutegen.freeze(on_miss="error")
    ├── CheckError                  a kernel disagreed with its reference
    ├── MeasureError                a timing cannot be trusted: says what was violated
    ├── StoreError    (OSError)     a cache, database or folder cannot be read or written
    ├── TableError    (ValueError)  a dispatch table is malformed or for another GPU
    ├── RankError                   ranks of a program differ, or one did not answer in time
    ├── PinError                    a deployment folder cannot be written or trusted
    └── NoWinnerError               nothing valid was found: counts trials by outcome

Children of ``ValueError`` and ``OSError`` stand where a caller would expect that built-in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutegen.space import Violation

__all__ = [
    "ArchError",
    "BuildError",
    "CheckError",
    "ConfigError",
    "CutegenError",
    "DeviceError",
    "FamilyError",
    "FrozenError",
    "LaunchError",
    "MeasureError",
    "NoWinnerError",
    "OperandError",
    "PinError",
    "ProblemError",
    "RankError",
    "RenderError",
    "ResourceError",
    "SpaceError",
    "StoreError",
    "TableError",
    "UsageError",
]


class CutegenError(Exception):
    """The root of every error that cutegen raises."""


class UsageError(CutegenError, ValueError):
    """A command line, a shape or a shapes file is malformed."""


class ResourceError(CutegenError):
    """A template, a space or a kernel family is missing."""


class ProblemError(CutegenError, ValueError):
    """A problem is ill-formed."""


class OperandError(CutegenError, ValueError):
    """A tensor cannot be an operand of the GEMM."""


class ArchError(CutegenError, ValueError):
    """An architecture is unknown."""


class SpaceError(CutegenError):
    """A space is declared wrongly; the mistake is its author's, not the user's."""


class FamilyError(CutegenError):
    """A kernel family is declared wrongly: names the file, and what would be valid."""


class ConfigError(CutegenError, ValueError):
    """A config breaks rules of its space, or names knobs and values that do not exist.

    Attributes:
        violations: Every broken rule, by name and reason.
    """

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        self.violations = tuple(violations)
        lines = [message, *(f"  {v.rule}: {v.reason}" for v in self.violations)]
        super().__init__("\n".join(lines))

    @property
    def reason(self) -> str:
        """What is wrong, on one line: the rules that are broken, else the message."""
        return "; ".join(f"{v.rule}: {v.reason}" for v in self.violations) or str(self)


class RenderError(CutegenError):
    """A template and its config disagree."""


class BuildError(CutegenError):
    """A source did not become an artifact.

    Attributes:
        outcome: ``error`` (the compiler refused), ``abort`` (it died) or ``timeout``.
        log: What the compiler said, without colour codes.
    """

    def __init__(self, message: str, *, outcome: str = "error", log: str = "") -> None:
        self.outcome = outcome
        self.log = log
        super().__init__(message)


class DeviceError(CutegenError):
    """There is no usable GPU, or it is not the one that was asked for."""


class LaunchError(CutegenError):
    """A kernel could not be loaded or launched."""


class FrozenError(LaunchError):
    """A call needs a kernel that was not loaded before :func:`cutegen.freeze`."""


class CheckError(CutegenError):
    """A kernel disagreed with its reference."""


class MeasureError(CutegenError):
    """A timing cannot be trusted."""


class StoreError(CutegenError, OSError):
    """A cache, database or folder cannot be read or written."""


class TableError(CutegenError, ValueError):
    """A dispatch table is malformed, or was made for another GPU."""


class RankError(CutegenError):
    """Ranks of a distributed program differ, or one did not answer in time."""


class PinError(CutegenError):
    """A deployment folder cannot be written or trusted."""


class NoWinnerError(CutegenError):
    """Nothing valid was found.

    Attributes:
        outcomes: How many trials ended in each outcome.
    """

    def __init__(self, message: str, outcomes: Mapping[str, int] | None = None) -> None:
        self.outcomes = dict(outcomes or {})
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        super().__init__(f"{message} ({counts or 'no trials'})")
