"""Random legal configs on random problems compute right answers: the same walk as tools/walk_kernels.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutegen.catalog import find_space
from cutegen.device import Device, present_device
from cutegen.errors import DeviceError
from tests.walk import random_pairs
from tools.walk_kernels import check_pairs

#: Pairs of one run; the tool walks further.
PAIRS = 60
SEED = 20261120


def the_gpu() -> Device | None:
    """Return the GPU, or None where there is none."""
    try:
        return present_device()
    except DeviceError:
        return None


GPU = the_gpu()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dsl,
    pytest.mark.skipif(GPU is None or GPU.arch.name != "sm_90a", reason="needs an NVIDIA GPU of sm_90a"),
]


def test_every_legal_config_of_a_random_walk_is_right(tmp_path: Path) -> None:
    """Poisoned outputs, odd tails, an fp64 reference and repeated bits, over all knobs and problems."""
    assert GPU is not None
    pairs = list(random_pairs(find_space("gemm", GPU.arch), SEED, PAIRS))
    wrong = [record for record in check_pairs(pairs, GPU, tmp_path) if record["outcome"] != "ok"]
    assert not wrong, wrong
