"""How far the model's predictions can be trusted, as measured: written by ``tools/model_accuracy.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from cutegen.arch import Arch

__all__ = ["FILE", "Accuracy", "measured_accuracy"]

FILE = Path(__file__).with_name("accuracy.json")


@dataclass(frozen=True)
class Accuracy:
    """The model beside measurements of some shapes on one GPU.

    Attributes:
        arch: The target.
        gpu: Name of the GPU.
        results: The results file, in ``docs/results``.
        shapes: Shapes that it holds.
        first: Shapes of which the measured winner was also predicted to be the fastest of the candidates.
        median_rank: Place of the measured winner in the predicted order; the median over the shapes.
        worst_rank: The largest of these places.
        slack: Fraction by which the measured winner was predicted to be slower than the best prediction, on
            nine shapes of ten at most.
        error: Median of ``|predicted / measured - 1|`` of the winners' times.
    """

    arch: str
    gpu: str
    results: str
    shapes: int
    first: int
    median_rank: float
    worst_rank: int
    slack: float
    error: float

    def __str__(self) -> str:
        return (
            f"On {self.shapes} shapes measured on an {self.gpu.removeprefix('NVIDIA ')} the fastest config "
            f"found by tuning was predicted in place {self.median_rank:g} (median; first on {self.first}, "
            f"worst {self.worst_rank}), and on nine of ten at most {ceil(100 * self.slack)} % behind the "
            "first: smaller differences mean nothing."
        )


@cache
def measured_accuracy(arch: Arch) -> Accuracy | None:
    """Return what was measured of the model for ``arch``; None if nothing was."""
    facts = json.loads(FILE.read_text(encoding="utf-8"))
    facts.pop("rows")  # of single shapes, from which the rest follows
    found = Accuracy(**facts)
    return found if found.arch == arch.name else None
