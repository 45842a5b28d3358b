"""A process that runs the cutegen of a checkout, so that two checkouts can take turns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutegen.errors import ResourceError
from cutegen.system.closing import Closing

__all__ = ["CheckoutProcess"]

#: Seconds in which it must end once its input ends.
_ENDS_S = 60.0


class CheckoutProcess(Closing):
    """A Python process in the folder ``root`` that answers each line of its input with a line.

    Before any answer it writes a line of its own: the file of the cutegen that it imported. A context manager
    that ends the process.
    """

    def __init__(
        self, root: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            root: The checkout.
            arguments: Of Python: a program and its arguments.
            environment: The whole environment of the process; None for that of this one.
        """
        self._root = root
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Wait until it has imported cutegen, and for whatever it does before it says so.

        Raises:
            ResourceError: The process ended, or imported another cutegen.
        """
        imported = Path(self._line())
        if not imported.is_relative_to(self._root):
            raise ResourceError(f"{imported} was imported in place of the checkout {self._root}")

    def ask(self, line: str) -> str:
        """Return the answer to a line.

        Raises:
            ResourceError: The process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        """Close the pipes, at which the process ends."""
        try:
            self._process.communicate(timeout=_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise ResourceError(f"the process of checkout {self._root} ended early")
        return line
