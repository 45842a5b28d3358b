"""Edits of simulated programs: steps dropped, repeated, swapped or changed in some of a cluster's warps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tools.schedule.protocol import (
    Arrive,
    Barrier,
    Buffer,
    Cluster,
    Finish,
    Join,
    Meet,
    Place,
    Program,
    Step,
    Wait,
)

__all__ = [
    "Edit",
    "about",
    "both",
    "drop",
    "drop_after",
    "drop_last",
    "local_start",
    "release_first",
    "repeat",
    "settled",
    "swap_signals",
]

Edit = Callable[[Cluster], Cluster]
Select = Callable[[Cluster, Step], bool]
Pair = tuple[Step, Place]


def about(kind: type | tuple[type, ...], words: str) -> Select:
    """Return what selects steps of a kind that touch a barrier or buffer whose name begins so."""

    def selects(cluster: Cluster, step: Step) -> bool:
        return isinstance(step, kind) and any(
            str(thing).startswith(words) for thing in _touched(cluster, step)
        )

    return selects


def _touched(cluster: Cluster, step: Step) -> list[Barrier | Buffer]:
    found: list[Barrier | Buffer] = []
    if isinstance(step, Wait | Meet | Join):
        found.append(cluster.barriers[step.barrier])
    if isinstance(step, Arrive):
        found += (cluster.barriers[number] for number in step.barriers)
    if isinstance(step, Finish):
        found += (cluster.buffers[number] for number in step.buffers)
    if hasattr(step, "buffer"):
        found.append(cluster.buffers[step.buffer])
    return found


def _rewrite(cluster: Cluster, change: Callable[[Program], Sequence[Pair]], who: str = "") -> Cluster:
    programs = tuple(
        program.edited(change(program)) if program.name.startswith(who) else program
        for program in cluster.programs
    )
    return replace(cluster, programs=programs)


def settled(place: Place) -> bool:
    """Return whether a step belongs to no tile: the start or the end of a warp."""
    return place[0] < 0


def drop(select: Select, who: str = "", where: Callable[[Place], bool] = lambda place: True) -> Edit:
    """Leave out the steps that are selected."""

    def edit(cluster: Cluster) -> Cluster:
        def change(program: Program) -> list[Pair]:
            return [(s, p) for s, p in program.pairs() if not (select(cluster, s) and where(p))]

        return _rewrite(cluster, change, who)

    return edit


def drop_after(kind: type, *dropped: type) -> Edit:
    """Leave out the steps of kinds ``dropped``, one each, that come directly after one of ``kind``."""

    def edit(cluster: Cluster) -> Cluster:
        def change(program: Program) -> list[Pair]:
            pairs: list[Pair] = []
            left: list[type] = []
            for step, place in program.pairs():
                if type(step) in left:
                    left.remove(type(step))
                    continue
                left = list(dropped) if isinstance(step, kind) else []
                pairs.append((step, place))
            return pairs

        return _rewrite(cluster, change)

    return edit


def repeat(select: Select, who: str = "") -> Edit:
    """Do the steps that are selected twice."""

    def edit(cluster: Cluster) -> Cluster:
        def change(program: Program) -> list[Pair]:
            return [pair for pair in program.pairs() for _ in range(2 if select(cluster, pair[0]) else 1)]

        return _rewrite(cluster, change, who)

    return edit


def drop_last(select: Select, who: str = "") -> Edit:
    """Leave out the last of the selected steps of every tile."""

    def edit(cluster: Cluster) -> Cluster:
        def change(program: Program) -> list[Pair]:
            last = {p[0]: i for i, (s, p) in enumerate(program.pairs()) if select(cluster, s)}
            return [pair for i, pair in enumerate(program.pairs()) if last.get(pair[1][0]) != i]

        return _rewrite(cluster, change, who)

    return edit


def release_first(cluster: Cluster) -> Cluster:
    """Let every warp give back a stage before its reads of it are done."""

    def change(program: Program) -> list[Pair]:
        pairs = list(program.pairs())
        for i in range(len(pairs) - 1):
            first, second = pairs[i][0], pairs[i + 1][0]
            if isinstance(first, Finish) and isinstance(second, Arrive) and first.buffers == second.frees:
                pairs[i], pairs[i + 1] = pairs[i + 1], pairs[i]
        return pairs

    return _rewrite(cluster, change)


def swap_signals(name: str, other: str) -> Edit:
    """Let signals given in a tile to barriers called ``name`` or ``other`` go to the other one."""

    def edit(cluster: Cluster) -> Cluster:
        numbers = {(b.name, b.block): number for number, b in enumerate(cluster.barriers)}
        swap = {name: other, other: name}

        def change(program: Program) -> list[Pair]:
            pairs: list[Pair] = []
            for i, (step, place) in enumerate(program.pairs()):
                follows = program.steps[i + 1 : i + 2]
                joined = bool(follows) and isinstance(follows[0], Join)
                barrier = cluster.barriers[step.barrier] if isinstance(step, Meet) else None
                if barrier is not None and barrier.name in swap and not (joined or settled(place)):
                    step = Meet(numbers[swap[barrier.name], barrier.block])
                pairs.append((step, place))
            return pairs

        return _rewrite(cluster, change)

    return edit


def local_start(cluster: Cluster) -> Cluster:
    """Let each block wait for its own warps only before the first signal."""
    everybody = next(i for i, barrier in enumerate(cluster.barriers) if barrier.block < 0)
    first = len(cluster.barriers)
    own = tuple(
        Barrier("the block's barrier", block, sum(p.block == block for p in cluster.programs))
        for block in range(cluster.blocks)
    )

    def change(program: Program) -> list[Pair]:
        pairs: list[Pair] = []
        for step, place in program.pairs():
            if isinstance(step, Meet | Join) and step.barrier == everybody:
                step = type(step)(first + program.block)
            pairs.append((step, place))
        return pairs

    return _rewrite(replace(cluster, barriers=(*cluster.barriers, *own)), change)


def both(*edits: Edit) -> Edit:
    """Do one edit after the other."""

    def edit(cluster: Cluster) -> Cluster:
        for each in edits:
            cluster = each(cluster)
        return cluster

    return edit
