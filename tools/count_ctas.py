"""Count how many CTAs run at a time, of clusters of every size: by a kernel that only waits.

A launch whose CTAs all run at a time takes as long as one of a single cluster; one cluster more waits for
another to end and takes twice as long. Rules of spaces/row/registers.py and cutegen/arch.py rest on these
numbers, and the driver's cuOccupancyMaxActiveClusters is asked for the same.

    python tools/count_ctas.py --out docs/results/resident_ctas.json

exit codes: 0 counted; 2 bad usage; 3 no GPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.measure.device import Device, present_device
from tools.benchmark.arguments import out_and_commit
from tools.benchmark.driver_kernel import DriverKernel
from tools.benchmark.environment import check_facts
from tools.benchmark.resident_table import RESIDENT, Resident
from tools.benchmark.results import write_json

__all__ = ["main"]

CLUSTERS = (1, 2, 4, 8, 16)
THREADS = (64, 128, 256, 512, 1024)
#: How long a CTA waits. Source: judgement, several times what a launch and a look at the clock take.
_WAIT_NS = 20_000
#: Launches of each size; the shortest counts.
_LAUNCHES = 3
#: More CTAs than a multiprocessor may have (32 on Hopper).
_MOST_CTAS = 33
#: Waits until the GPU's clock says that the time is over.
_PTX = f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry wait() {{
    .reg .u64 %begin, %now, %passed;
    .reg .pred %early;
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %early, %passed, {_WAIT_NS};
    @%early bra again;
    ret;
}}
"""


def microseconds(kernel: DriverKernel, cluster: int, threads: int, clusters: int) -> float:
    """Return what a launch of so many clusters takes."""
    import torch

    event: Any = torch.cuda.Event
    found = []
    for _ in range(_LAUNCHES):
        begin, end = (event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        kernel.launch(cluster, threads, clusters, plain=cluster == 1)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000)
    return float(min(found))


def most_at_a_time(takes: Callable[[int], float], limit: int) -> int:
    """Return the largest number of clusters up to ``limit`` that take no second wait.

    Args:
        takes: Microseconds of a launch of so many clusters.
        limit: More than run at a time.
    """
    longest = takes(1) + 0.75 * _WAIT_NS / 1000
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(middle) < longest else (low, middle - 1)
    return low


def count(device: Device, kernel: DriverKernel) -> list[dict[str, Json]]:
    """Return a row for each size of clusters and number of threads."""
    rows: list[dict[str, Json]] = []
    for cluster in CLUSTERS:
        for threads in THREADS:
            limit = _MOST_CTAS * device.sm_count // cluster
            found = most_at_a_time(partial(microseconds, kernel, cluster, threads), limit)
            row: dict[str, Json] = {"cluster": cluster, "threads": threads, "clusters": found}
            rows.append({**row, "by_driver": kernel.at_a_time(cluster, threads, device.sm_count)})
    return rows


def run(args: argparse.Namespace) -> int:
    """Count, print and write the file.

    Raises:
        DeviceError: There is no GPU of Hopper or newer, or a call of the driver failed.
        StoreError: The file cannot be written.
    """
    device = present_device()
    facts = {**check_facts(RESIDENT, device, args.commit), "sm_count": device.sm_count}
    found = Resident({**facts, "rows": count(device, DriverKernel(_PTX, "wait"))})
    write_json(args.out, dict(found.facts))
    print("\n".join(found.summary()))
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = out_and_commit(__doc__, argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
