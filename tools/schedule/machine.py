"""One cluster in motion: barriers, buffers and warps, a step at a time, in whatever order it is told.

Anything asynchronous ends as late as the protocol allows: parts of TMA loads and queued MMAs when they are
chosen, reads by WGMMAs and by TMA stores only when somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.schedule.protocol import (
    Alloc,
    Arrive,
    Cluster,
    Commit,
    Expect,
    Fence,
    Finish,
    Free,
    Init,
    Join,
    Load,
    Meet,
    Multiply,
    Part,
    Read,
    Store,
    Wait,
    Write,
)
from tools.schedule.state import State

__all__ = ["Machine"]


class Machine(State):
    """The state of a cluster. Agents are its warps, then the TMA unit, then one MMA queue per block."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        for agent in range(self.tma):
            self._settle(agent)

    # --- whose turn it can be ---

    def can_move(self, agent: int) -> bool:
        """Return whether an agent has something to do and is not blocked."""
        if agent < self.tma:
            return self._open[agent]
        if agent == self.tma:
            return bool(self.flying)
        return bool(self._queues[agent - self.tma - 1])

    def movable(self) -> list[int]:
        """Return the agents that can move."""
        found = [agent for agent, can_move in enumerate(self._open) if can_move]
        if self.flying:
            found.append(self.tma)
        return found + [self.tma + 1 + block for block, queue in enumerate(self._queues) if queue]

    def commutes(self, agent: int) -> bool:
        """Return whether a warp's next step neither sees nor changes what other agents see or check."""
        return agent < self.tma and type(self._steps(agent)[self._at[agent]]) in (Load, Join, Commit)

    def move(self, agent: int, which: int = 0) -> None:
        """Let an agent do its next step; of the TMA unit, the part in flight with number ``which``.

        Raises:
            BrokenProtocolError: The step breaks the protocol.
        """
        self._acting = agent
        if agent == self.tma:
            self._land(self.flying.pop(which))
        elif agent > self.tma:
            self._drain(self._queues[agent - self.tma - 1].pop(0))
        else:
            step = self.cluster.programs[agent].steps[self._at[agent]]
            _PERFORM[type(step)](self, step)
            self._at[agent] += 1
            self._settle(agent)

    def check_end(self) -> None:
        """Do nothing if everybody has finished and left nothing behind; call it when nobody can move.

        Raises:
            BrokenProtocolError: Somebody has not finished, a deadlock; something loaded, computed or written
                is in a buffer still; or accumulators were not freed.
        """
        stuck = [agent for agent in range(self.tma) if self._at[agent] < len(self._steps(agent))]
        if stuck:
            self._acting = stuck[0]
            raise self._broken("deadlock", f"nobody can move: {self._waits_of(stuck)}")
        blocks = [program.block for program in self.cluster.programs]
        for number, buffer in enumerate(self.cluster.buffers):
            self._acting = blocks.index(buffer.block)
            if self._unread[number]:
                item, warps = self._item[number], self._unread[number]
                raise self._broken("lost", f"{warps} warps have not read item {item} of {buffer} at the end")
            if not buffer.readers and self._parts[number]:
                raise self._broken("lost", f"{buffer} was written but not stored at the end")
            if self._live[number] and not buffer.allocated:
                raise self._broken("leak", f"{buffer} was not freed at the end")

    # --- warps ---

    def _settle(self, agent: int) -> None:
        """See whether a warp's next step is blocked, or whether there is none."""
        steps = self._steps(agent)
        if self._at[agent] == len(steps):
            self._open[agent] = False
            self._leave(self.cluster.programs[agent].block)
            return
        step = steps[self._at[agent]]
        if type(step) is Wait:
            self._open[agent] = self._passes(agent, step)
        elif type(step) is Join:
            self._open[agent] = self._done[step.barrier] != self._turn[agent]
        else:
            self._open[agent] = True
        if not self._open[agent]:
            self._waiting[step.barrier].append(agent)

    def _passes(self, agent: int, step: Wait) -> bool:
        """Compare parities as the hardware does, and phases as the author meant it."""
        barrier, done = self.cluster.barriers[step.barrier], self._done[step.barrier]
        if barrier.block != self.cluster.programs[agent].block:
            self._acting = agent
            raise self._broken("remote_wait", f"waits for {barrier}")
        if not self._ready[barrier.block]:
            self._acting = agent
            self._require_block(step.barrier, "waits for")
        if (done ^ step.phase) & 1:
            if done != step.phase + 1:
                self._acting = agent
                kind = "stale_wait" if done <= step.phase else "overrun"
                raise self._broken(
                    kind, f"waits for phase {step.phase} of {barrier}, which is in phase {done}: it passes"
                )
            return True
        if done > step.phase:
            self._acting = agent
            raise self._broken(
                "overrun", f"waits for phase {step.phase} of {barrier}, which is in phase {done}: it blocks"
            )
        return False

    def _leave(self, block: int) -> None:
        self._left[block] -= 1
        if self._left[block]:
            return
        for number, buffer in enumerate(self.cluster.buffers):
            if buffer.block == block and self._readers[number]:
                raise self._broken("busy_exit", f"block {block} ends while {self._who_reads(number)}")

    def _resume(self, step: Wait) -> None:
        if self._done[step.barrier] != step.phase + 1:
            barrier = self.cluster.barriers[step.barrier]
            raise self._broken(
                "overrun",
                f"missed phase {step.phase} of {barrier}, which is in phase {self._done[step.barrier]}",
            )

    def _nothing(self, step: object) -> None:
        pass

    def _init(self, step: Init) -> None:
        self._ready[self.cluster.programs[self._acting].block] = True

    # --- barriers ---

    def _require_block(self, number: int, doing: str) -> None:
        """See that a barrier's block has initialised it and is still there."""
        barrier = self.cluster.barriers[number]
        if barrier.block < 0:
            return
        if not self._ready[barrier.block]:
            raise self._broken("uninitialised", f"{doing} {barrier}, which was not initialised yet")
        if not self._left[barrier.block]:
            raise self._broken("dead_block", f"{doing} {barrier}, but that block has ended")

    def _arrive(self, number: int, phase: int, what: str) -> None:
        self._require_block(number, f"{what} at")
        if self._done[number] != phase:
            raise self._broken(
                "overrun",
                f"{what} at {self.cluster.barriers[number]} for its phase {phase}, but it is in "
                f"phase {self._done[number]}",
            )
        self._missing[number] -= 1
        self._complete(number)

    def _complete(self, number: int) -> None:
        if self._missing[number] or self._bytes[number]:
            return
        self._done[number] += 1
        self._missing[number] = self.cluster.barriers[number].count
        waiting, self._waiting[number] = self._waiting[number], []
        for agent in waiting:
            self._settle(agent)

    def _arrive_all(self, step: Arrive) -> None:
        for buffer in step.frees:
            if self._readers[buffer] >> self._acting & 1:
                name = self.cluster.buffers[buffer]
                raise self._broken("early_release", f"gives back {name}, which it still reads")
        for number in step.barriers:
            self._arrive(number, step.phase, "arrives")

    def _expect(self, step: Expect) -> None:
        self._require_block(step.barrier, "expects bytes at")
        if self._done[step.barrier] == step.phase:
            self._bytes[step.barrier] += step.size
        self._arrive(step.barrier, step.phase, "expects bytes")

    def _meet(self, step: Meet) -> None:
        self._turn[self._acting] = self._done[step.barrier]
        self._missing[step.barrier] -= 1
        self._complete(step.barrier)

    # --- buffers ---

    def _require_buffer(self, number: int, doing: str) -> None:
        buffer = self.cluster.buffers[number]
        if not self._live[number]:
            raise self._broken("uninitialised", f"{doing} {buffer}, which is not allocated")
        if not self._left[buffer.block]:
            raise self._broken("dead_block", f"{doing} {buffer}, but that block has ended")

    def _require_drained(self, number: int, doing: str) -> None:
        buffer = self.cluster.buffers[number]
        if self._readers[number]:
            raise self._broken("overwrite", f"{doing} {buffer} while {self._who_reads(number)}")
        if self._unread[number]:
            raise self._broken(
                "overwrite",
                f"{doing} {buffer} before {self._unread[number]} warps have read its item "
                f"{self._item[number]}",
            )

    def _load(self, step: Load) -> None:
        self.flying += step.parts

    def _land(self, part: Part) -> None:
        number, doing = part.buffer, f"load of item {part.item} writes"
        self._require_buffer(number, doing)
        if self._item[number] != part.item:
            self._require_drained(number, doing)
            self._item[number], self._parts[number] = part.item, 0
            self._unread[number] = self.cluster.buffers[number].readers
        if self._parts[number] & part.part:
            raise self._broken("overwrite", f"{doing} the same part of {self.cluster.buffers[number]} again")
        self._parts[number] |= part.part
        self._require_block(part.barrier, "bytes arrive at")
        if self._done[part.barrier] != part.phase:
            raise self._broken(
                "overrun",
                f"bytes of item {part.item} arrive at {self.cluster.barriers[part.barrier]} for its phase "
                f"{part.phase}, but it is in phase {self._done[part.barrier]}",
            )
        self._bytes[part.barrier] -= part.size
        self._complete(part.barrier)

    def _read(self, step: Read) -> None:
        for number in step.buffers:
            self._require_buffer(number, "reads")
            buffer = self.cluster.buffers[number]
            if self._item[number] != step.item or self._parts[number] != buffer.parts:
                found = f"item {self._item[number]}" if self._item[number] >= 0 else "nothing"
                full = "all" if self._parts[number] == buffer.parts else "a part"
                raise self._broken(
                    "unfilled_read", f"wants item {step.item} in {buffer}, which holds {full} of {found}"
                )
            self._readers[number] |= 1 << self._acting

    def _finish(self, step: Finish) -> None:
        for number in step.buffers:
            if self._readers[number] >> self._acting & 1:
                self._readers[number] ^= 1 << self._acting
                self._unread[number] = max(0, self._unread[number] - 1)

    def _write(self, step: Write) -> None:
        buffer = self.cluster.buffers[step.buffer]
        self._require_drained(step.buffer, "writes")
        if self._parts[step.buffer] & step.part:
            raise self._broken("overwrite", f"writes {buffer} again before it was stored")
        self._parts[step.buffer] |= step.part
        self._unfenced[step.buffer] |= step.part

    def _fence(self, step: Fence) -> None:
        self._unfenced[step.buffer] &= ~step.part

    def _store(self, step: Store) -> None:
        number, buffer = step.buffer, self.cluster.buffers[step.buffer]
        if self._parts[number] != buffer.parts:
            raise self._broken("unfilled_read", f"stores {buffer}, which not all warps have written")
        if self._unfenced[number]:
            raise self._broken("unfenced", f"stores {buffer}, which was written without a fence")
        self._parts[number] = 0
        self._readers[number] |= 1 << self._acting

    def _alloc(self, step: Alloc) -> None:
        for number in step.buffers:
            self._live[number] = True

    def _free(self, step: Free) -> None:
        for number in step.buffers:
            if self._readers[number] or self._unread[number]:
                raise self._broken("busy_exit", f"frees {self.cluster.buffers[number]}, which is in use")
            self._live[number] = False

    # --- MMAs that run on their own, in order ---

    def _queue_multiply(self, step: Multiply) -> None:
        for number in step.sums:
            self._require_buffer(number, "adds to")
            if step.first:
                self._require_drained(number, "starts to fill")
                self._item[number], self._parts[number] = step.tile, 0
                self._unread[number] = self.cluster.buffers[number].readers
        self._read(Read(step.buffers, step.item))
        self._queues[self.cluster.programs[self._acting].block].append(step)

    def _queue_commit(self, step: Commit) -> None:
        self._queues[self.cluster.programs[self._acting].block].append(step)

    def _drain(self, step: Multiply | Commit) -> None:
        if isinstance(step, Multiply):
            for number in step.buffers:
                self._readers[number] = 0
                self._unread[number] = max(0, self._unread[number] - 1)
            return
        for number in step.fills:
            self._parts[number] = self.cluster.buffers[number].parts
        for number in step.barriers:
            self._arrive(number, step.phase, "a commit arrives")


_PERFORM: dict[type, Callable[[Machine, Any], None]] = {
    Wait: Machine._resume,
    Join: Machine._nothing,
    Arrive: Machine._arrive_all,
    Expect: Machine._expect,
    Load: Machine._load,
    Read: Machine._read,
    Finish: Machine._finish,
    Multiply: Machine._queue_multiply,
    Commit: Machine._queue_commit,
    Meet: Machine._meet,
    Write: Machine._write,
    Fence: Machine._fence,
    Store: Machine._store,
    Init: Machine._init,
    Alloc: Machine._alloc,
    Free: Machine._free,
}
