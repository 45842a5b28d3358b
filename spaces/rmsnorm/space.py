"""Which RMSNorm configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.shared import row_space


def build_space(arch: Arch) -> Space:
    """Return the space of RMSNorm bound to ``arch``."""
    return row_space("rmsnorm", arch)
