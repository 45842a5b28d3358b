"""For which GPU a command answers, and from which dispatch table."""

from __future__ import annotations

import argparse

from cutegen.arch import Arch, find_arch
from cutegen.build.store import Store
from cutegen.measure.device import Device, or_else, present_device
from cutegen.records.calibrations import calibrated_arch
from cutegen.records.entry import Fingerprint
from cutegen.records.paths import default_table_path
from cutegen.records.table import Table

__all__ = ["device_at_hand", "find_target"]


def device_at_hand(otherwise: str = "to ask about another target") -> Device:
    """Return the GPU here.

    Args:
        otherwise: What an architecture is given for.

    Raises:
        DeviceError: There is none; the message says how to name another target.
    """
    with or_else(f"{otherwise} give --arch, such as sm_90a"):
        return present_device()


def find_target(args: argparse.Namespace, *otherwise: str) -> tuple[Arch, int, Table | None, str]:
    """Return architecture, SMs, the table that counts, and why one that was found does not.

    Raises:
        DeviceError: As :func:`device_at_hand`, which is told what is ``otherwise``.
    """
    device = None if args.arch else device_at_hand(*otherwise)
    store = Store.at(args.cache_dir)
    arch = calibrated_arch(store.root, device) if device else find_arch(args.arch)
    sm_count = device.sm_count if device else arch.nominal_sm_count
    if args.table is not None:
        table: Table | None = Table.load(args.table)
    elif device is not None:
        table = Table.find(default_table_path(store.root, device))
    else:
        table = None
    if table is None:
        return arch, sm_count, None, ""
    made_for = table.fingerprint
    reasons = table.mismatch(Fingerprint.of(device) if device else Fingerprint.of_target(arch))
    if device is None and not reasons and isinstance(made_for.sm_count, int):
        sm_count = made_for.sm_count
    return arch, sm_count, None if reasons else table, "; ".join(reasons)
