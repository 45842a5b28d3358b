"""What gated GEMMs take beside plain ones of as many columns, as fitted to measurements.

Trees, which ``tools/fit_gated.py`` fits to recorded times, ask what the GEMM's fit asks. They tell the
candidates of one problem apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.arch import Arch
from cutegen.families.gemm.perf_model.fitted import fit_of
from cutegen.families.gemm.perf_model.roofline import FEATURES, rooflines_of
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config

if TYPE_CHECKING:
    from cutegen.families.gemm.perf_model.trees import Array

__all__ = ["FILE", "GatedFit", "describe", "load_gated_fit"]

FILE = Path(__file__).with_name("fit_sm_90a.json")


@dataclass(frozen=True)
class GatedFit:
    """Trees, and what they were fitted to.

    Attributes:
        provenance: Where the times come from, and what the choice loses: for people.
        trees: Corrections of the logarithm of the plain GEMM's time.
    """

    provenance: Mapping[str, Any]
    trees: Trees

    def slower(self, gemm: Problem, configs: Sequence[Config], arch: Arch, sm_count: int) -> list[float]:
        """Return how much longer each kernel takes than the GEMM's model says, beside the others.

        Args:
            gemm: The plain GEMM, of 16-bit operands.
            configs: Kernels of gated GEMMs.
            arch: The target, with the calibration that the GEMM's times follow from.
            sm_count: SMs of the GPU.
        """
        import numpy as np

        found = np.exp(self.trees.sums(describe(gemm, configs, arch, sm_count)) + self.trees.base)
        return [float(factor) for factor in found]


@cache
def load_gated_fit() -> GatedFit:
    """Return the fit that the package ships."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return GatedFit(found["provenance"], Trees.of(found, len(FEATURES)))


def describe(gemm: Problem, configs: Sequence[Config], arch: Arch, sm_count: int) -> Array:
    """Return what the trees ask about: the features of the GEMM's fit, a column for each kernel."""
    return rooflines_of(gemm, configs, sm_count, fit_of(arch).rates)[1]
