"""``python -m cutegen.calibrate``: fit the performance model to the GPU at hand."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
