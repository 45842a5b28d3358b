"""Calibrations: what was measured on one kind of GPU, in a file of its own that its models read."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from cutegen.arch import Arch, Calibration, with_calibration
from cutegen.digest import Json
from cutegen.errors import CutegenError, DeviceError, StoreError
from cutegen.families.gemm.perf_model.calibration_file import (
    CALIBRATION,
    calibration_digest,
    read_calibration,
)
from cutegen.families.gemm.perf_model.fitted import fit_of
from cutegen.families.gemm.perf_model.gpu_params import find_machine, is_measured
from cutegen.families.gemm.perf_model.packaged import arch_for
from cutegen.families.gemm.perf_model.torch_mm import torch_mm_of
from cutegen.measure.device import Device
from cutegen.records.paths import calibration_path
from cutegen.system.documents import read_bytes
from cutegen.text import printable, shown

__all__ = ["calibrated_arch", "made_on", "packaged_arch", "require_calibration"]

_log = logging.getLogger("cutegen")


def made_on(device: Device) -> dict[str, Json]:
    """Return the fields of a calibration that must be the same on the GPU where it is used.

    The patch level of the driver is left out, since every security update would invalidate the calibration.
    """
    return {"gpu": device.name, "sm_count": device.sm_count, "cuda_driver": device.cuda_driver_version}


def require_calibration(path: Path, device: Device) -> Calibration:
    """Return the calibration in a file, which must be of this GPU and driver.

    Raises:
        DeviceError: It is of another GPU or driver; the message names the field.
        StoreError: There is no such file, it is none, or another version of cutegen made it.
    """
    data = read_bytes(path, CALIBRATION, malformed=StoreError)
    calibration = Calibration(str(path), calibration_digest(data))
    found = read_calibration(path, calibration.digest)
    said = found.get("made_on")
    if not isinstance(said, dict):
        raise StoreError(f"{path} is no calibration: it does not say what GPU it was made on")
    if found.get("arch") != device.arch.name:
        raise DeviceError(f"calibration {path} is for {shown(found.get('arch'))}, not for {device.arch}")
    for name, here in made_on(device).items():
        if said.get(name) != here:
            raise DeviceError(
                f"calibration {path} is of another GPU or driver: {name} is {shown(said.get(name))} there "
                f"and {here!r} here; python -m cutegen.calibrate measures this one"
            )
    # Read and kept here: calls go on with it when the file is replaced or deleted.
    arch = with_calibration(device.arch, calibration)
    if is_measured(arch):
        fit_of(arch)
        torch_mm_of(arch)
    else:
        find_machine(arch)
    return calibration


def calibrated_arch(root: Path, device: Device) -> Arch:
    """Return the target for a GPU, with the calibration that the cache folder ``root`` has of it.

    One that cannot be used counts as none, with one warning. Where there is none, the package may have one of
    such GPUs.
    """
    path = calibration_path(root, device)
    try:
        status = path.stat()
        # A time alone may be that of two files: disks count them in steps.
        version: tuple[int, ...] = (status.st_ino, status.st_size, status.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return packaged_arch(device)
    except OSError:
        version = ()  # it is there and cannot be read, which the warning says
    found = _usable(path, version, device)
    return packaged_arch(device) if found is None else with_calibration(device.arch, found)


def packaged_arch(device: Device) -> Arch:
    """Return the target for a GPU, with what the package knows of the speed of such GPUs."""
    return arch_for(device.arch, device.name)


@lru_cache(maxsize=64)
def _usable(path: Path, version: tuple[int, ...], device: Device) -> Calibration | None:
    try:
        return require_calibration(path, device)
    except CutegenError as error:
        _log.warning("ignoring a calibration: %s", printable(str(error)))
        return None
