"""Run one example as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from forked_torch import ForkedTorch

__all__ = ["ROOT", "needs_backend", "run_example", "run_forked"]

ROOT = Path(__file__).resolve().parent.parent
#: Runs a file as Python would, though tuning goes on beside other processes on the GPU: other tests, say.
WITHOUT_WAITING = """
import runpy, sys
from pathlib import Path
from cutegen.tuning import AutoTuner

AutoTuner.__init__.__kwdefaults__["busy"] = "warn"
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


#: Runs the file that is named last in the folder that is named first.
IN_FOLDER = """
import os, runpy, sys

os.chdir(sys.argv[1])
sys.path[:0] = sys.argv[2:4]
del sys.argv[:4]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def needs_backend(name: str) -> None:
    """Skip an example that torch must find the backend for, where cutegen is not installed, or was before."""
    names = {found.name for found in entry_points(group="torch_dynamo_backends")}
    if name == "llama_compiled" and "cutegen" not in names:
        pytest.skip("no installed cutegen offers the backend")


def run_forked(forked: ForkedTorch, name: str, folder: Path, cache: Path) -> str:
    """Do what :func:`run_example` does in a process that has torch."""
    path = ROOT / "examples" / f"{name}.py"
    words = map(str, (folder, path.parent, ROOT, path))
    done = forked.run(IN_FOLDER, *words, CUTEGEN_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(name: str, folder: Path, cache: Path, *, waits: bool = True) -> str:
    """Run an example in ``folder`` on the cache ``cache`` and return what it printed.

    With ``waits`` false tuning does not wait until others leave the GPU alone.
    """
    environment = {**os.environ, "CUTEGEN_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *([] if waits else ["-c", WITHOUT_WAITING]), str(ROOT / "examples" / f"{name}.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
