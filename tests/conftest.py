"""What holds for every test."""

from __future__ import annotations

import signal

# A job in the background starts with Ctrl-C ignored, and its children inherit that; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
