"""A plugin of pytest: runs the tests that a file lists, and writes a line for each as it begins and ends.

What a killed process had not finished is known by that. ``tools/run_gpu_tests.py`` loads it with ``-p``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

#: What the tail of an error may be long; the rest is in the log of the process.
_LONGEST = 4000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where to read and write."""
    group = parser.getgroup("tools/run_gpu_tests.py")
    group.addoption("--only-listed", type=Path, help="JSON list of the tests to run")
    group.addoption("--kernels", type=Path, help="folder in which compiled kernels are kept")
    group.addoption("--lines", type=Path, help="file for a line of JSON per event")


def pytest_configure(config: pytest.Config) -> None:
    """Write events where a file was named."""
    if path := config.getoption("--lines"):
        config.pluginmanager.register(_Writer(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not listed."""
    path = config.getoption("--only-listed")
    if path is None:
        return
    listed = set(json.loads(path.read_text(encoding="utf-8")))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in listed])
    items[:] = [item for item in items if item.nodeid in listed]


class _Writer:
    """Writes events; each line is complete once it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write every test that is about to run, and whether it needs the GPU for itself."""
        if session.config.option.collectonly:
            for item in session.items:
                alone = item.get_closest_marker("alone") is not None
                self._write(test=item.nodeid, path=str(item.path), alone=alone)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write which files cannot be read."""
        if report.failed:
            self._write(test=report.nodeid, outcome="error", seconds=0.0, message=str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        """Write that a test begins."""
        self._write(test=nodeid, outcome="begun", seconds=0.0, message="")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what a stage of a test came to: one that passes is not the whole of it before its end."""
        outcome, message = _outcome(report)
        self._write(test=report.nodeid, outcome=outcome, seconds=report.duration, message=message)


def _outcome(report: pytest.TestReport) -> tuple[str, str]:
    """Return how a stage ended, and why unless it passed."""
    if report.skipped:
        if hasattr(report, "wasxfail"):
            return "xfailed", str(report.wasxfail)
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        return "skipped", str(reason).removeprefix("Skipped: ")
    if report.failed:
        return "failed" if report.when == "call" else "error", report.longreprtext[-_LONGEST:]
    return ("passed" if report.when == "call" else "begun" if report.when == "setup" else "ended"), ""
