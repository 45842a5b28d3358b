"""``python -m cutegen.pin``: write a deployment folder."""

from __future__ import annotations

import sys

from cutegen.cli.main import main as command

if __name__ == "__main__":
    sys.exit(command(["pin", *sys.argv[1:]]))
