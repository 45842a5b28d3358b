"""The GPU that the tests of this folder run on, and the marks of those that need it."""

from __future__ import annotations

import pytest

from cutegen.errors import DeviceError
from cutegen.measure.device import Device, present_device

__all__ = ["GPU", "NEEDS_BLACKWELL", "NEEDS_HOPPER"]


def _the_gpu() -> Device | None:
    try:
        return present_device()
    except DeviceError:
        return None


#: The GPU, or None where there is none.
GPU = _the_gpu()
NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU is None or GPU.arch.name != "sm_90a", reason="needs an NVIDIA GPU of sm_90a"),
]
NEEDS_BLACKWELL = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPU is None or GPU.arch.family != "sm100", reason="needs an NVIDIA GPU of sm_100a or sm_103a"
    ),
]
