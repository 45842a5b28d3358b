"""``python -m cutegen.declare``: write the first draft of a declaration."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["declare", *sys.argv[1:]]))
