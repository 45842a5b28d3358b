"""``python -m cutegen.explain``: say which config a call would run, and why."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["explain", *sys.argv[1:]]))
