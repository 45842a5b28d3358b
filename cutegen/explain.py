"""``python -m cutegen.explain``: say which config a call would run, and why."""

from __future__ import annotations

import sys

from cutegen.cli.explain import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
