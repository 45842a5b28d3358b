"""``python -m cutegen.space``: what is valid, and why not."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["space", *sys.argv[1:]]))
