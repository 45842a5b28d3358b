"""What a command printed, and where: documents quote it through tools/results_table.py."""

from __future__ import annotations

from typing import Any

from tools.benchmark.markdown import short_commit
from tools.benchmark.quoted import QuotedFile

__all__ = ["TRANSCRIPT", "Transcript"]

#: What such a file says that it is.
TRANSCRIPT = "transcript"


class Transcript(QuotedFile):
    """What tools/record_command.py wrote."""

    tool = "tools/record_command.py"

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
