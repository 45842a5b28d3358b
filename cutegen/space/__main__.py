"""``python -m cutegen.space``: what is valid, and why not."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["space", *sys.argv[1:]]))
