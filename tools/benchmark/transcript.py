"""What a command printed, and where: documents quote it through tools/results_table.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegen.digest import Json
from cutegen.errors import StoreError, UsageError
from tools.benchmark.markdown import short_commit

__all__ = ["TRANSCRIPT", "Transcript"]

#: What such a file says that it is.
TRANSCRIPT = "transcript"


@dataclass(frozen=True)
class Transcript:
    """What tools/record_command.py wrote.

    Attributes:
        facts: The file.
    """

    facts: Mapping[str, Json]

    @classmethod
    def load(cls, path: Path) -> Transcript:
        """Return the transcript stored at ``path``.

        Raises:
            StoreError: The file cannot be read.
            UsageError: It is no such file, or lacks something.
        """
        try:
            found = cls(json.loads(path.read_text(encoding="utf-8")))
            found.render()
        except OSError as error:
            raise StoreError(f"results file {path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a file of tools/record_command.py: {error!r}") from error
        return found

    def summary(self) -> list[str]:
        """Return the line that says what ran, for how long, and how it ended."""
        facts: Any = self.facts
        return [f"- {facts['command']}: {facts['seconds']:.1f} s, exit code {facts['exit_code']}"]

    def render(self) -> str:
        """Return the Markdown of the file: the command, what it printed, and where."""
        facts: Any = self.facts
        lines = ["```console", f"$ {facts['command']}", *str(facts["output"]).rstrip().splitlines(), "```"]
        versions = f"cutegen {facts['software']['cutegen']}, commit {short_commit(facts['commit'])}"
        gpu = f"{facts['gpu']}, driver {facts['driver']}; " if facts["gpu"] else ""
        return "\n".join([*lines, "", f"{gpu}{versions}; {facts['date'][:10]}; {facts['seconds']:.1f} s."])
