"""Progress on standard error: a live bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from cutegen.cli.wrapped_text import say
from cutegen.text import printable
from cutegen.tuning.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Display", "Lines", "Quiet", "make_display", "summary"]


class Display(Protocol):
    """Shows progress while it is entered."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""

    def begin(self, name: str, at: int, total: int) -> None:
        """Say which problem comes next."""

    def hide(self) -> None:
        """Make room for other output until the next problem begins."""

    def show(self, progress: Progress) -> None:
        """Show one moment."""


def make_display(quiet: bool = False) -> Display:
    """Return the display that suits standard error."""
    if quiet or sys.stderr is None:  # the shell can close it: 2>&-
        return Quiet()
    return _Bar() if sys.stderr.isatty() else Lines()


def summary(progress: Progress) -> str:
    """Return counts per outcome and the fastest time so far, in words."""
    counts = [f"{count} {name}" for name, count in sorted(progress.outcomes.items(), key=lambda x: -x[1])]
    best = [f"best {progress.best_us:.1f} us"] if progress.best_us is not None else []
    return ", ".join(counts + best)


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, name: str, at: int, total: int) -> None:
        """Show nothing."""

    def hide(self) -> None:
        """Hide nothing."""

    def show(self, progress: Progress) -> None:
        """Show nothing."""


class Lines(Quiet):
    """One plain line whenever the stage changes: for logs and pipes."""

    def __init__(self) -> None:
        self._prefix = ""
        self._stage = ""

    def begin(self, name: str, at: int, total: int) -> None:
        """Note which problem comes next."""
        self._prefix, self._stage = f"[{at}/{total}] {printable(name)}", ""

    def show(self, progress: Progress) -> None:
        """Print the stage if it is a new one."""
        if progress.stage == self._stage:
            return
        self._stage = progress.stage
        words = f"{progress.stage} {progress.done}/{progress.total}"
        if progress.outcomes:
            words += f": {summary(progress)}"
        say(f"{self._prefix}: {words} ({progress.elapsed_s:.1f} s)", error=True, flush=True)


class _Bar:
    """A live bar drawn by rich: stage, done of total, counts, time left."""

    def __init__(self) -> None:
        self._rich: Any = None
        self._task: Any = None
        self._prefix = ""
        self._drawn = 0.0

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._rich = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=5,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._rich.add_task("starting", total=None, words="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hide()

    def hide(self) -> None:
        """Take the bar away."""
        self._rich.stop()

    def begin(self, name: str, at: int, total: int) -> None:
        """Draw the bar for the next problem."""
        self._rich.start()
        self._prefix = printable(f"[{at}/{total}] {name}" if total > 1 else name)
        self._rich.update(self._task, description=self._prefix, completed=0, total=None, words="")

    def show(self, progress: Progress) -> None:
        """Redraw, ten times a second at most."""
        now = time.monotonic()
        if progress.stage != "done" and now - self._drawn < 0.1:
            return
        self._drawn = now
        left = _left(progress)
        words = summary(progress) + (f", {left}" if left else "")
        self._rich.update(
            self._task,
            description=f"{self._prefix} {progress.stage}",
            completed=progress.done,
            total=progress.total or None,
            words=words,
        )


def _left(progress: Progress) -> str:
    """Time left: by the budget, else by the pace so far."""
    left = progress.left_s
    if left is None and 0 < progress.done < progress.total:
        left = progress.elapsed_s / progress.done * (progress.total - progress.done)
    return "" if left is None else f"about {max(0.0, left):.0f} s left"
