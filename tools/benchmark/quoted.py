"""Results files that are kept as they were read: documents quote them through tools/results_table.py."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cutegen.errors import StoreError, UsageError
from tools.benchmark.markdown import short_commit

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["QuotedFile"]


@dataclass(frozen=True)
class QuotedFile(ABC):
    """A results file.

    Attributes:
        facts: What it holds.
        tool: What writes such files.
    """

    facts: Mapping[str, Any]
    tool: ClassVar[str]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the file at ``path``.

        Raises:
            StoreError: It cannot be read.
            UsageError: It is no such file, or lacks something.
        """
        try:
            found = cls(json.loads(path.read_text(encoding="utf-8")))
            found.render()
        except OSError as error:
            raise StoreError(f"results file {path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a file of {cls.tool}: {error!r}") from error
        return found

    @abstractmethod
    def summary(self) -> list[str]:
        """Return what it comes to, as lines of Markdown."""

    @abstractmethod
    def render(self) -> str:
        """Return the Markdown of the file."""

    def where(self) -> str:
        """Return the GPU, its driver, the commit and the day, as a sentence."""
        facts = self.facts
        driver, day = facts["machine"]["driver"], facts["measured_at"][:10]
        return f"{facts['gpu']}, driver {driver}; commit {short_commit(facts['commit'])}; {day}."
