"""``python -m cutegen.declare``: write the first draft of a declaration."""

from __future__ import annotations

import sys

from cutegen.cli.declare import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
