"""The compilers of the host, and the programs beside them: found by name, run within a time limit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence

from cutegen.errors import BuildError

__all__ = ["CXX_COMPILERS", "C_COMPILERS", "find_program", "run_program"]

C_COMPILERS = ("gcc", "cc", "clang")
CXX_COMPILERS = ("g++", "c++", "clang++")
#: What a compiler's or a linker's line has that says why it failed.
_REASONS = ("error", "undefined", "link failed", "No space left")


def find_program(names: Iterable[str]) -> str | None:
    """Return the path of the first of these programs that there is."""
    return next(filter(None, map(shutil.which, names)), None)


def run_program(command: Sequence[str], limit_s: float = 60.0) -> None:
    """Run a command to its end.

    Raises:
        BuildError: It could not run, took longer than ``limit_s`` seconds, or failed; the message has the
            first line that says why, the log all that it said.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        line = next((line for line in lines if any(word in line for word in _REASONS)), lines[0])
        raise BuildError(f"{command[0]} failed: {line}", log=done.stderr)
