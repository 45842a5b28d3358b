"""``python -m cutegen.tune``: find the fastest kernel for each shape."""

from __future__ import annotations

import sys

from cutegen.cli.tune import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
