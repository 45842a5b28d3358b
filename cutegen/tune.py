"""``python -m cutegen.tune``: find the fastest kernel for each shape."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["tune", *sys.argv[1:]]))
