"""The configs of grouped gated GEMMs of a matrix for each group: grouped GEMMs, tiles of two halves."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Rule, Space

from ..gated_gemm.sm90 import halves_fit_the_tile
from ..grouped_gemm.sm90 import build


def build_space(arch: Arch) -> Space:
    """Return the space of such GEMMs bound to ``arch``."""
    return build("grouped_gated_gemm_masked", arch, Rule.of(halves_fit_the_tile))
