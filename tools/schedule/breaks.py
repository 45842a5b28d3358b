"""Ways to break the Hopper kernel: an edit of its text, the same edit of its model, and what should follow.

``expected`` says what a GPU should do with the edited kernel:

- ``hang``: it must not end (outcome ``timeout``);
- ``broken``: it must not pass: it hangs, faults or gives a wrong result;
- ``race``: it may pass, since the hardware need not take the order that hurts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cutegen.arch import Arch
from cutegen.build.render import Source, render
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config
from tools.schedule.edits import (
    Edit,
    about,
    both,
    drop,
    drop_after,
    drop_last,
    local_start,
    release_first,
    repeat,
    settled,
    swap_signals,
)
from tools.schedule.protocol import Arrive, Cluster, Fence, Finish, Join, Meet, Wait
from tools.schedule.simulate import lengths
from tools.schedule.sm90 import HopperProtocol

__all__ = ["BREAKS", "CASES", "OUTCOMES", "Break", "broken_source", "case_of"]

#: What may be seen on a GPU, by what is expected.
OUTCOMES = {
    "hang": frozenset({"timeout"}),
    "broken": frozenset({"timeout", "wrong_result", "launch_failed"}),
    "race": frozenset({"timeout", "wrong_result", "launch_failed", "ok"}),
}
#: Kernels to break: several tiles for every thread block, and more k tiles than stages.
CASES = {
    "teams": (
        "gemm 4096x4096x2048 bf16 kk",
        "tile_shape_mn=128x128 cluster_shape_mn=2x1 mma_warpgroups=2 use_tma_store=true swizzle_size=1",
    ),
    "square": (
        "gemm 4096x4096x2048 bf16 kk",
        "tile_shape_mn=128x128 cluster_shape_mn=2x2 mma_warpgroups=2 use_tma_store=true swizzle_size=1",
    ),
    "pingpong": (
        "gemm 4096x4096x2048 bf16 kk",
        "tile_shape_mn=64x128 cluster_shape_mn=2x1 mma_warpgroups=1 pingpong=true use_tma_store=true "
        "swizzle_size=1",
    ),
}


@dataclass(frozen=True)
class Break:
    """One way to break a kernel.

    Attributes:
        name: What it is called.
        case: Which kernel, by its name in :data:`CASES`.
        old: Text of the rendered kernel, which must be there exactly once.
        new: What takes its place.
        kinds: Kinds of violation of which the model must report at least one, and no other.
        expected: What a GPU should do: ``hang``, ``broken`` or ``race``.
        edit: The same edit of the simulated programs.
        counts: Or of the numbers from which they are made.
    """

    name: str
    case: str
    old: str
    new: str
    kinds: frozenset[str]
    expected: str
    edit: Edit = lambda cluster: cluster
    counts: Callable[[HopperProtocol], HopperProtocol] = lambda protocol: protocol

    def model(self, protocol: HopperProtocol, tiles: int = 4) -> Cluster:
        """Return the broken cluster."""
        return self.edit(self.counts(protocol).play(lengths(protocol, tiles)))


def case_of(name: str, arch: Arch) -> tuple[Problem, Config]:
    """Return the problem and the config of one of the :data:`CASES`."""
    line, changes = CASES[name]
    problem = Problem.parse(line)
    return problem, find_space(problem.family, arch).default(problem).replace(**Config.parse(changes))


def broken_source(each: Break, arch: Arch) -> Source:
    """Return the rendered kernel with the edit applied.

    Raises:
        ValueError: The old text is not there exactly once.
    """
    source = render(*case_of(each.case, arch), arch)
    found = source.text.count(each.old)
    if found != 1:
        raise ValueError(f"{each.name}: its text is {found} times in the kernel of {each.case}, not once")
    return replace(source, text=source.text.replace(each.old, each.new))


_ARRIVALS = "(CLUSTER_M + CLUSTER_N - 1) * MMA_WGS * 4"
_BYTES = "tx_count=(TILE_M + TILE_N) * TILE_K * AB.width // 8"
_STORE_WAIT = "                    if store_warp:\n                        stores.producer_acquire()\n"
_STORE_FENCE = '                    cute.arch.fence_proxy("async.shared", space="cta")\n'
_STORE_BARRIER = "                    cute.arch.barrier(barrier_id=wg, number_of_threads=WG)\n"
_RELEASE = "                    loads.consumer_release(free)\n"
_TURN_SIGNAL = "barrier_id=9 - group, number_of_threads=2 * WG)\n"


def _last_arrivals(count: Callable[[HopperProtocol], int]) -> Callable[[HopperProtocol], HopperProtocol]:
    return lambda protocol: replace(protocol, empty_arrivals=count(protocol))


def _expected(count: Callable[[HopperProtocol], int]) -> Callable[[HopperProtocol], HopperProtocol]:
    return lambda protocol: replace(protocol, expected_bytes=count(protocol))


def _of(case: str, name: str, old: str, new: str, kinds: str, expected: str, edit: Edit) -> Break:
    return Break(name, case, old, new, frozenset(kinds.split()), expected, edit)


BREAKS = (
    Break(
        "arrivals of one block only",
        "square",
        _ARRIVALS,
        "MMA_WGS * 4",
        frozenset({"overrun", "overwrite"}),
        "broken",
        counts=_last_arrivals(lambda protocol: protocol.warpgroups * 4),
    ),
    Break(
        "own block's arrivals counted twice",
        "square",
        _ARRIVALS,
        "(CLUSTER_M + CLUSTER_N) * MMA_WGS * 4",
        frozenset({"deadlock", "overrun"}),
        "hang",
        counts=_last_arrivals(lambda protocol: sum(protocol.cluster) * protocol.warpgroups * 4),
    ),
    Break(
        "one arrival too few expected",
        "teams",
        _ARRIVALS,
        _ARRIVALS + " - 1",
        frozenset({"overrun", "overwrite"}),
        "broken",
        counts=_last_arrivals(lambda protocol: protocol.empty_arrivals - 1),
    ),
    Break(
        "bytes of A only expected",
        "teams",
        _BYTES,
        "tx_count=TILE_M * TILE_K * AB.width // 8",
        frozenset({"overrun", "unfilled_read"}),
        "broken",
        counts=_expected(lambda protocol: protocol.bytes_a),
    ),
    Break(
        "too many bytes expected",
        "teams",
        _BYTES,
        _BYTES + " + 16",
        frozenset({"deadlock"}),
        "hang",
        counts=_expected(lambda protocol: protocol.expected_bytes + 16),
    ),
    _of(
        "teams",
        "last stage of a tile not released",
        "            warpgroup.wait_group(0)\n            loads.consumer_release(free)\n",
        "            warpgroup.wait_group(0)\n",
        "deadlock overrun",
        "hang",
        drop_last(about(Arrive, "empty")),
    ),
    _of(
        "teams",
        "stages released twice",
        _RELEASE,
        _RELEASE * 2,
        "overrun overwrite",
        "broken",
        repeat(about(Arrive, "empty")),
    ),
    _of(
        "teams",
        "stages released before they are read",
        "                warpgroup.wait_group(1)\n",
        "                warpgroup.wait_group(2)\n",
        "early_release overwrite",
        "race",
        release_first,
    ),
    _of(
        "teams",
        "producer waits for no release",
        "                    loads.producer_acquire(put)\n",
        "                    loads.producer_acquire(put, cutlass.Boolean(1))\n",
        "overrun overwrite",
        "broken",
        drop(about(Wait, "empty"), where=lambda place: not settled(place)),
    ),
    _of(
        "teams",
        "consumers wait for no load",
        "                loads.consumer_wait(get)\n",
        "",
        "unfilled_read",
        "broken",
        drop(about(Wait, "full")),
    ),
    _of(
        "teams",
        "producer ends before its stages are free",
        "            loads.producer_tail(put)\n",
        "",
        "dead_block",
        "race",
        drop(about(Wait, "empty"), where=settled),
    ),
    _of(
        "teams",
        "blocks start before their cluster has",
        "    pipeline_init_wait(cluster_shape_mn=(CLUSTER_M, CLUSTER_N))\n",
        "    cute.arch.sync_threads()\n",
        "uninitialised",
        "race",
        local_start,
    ),
    _of(
        "pingpong",
        "groups hand the turn to themselves",
        _TURN_SIGNAL,
        "barrier_id=8 + group, number_of_threads=2 * WG)\n",
        "deadlock stale_wait",
        "hang",
        swap_signals("turn 0", "turn 1"),
    ),
    _of(
        "pingpong",
        "nobody gives the first turn",
        "            cute.arch.barrier_arrive(barrier_id=8, number_of_threads=2 * WG)\n",
        "",
        "deadlock",
        "hang",
        drop(about(Meet, "turn 0"), who="warp", where=settled),
    ),
    _of(
        "pingpong",
        "groups do not wait for their turn",
        "            cute.arch.barrier(barrier_id=my_turn, number_of_threads=2 * WG)\n",
        "",
        "stale_wait unfilled_read",
        "race",
        both(drop(about(Join, "turn")), drop(about(Meet, "turn"))),
    ),
    _of(
        "teams",
        "store buffers written while they are stored",
        _STORE_WAIT,
        "",
        "overwrite",
        "race",
        drop(about(Finish, "store buffer"), where=lambda place: not settled(place)),
    ),
    _of(
        "teams",
        "store buffers stored without a fence",
        _STORE_FENCE,
        "",
        "unfenced",
        "race",
        drop(about(Fence, "store buffer")),
    ),
    _of(
        "teams",
        "store buffers stored before all have written",
        _STORE_FENCE + _STORE_BARRIER,
        _STORE_FENCE,
        "unfilled_read overwrite unfenced",
        "race",
        drop_after(Fence, Meet, Join),
    ),
    _of(
        "teams",
        "blocks end while they store",
        "        stores.producer_tail()\n",
        "",
        "busy_exit",
        "race",
        drop(about(Finish, "store buffer"), where=settled),
    ),
)
