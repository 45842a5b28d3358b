"""A dispatch table as a folder that ships: winners, their sources, and a loader that needs no cutegen."""

from cutegen.deploy.writer import Pinned, PinnedRange, pin_table

__all__ = ["Pinned", "PinnedRange", "pin_table"]
