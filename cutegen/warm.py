"""``python -m cutegen.warm``: compile kernels before they are called."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["warm", *sys.argv[1:]]))
