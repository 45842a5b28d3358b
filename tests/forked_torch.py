"""Processes that begin with torch imported: importing takes seconds, forking one that has done it takes none.

Nothing else was imported before but what is asked for, and no thread was started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ForkedTorch"]

_FORKER = """
import importlib, json, os, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)

def become(job):
    names = ((os.devnull, os.O_RDONLY), *((job[name], os.O_WRONLY | os.O_CREAT) for name in ("out", "err")))
    for number, (name, flags) in enumerate(names):
        os.dup2(os.open(name, flags, 0o600), number)
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = ["-c", *job["arguments"]]
    exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    children = []
    for job in json.loads(line):
        children.append(os.fork())
        if children[-1] == 0:
            status = 1
            try:
                become(job)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(ended), flush=True)
"""


class ForkedTorch:
    """Runs Python code in processes of its own, as ``python -I -c`` would, but with torch imported.

    Args:
        folder: For what they print.
        parts: Of torch, what is imported.
    """

    def __init__(self, folder: Path, parts: Sequence[str] = ("torch", "torch.distributed")) -> None:
        self._folder, self._runs = folder, 0
        command = [sys.executable, "-I", "-B", "-c", _FORKER, *parts]
        self._forker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> ForkedTorch:
        return self

    def __exit__(self, *error: object) -> None:
        self._forker.communicate()

    def run(self, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in one process; ``environment`` is added to that of this one."""
        return self.run_all(code, [arguments], environment)[0]

    def run_all(
        self, code: str, arguments: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run ``code`` in a process for each of ``arguments``, all at once, and return how they ended."""
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        jobs: list[dict[str, Any]] = [
            {
                "code": code,
                "arguments": given,
                "env": {**os.environ, **(environment or {})},
                "out": str(folder / f"{at}.out"),
                "err": str(folder / f"{at}.err"),
            }
            for at, given in enumerate(arguments)
        ]
        assert self._forker.stdin is not None and self._forker.stdout is not None
        print(json.dumps(jobs), file=self._forker.stdin, flush=True)
        ended = json.loads(self._forker.stdout.readline())
        return [
            subprocess.CompletedProcess(
                job["arguments"], status, Path(job["out"]).read_text(), Path(job["err"]).read_text()
            )
            for job, status in zip(jobs, ended, strict=True)
        ]
