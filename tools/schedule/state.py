"""The state of a cluster at one moment, and how to speak of it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from tools.schedule.protocol import Cluster, Commit, Multiply, Part, Place, Wait
from tools.schedule.violation import BrokenProtocolError, Violation, words

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["State"]


class State:
    """How far every warp has come, and what barriers and buffers hold."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.tma = len(cluster.programs)
        self.agents = self.tma + 1 + cluster.blocks
        self._at = [0] * self.tma
        self._turn = [0] * self.tma
        self._done = [0] * len(cluster.barriers)
        self._missing = [barrier.count for barrier in cluster.barriers]
        self._bytes = [0] * len(cluster.barriers)
        self._item = [-1] * len(cluster.buffers)
        self._parts = [0] * len(cluster.buffers)
        self._unread = [0] * len(cluster.buffers)
        self._readers = [0] * len(cluster.buffers)
        self._unfenced = [0] * len(cluster.buffers)
        self._live = [buffer.allocated for buffer in cluster.buffers]
        self._ready = [False] * cluster.blocks
        self._left = [sum(p.block == block for p in cluster.programs) for block in range(cluster.blocks)]
        self.flying: list[Part] = []
        self._queues: list[list[Multiply | Commit]] = [[] for _ in range(cluster.blocks)]
        self._open = [True] * self.tma
        self._waiting: list[list[int]] = [[] for _ in cluster.barriers]
        self._acting = 0

    def state(self) -> Hashable:
        """Return all that the future depends on."""
        return (
            *(tuple(v) for v in (self._at, self._turn, self._done, self._missing, self._bytes, self._item)),
            *(tuple(v) for v in (self._parts, self._unread, self._readers, self._unfenced, self._live)),
            frozenset(self.flying),
            tuple(map(len, self._queues)),
        )

    def copy(self) -> Self:
        """Return an independent machine in the same state."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(other, name, value.copy())
        other._queues = [queue.copy() for queue in self._queues]
        other._waiting = [waiting.copy() for waiting in self._waiting]
        return other

    def _steps(self, agent: int) -> tuple[Any, ...]:
        return self.cluster.programs[agent].steps

    # --- words ---

    def _name(self, agent: int) -> tuple[str, Place]:
        if agent < self.tma:
            program = self.cluster.programs[agent]
            at = min(self._at[agent], len(program.places) - 1)
            return str(program), program.places[at] if at >= 0 else (-1, -1)
        if agent == self.tma:
            return "TMA", (-1, -1)
        return f"tensor core of block {agent - self.tma - 1}", (-1, -1)

    def _broken(self, kind: str, text: str) -> BrokenProtocolError:
        actor, (tile, k) = self._name(self._acting)
        return BrokenProtocolError(Violation(kind, actor, tile, k, text))

    def _who_reads(self, number: int) -> str:
        readers = [agent for agent in range(self.tma) if self._readers[number] >> agent & 1]
        names = ", ".join(str(self.cluster.programs[agent]) for agent in readers)
        return f"{names} reads {self.cluster.buffers[number]}"

    def _waits_of(self, agents: Sequence[int], most: int = 6) -> str:
        """Say who waits for what, once per barrier; those where something has arrived come first."""
        waits: dict[object, list[int]] = {}
        for agent in agents:
            waits.setdefault(self._steps(agent)[self._at[agent]], []).append(agent)
        groups = sorted(waits.values(), key=self._is_untouched)
        stories = [self._waits_for(waiting) for waiting in groups]
        more = f"; and {len(stories) - most} more barriers" if len(stories) > most else ""
        return "; ".join(stories[:most]) + more

    def _is_untouched(self, agents: Sequence[int]) -> bool:
        number = self._steps(agents[0])[self._at[agents[0]]].barrier
        return self._missing[number] == self.cluster.barriers[number].count and not self._bytes[number]

    def _waits_for(self, agents: Sequence[int]) -> str:
        step = self._steps(agents[0])[self._at[agents[0]]]
        name, place = self._name(agents[0])
        others = f" (and {len(agents) - 1} other warps)" if len(agents) > 1 else ""
        barrier = self.cluster.barriers[step.barrier]
        missing = f"{self._missing[step.barrier]} of {barrier.count} arrivals"
        if self._bytes[step.barrier]:
            missing += f" and {self._bytes[step.barrier]} bytes"
        phase = f"phase {step.phase} of " if isinstance(step, Wait) else ""
        return f"{name}{words(place)}{others} waits for {phase}{barrier}, which lacks {missing}"
