"""``python -m cutegen.calibrate``: fit the performance model to the GPU at hand."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["calibrate", *sys.argv[1:]]))
