"""``python -m cutegen.explain``: say which config a call would run, and why."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["explain", *sys.argv[1:]]))
