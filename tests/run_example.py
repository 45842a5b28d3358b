"""Run one example as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

__all__ = ["ROOT", "needs_backend", "run_example"]

ROOT = Path(__file__).resolve().parent.parent


def needs_backend(name: str) -> None:
    """Skip an example that torch must find the backend for, where cutegen is not installed, or was before."""
    names = {found.name for found in entry_points(group="torch_dynamo_backends")}
    if name == "llama_compiled" and "cutegen" not in names:
        pytest.skip("no installed cutegen offers the backend")


def run_example(name: str, folder: Path, cache: Path) -> str:
    """Run an example in ``folder`` on the cache ``cache`` and return what it printed."""
    environment = {**os.environ, "CUTEGEN_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
