"""``python -m cutegen.declare``: write the first draft of a declaration."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["declare", *sys.argv[1:]]))
