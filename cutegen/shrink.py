"""``python -m cutegen.shrink``: the few configs of a family that are enough for some shapes."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["shrink", *sys.argv[1:]]))
