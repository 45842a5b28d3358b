"""``python -m cutegen.tune``: find the fastest kernel for each shape."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
