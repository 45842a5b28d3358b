"""``python -m cutegen.pin``: write a deployment folder."""

from __future__ import annotations

import sys

from cutegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pin", *sys.argv[1:]]))
