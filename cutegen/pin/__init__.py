"""A dispatch table as a folder that ships: winners, their sources, and a loader that needs no cutegen."""

from cutegen.pin.deploy import Pinned, pin_table

__all__ = ["Pinned", "pin_table"]
