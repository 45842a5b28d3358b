"""Orders in which a cluster's agents move: by priority, by chance, or, for small ones, all there are."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from cutegen.schedule.machine import Machine
from cutegen.schedule.protocol import Cluster
from cutegen.schedule.violation import BrokenProtocolError, Violation

__all__ = ["Outcome", "everything", "in_order", "orders", "shuffled"]


@dataclass(frozen=True)
class Outcome:
    """How one run ended, or all of them.

    Attributes:
        schedule: The order, by name.
        steps: Steps taken; for all orders, the states seen.
        violation: What went wrong first, None if nothing did.
        complete: Whether all that should be looked at was.
    """

    schedule: str
    steps: int
    violation: Violation | None = None
    complete: bool = True


def orders(cluster: Cluster) -> Iterator[tuple[str, Sequence[int], bool]]:
    """Yield priorities of the agents, first to move first, and whether TMA takes the newest part first."""
    warps = list(range(len(cluster.programs)))
    units = list(range(len(warps), len(warps) + 1 + cluster.blocks))
    by_block = sorted(warps, key=lambda agent: -cluster.programs[agent].block)
    yield "loads first", [*units, *warps], False
    yield "loads last, newest first", [*warps, *units], True
    yield "last block first", [*by_block, *units], False
    yield "last warp first", [*units, *reversed(warps)], True


def in_order(cluster: Cluster, name: str, ranking: Sequence[int], newest: bool) -> Outcome:
    """Run a cluster; whoever moves goes on until it is blocked, then the first in ``ranking`` that can."""
    steps = 0
    try:
        machine = Machine(cluster)
        while (agent := next((agent for agent in ranking if machine.can_move(agent)), None)) is not None:
            while machine.can_move(agent):
                machine.move(agent, -1 if newest and agent == machine.tma else 0)
                steps += 1
        machine.check_end()
    except BrokenProtocolError as error:
        return Outcome(name, steps, error.violation)
    return Outcome(name, steps)


def shuffled(cluster: Cluster, seed: int) -> Outcome:
    """Run a cluster in a random order: seldom or often another agent, in even or in very uneven shares."""
    generator = Random(seed)
    calm = generator.choice((0.0, 0.5, 0.9))
    bias = generator.choice((0.0, 3.0))
    steps = 0
    try:
        machine = Machine(cluster)
        weights = [generator.random() ** bias for _ in range(machine.agents)]
        while agents := machine.movable():
            agent = generator.choices(agents, [weights[agent] for agent in agents])[0]
            while True:
                machine.move(agent, generator.randrange(len(machine.flying)) if agent == machine.tma else 0)
                steps += 1
                if generator.random() >= calm or not machine.can_move(agent):
                    break
        machine.check_end()
    except BrokenProtocolError as error:
        return Outcome(f"seed {seed}", steps, error.violation)
    return Outcome(f"seed {seed}", steps)


def everything(cluster: Cluster, most: int = 100_000) -> Outcome:
    """Run a cluster in every order, states that were seen before only once; give up after ``most`` states."""
    name = "every order"
    seen: set[Hashable] = set()
    try:
        todo = [Machine(cluster)]
        while todo and len(seen) < most:
            machine = todo.pop()
            if (state := machine.state()) in seen:
                continue
            seen.add(state)
            agents = machine.movable()
            if not agents:
                machine.check_end()
            # A step that commutes with every other agent's need not be tried later.
            alone = next((agent for agent in agents if machine.commutes(agent)), None)
            for agent in agents if alone is None else [alone]:
                choices = len(machine.flying) if agent == machine.tma else 1
                for which in range(choices):
                    follower = machine.copy()
                    follower.move(agent, which)
                    todo.append(follower)
    except BrokenProtocolError as error:
        return Outcome(name, len(seen), error.violation)
    return Outcome(name, len(seen), complete=not todo)
