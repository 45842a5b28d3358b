"""Processes of pytest, side by side, each for a part of the tests; all of them end at a deadline."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutegen.errors import UsageError
from tools.benchmark.environment import ROOT
from tools.gpu_test_parts.outcomes import NOT_BEGUN, Ended, file_of, merge, read_events
from tools.gpu_test_parts.plan import Part, by_file
from tools.gpu_test_parts.sanitizer import Sanitizer

__all__ = ["Processes"]

_PLUGIN = "tools.gpu_test_parts.reporting"
_PYTEST = ("-m", "pytest", "-p", _PLUGIN, "-p", "no:cacheprovider", "-q", "--tb=short")


@dataclass
class Processes:
    """Runs parts of the tests.

    Attributes:
        scratch: Folder for caches and events; a part removes its own at its end.
        logs: Folder for what processes print.
        deadline: By :func:`time.monotonic`, when whatever still runs is killed.
        sanitizer: Watches the processes, if given.
        kernels: Folder in which compiled kernels are kept, if given.
    """

    scratch: Path
    logs: Path
    deadline: float
    sanitizer: Sanitizer | None = None
    kernels: Path | None = None
    #: Where the files are that node ids begin with.
    _files: dict[str, str] = field(default_factory=dict)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def collect(self, paths: Sequence[str]) -> dict[str, bool]:
        """Return the GPU tests of files, folders or node ids, and whether each needs the GPU for itself.

        Raises:
            UsageError: pytest cannot read them.
        """
        lines, log = self.scratch / "collected.jsonl", self.logs / "collected.log"
        words = ["--collect-only", "-m", "gpu", f"--lines={lines}", *paths]
        status = self._call([sys.executable, *_PYTEST, *words], log, self._variables("collect"))
        if status not in (0, 5):  # 5: there are none
            raise UsageError(f"pytest cannot collect {' '.join(paths)}:\n{log.read_text(errors='replace')}")
        events = read_events(lines)
        self._files |= {file_of(event["test"]): event["path"] for event in events}
        return {event["test"]: event["alone"] for event in events}

    def run(self, parts: Sequence[Part], count: int) -> Iterator[tuple[Part, list[Ended]]]:
        """Yield parts with what came of their tests, as they end; ``count`` run at a time, in this order."""
        with ThreadPoolExecutor(count) as pool:
            futures = {pool.submit(self._run_part, part): part for part in parts}
            for future in as_completed(futures):
                yield futures[future], future.result()

    def stop(self) -> None:
        """End what runs: :meth:`run` goes on to yield all parts, with what their tests came to until now."""
        self.deadline = time.monotonic()
        for process in list(self._running):
            _kill(process)

    def _run_part(self, part: Part) -> list[Ended]:
        """Run a part; where its process dies, another runs the tests that had not begun."""
        folder = self.scratch / part.name
        folder.mkdir()
        left, found = list(part.tests), dict[str, Ended]()
        while left:
            found |= {each.test: each for each in self._run_tests(part.name, folder, left)}
            waiting = [test for test in left if found[test].message == NOT_BEGUN]
            left = waiting if len(waiting) < len(left) and time.monotonic() < self.deadline else []
        shutil.rmtree(folder, ignore_errors=True)
        return list(found.values())

    def _run_tests(self, name: str, folder: Path, tests: Sequence[str]) -> list[Ended]:
        listed, lines = folder / "tests.json", folder / "events.jsonl"
        listed.write_text(json.dumps(tests), encoding="utf-8")
        lines.unlink(missing_ok=True)
        words = [f"--only-listed={listed}", f"--lines={lines}", f"--basetemp={folder / 'tmp'}"]
        if self.kernels is not None:
            words.append(f"--kernels={self.kernels.absolute()}")
        files = [self._files[file] for file in by_file(tests)]
        prefix = self.sanitizer.prefix(folder) if self.sanitizer else []
        command = [*prefix, sys.executable, *_PYTEST, *words, *files]
        self._call(command, self.logs / f"{name}.log", self._variables(name))
        ended = merge(tests, read_events(lines))
        if self.sanitizer and (errors := self.sanitizer.errors(folder)):
            ended.append(Ended(f"{name}::compute-sanitizer", "failed", 0.0, errors))
        return ended

    def _variables(self, name: str) -> dict[str, str]:
        """Return the environment of a process: its own caches, and one thread, since many wait for cores."""
        cache = self.scratch / name
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        folders = {
            "CUTEGEN_CACHE_DIR": str(cache / "cutegen"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        more = self.sanitizer.environment if self.sanitizer else {}
        return {**threads, **os.environ, **folders, "PYTHONPATH": paths, **more}

    def _call(self, command: Sequence[str], log: Path, variables: Mapping[str, Any]) -> int | None:
        """Run a command until it ends or the deadline comes; return its status, None if it was killed."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return None
        with log.open("ab") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=out, stderr=out, start_new_session=True
            )
        self._running.add(process)
        try:
            return process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process)
            self._running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, with those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
