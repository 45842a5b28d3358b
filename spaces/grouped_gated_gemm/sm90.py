"""The configs of grouped gated GEMMs over ranges of rows: grouped GEMMs with tiles of two halves."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Rule, Space

from ..gated_gemm.sm90 import halves_fit_the_tile
from ..grouped_gemm.sm90 import build


def build_space(arch: Arch) -> Space:
    """Return the space of such GEMMs bound to ``arch``."""
    return build("grouped_gated_gemm", arch, Rule.of(halves_fit_the_tile))
