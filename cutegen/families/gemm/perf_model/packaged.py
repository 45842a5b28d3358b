"""Calibrations that the package ships, for GPUs whose GEMMs take other times than the main product's.

They are files as ``python -m cutegen.calibrate`` writes them, fitted to more products.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cutegen.arch import Arch, Calibration, with_calibration
from cutegen.families.gemm.perf_model.calibration_file import calibration_digest

__all__ = ["arch_for", "packaged_calibration", "packaged_path"]

_FOLDER = Path(__file__).with_name("gpus")
#: Files by how names of GPUs begin, as NVML reports them. All parts of one line have tensor cores and L2 of
#: the same kind, and from 2.0 to 3.9 TB/s of memory bandwidth where the H200 has 4.8. Source: NVIDIA
#: datasheets.
_FILES: Mapping[str, str] = {
    "NVIDIA H100": "nvidia_h100_80gb_hbm3.json",
    "NVIDIA H800": "nvidia_h100_80gb_hbm3.json",
}


def packaged_path(gpu: str) -> Path | None:
    """Return the file for the product that NVML calls ``gpu``; None if it is the main product's like."""
    return next((_FOLDER / file for start, file in _FILES.items() if gpu.startswith(start)), None)


@cache
def packaged_calibration(gpu: str) -> Calibration | None:
    """Return the calibration for the product that NVML calls ``gpu``, if the package has one."""
    path = packaged_path(gpu)
    return None if path is None else Calibration(str(path), calibration_digest(path.read_bytes()))


def arch_for(arch: Arch, gpu: str) -> Arch:
    """Return ``arch`` with what the package knows of the product that NVML calls ``gpu``."""
    found = packaged_calibration(gpu)
    return arch if found is None else with_calibration(arch, found)
