"""Sources to compile in tests."""

from __future__ import annotations

from pathlib import Path

from cutegen.build.render import Source
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config

TWO_KERNELS = (Path(__file__).parent / "data" / "two_kernels.py").read_text()


def source(text: str, arch: str = "sm_90a") -> Source:
    """Return ``text`` as a rendered kernel."""
    return Source(text, arch, Problem(64, 64, 64).signature, Config({"tile_k": 64}))
