"""Find on which GPC each cluster of a kernel runs: cutegen.families.gemm.perf_model.wave_order expects turns.

CTAs of a cluster share a GPC, so multiprocessors that had CTAs of one cluster at any time belong to one.
Clusters are launched beside kernels that keep more and more multiprocessors busy, until all are known. Then
kernels of one wave are launched alone, with one CTA to a multiprocessor, and it is counted how many of their
clusters run where the turns would have them.

    python tools/find_gpcs.py --out docs/results/gpc_turns.json

exit codes: 0 found; 2 bad usage; 3 no GPU
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.families.gemm.perf_model.wave_order import turn_of
from cutegen.measure.device import Device, present_device
from tools.benchmark.arguments import out_and_commit
from tools.benchmark.driver_kernel import DriverKernel
from tools.benchmark.environment import check_facts
from tools.benchmark.gpcs_table import GPC_TURNS, GpcTurns
from tools.benchmark.results import write_json

__all__ = ["groups_of", "main", "where_expected"]

CLUSTERS = (1, 2, 4, 8, 16)
#: Shared memory of a CTA, so that a multiprocessor has one: more than half of Hopper's 228 KiB.
_SMEM_BYTES = 160 * 1024
_THREADS = 32
#: How long CTAs wait: until all of a wave have started, and of a kernel that keeps multiprocessors busy until
#: the one beside it has started. Source: judgement.
_WAVE_NS, _BUSY_NS = 50_000, 500_000
#: Launches of each kernel of one wave.
_LAUNCHES = 5
#: Writes the multiprocessor of each CTA, then waits until the GPU's clock says that the time is over.
_PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry where(.param .u64 out, .param .u64 wait) {
    .reg .u64 %to, %wait, %begin, %now, %passed, %offset;
    .reg .u32 %thread, %cta, %sm;
    .reg .pred %other, %early;
    ld.param.u64 %to, [out];
    ld.param.u64 %wait, [wait];
    mov.u64 %begin, %globaltimer;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %other, %thread, 0;
    @%other bra again;
    cvta.to.global.u64 %to, %to;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %sm, %smid;
    mul.wide.u32 %offset, %cta, 4;
    add.u64 %to, %to, %offset;
    st.global.u32 [%to], %sm;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %early, %passed, %wait;
    @%early bra again;
    ret;
}
"""


class Placement:
    """Where clusters of a kernel run on the present device."""

    def __init__(self, device: Device) -> None:
        self._kernel = DriverKernel(_PTX, "where", _SMEM_BYTES)
        self._sm_count = device.sm_count

    def at_a_time(self, cluster: int) -> int:
        """Return how many clusters of so many CTAs run at a time."""
        return self._kernel.at_a_time(cluster, _THREADS, self._sm_count)

    def sms(self, cluster: int, clusters: int, busy: int = 0) -> list[list[int]]:
        """Return the multiprocessors of each cluster, by its number.

        Args:
            cluster: CTAs of each.
            clusters: How many.
            busy: Pairs of multiprocessors that another kernel keeps busy meanwhile.
        """
        import torch

        stream: Any = torch.cuda.Stream
        beside, here = stream(), stream()
        found, other = (
            torch.full((n,), -1, dtype=torch.int32, device="cuda") for n in (cluster * clusters, 2 * busy)
        )
        torch.cuda.synchronize()
        if busy:
            self._kernel.launch(2, _THREADS, busy, (other.data_ptr(), _BUSY_NS), beside)
        self._kernel.launch(cluster, _THREADS, clusters, (found.data_ptr(), _WAVE_NS), here)
        torch.cuda.synchronize()
        return [list(each) for each in zip(*[iter(found.tolist())] * cluster, strict=True)]


def groups_of(clusters: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the multiprocessors that share a GPC, as clusters that were seen tell: the largest GPC first."""
    groups: list[set[int]] = []
    for sms in clusters:
        touched = [group for group in groups if group & set(sms)]
        groups = [group for group in groups if group not in touched] + [set(sms).union(*touched)]
    return sorted((sorted(group) for group in groups), key=lambda group: (-len(group), group))


def find_groups(placement: Placement, sm_count: int) -> list[list[int]]:
    """Return the multiprocessors of each GPC."""
    seen: list[list[int]] = []
    for cluster in CLUSTERS[1:]:
        for busy in range((sm_count - cluster) // 2 + 1):
            seen += placement.sms(cluster, max(1, (sm_count - 2 * busy) // cluster), busy)
    return groups_of(seen)


def where_expected(gpcs: Sequence[int], blocks: int) -> int:
    """Return how many clusters run where turns would have them, with GPCs numbered so that most do.

    Args:
        gpcs: The GPC of each cluster.
        blocks: CTAs of a cluster.
    """
    found = Counter((turn_of(cluster, blocks)[0], gpc) for cluster, gpc in enumerate(gpcs))
    turns, seen, right = set[int](), set[int](), 0
    for (turn, gpc), count in found.most_common():
        if turn not in turns and gpc not in seen:
            turns.add(turn)
            seen.add(gpc)
            right += count
    return right


def run(args: argparse.Namespace) -> int:
    """Find, print and write the file.

    Raises:
        DeviceError: There is no GPU of Hopper or newer, or a call of the driver failed.
        StoreError: The file cannot be written.
    """
    device = present_device()
    placement = Placement(device)
    groups = find_groups(placement, device.sm_count)
    gpc_of = {sm: at for at, group in enumerate(groups) for sm in group}
    rows: list[dict[str, Json]] = []
    for cluster in CLUSTERS:
        clusters = placement.at_a_time(cluster)
        launches = [[gpc_of[sms[0]] for sms in placement.sms(cluster, clusters)] for _ in range(_LAUNCHES)]
        right = [where_expected(gpcs, cluster) for gpcs in launches]
        rows.append({"cluster": cluster, "clusters": clusters, "right": [*right], "gpcs": [*launches[0]]})
    facts = {**check_facts(GPC_TURNS, device, args.commit), "sm_count": device.sm_count, "sms": [*groups]}
    found = GpcTurns({**facts, "rows": rows})
    write_json(args.out, dict(found.facts))
    print("\n".join(found.summary()))
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = out_and_commit(__doc__, argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
