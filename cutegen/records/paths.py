"""Where a cache folder has the files about one kind of GPU."""

from __future__ import annotations

import re
from pathlib import Path

from cutegen.measure.device import Device

__all__ = ["calibration_path", "default_table_path"]


def default_table_path(root: Path, device: Device) -> Path:
    """Return where the dispatch table of a kind of GPU is in the cache folder ``root``."""
    return root / "tables" / f"{_stem(device)}.json"


def calibration_path(root: Path, device: Device) -> Path:
    """Return where the calibration of a kind of GPU is in the cache folder ``root``."""
    return root / "calibrations" / f"{_stem(device)}.json"


def _stem(device: Device) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
