"""The configs of grouped GEMMs of a matrix for each group: those of grouped GEMMs over ranges of rows."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..grouped_gemm.sm90 import build


def build_space(arch: Arch) -> Space:
    """Return the space of masked grouped GEMMs bound to ``arch``."""
    return build("grouped_gemm_masked", arch)
