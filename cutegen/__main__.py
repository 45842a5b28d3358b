"""``python -m cutegen``: the commands, by name."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
