"""Rendered kernels held to the rules of this repository."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cutegen.render import Source

ROOT = Path(__file__).resolve().parents[1]


def assert_tidy(sources: Iterable[Source], folder: Path, command: str) -> None:
    """ruff's ``check`` or ``format`` finds nothing to report or to change in the texts.

    Args:
        sources: Rendered kernels.
        folder: Where they are written to.
        command: ``check`` or ``format``.
    """
    for source in sources:
        (folder / f"k_{source.digest}.py").write_text(source.text)
    options = ["--check"] if command == "format" else []
    line = [sys.executable, "-m", "ruff", command, *options, "--config", ROOT / "pyproject.toml", folder]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
