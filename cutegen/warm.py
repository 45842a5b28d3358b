"""``python -m cutegen.warm``: compile kernels before they are called."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["warm", *sys.argv[1:]]))
