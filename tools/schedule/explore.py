"""Orders in which a cluster's agents move: by priority, by chance, or, for small ones, all there are."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tools.schedule.machine import Machine
from tools.schedule.protocol import Cluster
from tools.schedule.violation import BrokenProtocolError, Violation

__all__ = ["Order", "Outcome", "everything", "in_order", "orders", "shuffled"]


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


@dataclass(frozen=True)
class Order:
    """A way to say whose turn it is.

    Attributes:
        name: What reports call it.
        ranking: The agents; the first that can move does.
        newest: Of the parts of loads on their way the newest lands first.
        at_once: Who ranks higher moves before the next step of whoever moved; else that goes on until it
            is blocked.
    """

    name: str
    ranking: Sequence[int]
    newest: bool = False
    at_once: bool = False


def orders(cluster: Cluster) -> Iterator[Order]:
    """Yield orders in which agents of higher priority go first, or step in wherever they can."""
    warps = list(range(len(cluster.programs)))
    units = list(range(len(warps), len(warps) + 1 + cluster.blocks))
    by_block = sorted(warps, key=lambda agent: -cluster.programs[agent].block)
    blocks = [program.block for program in cluster.programs]
    by_role = sorted(warps, key=lambda agent: agent - blocks.index(blocks[agent]))
    yield Order("loads first", [*units, *warps])
    yield Order("loads last, newest first", [*warps, *units], newest=True, at_once=True)
    yield Order("last block first", [*by_block, *units])
    yield Order("last warp first", [*units, *reversed(warps)], newest=True)
    yield Order("first warp at once", [*units, *warps], at_once=True)
    yield Order("last warp at once", [*units, *reversed(warps)], at_once=True)
    yield Order("first role at once", [*units, *by_role], at_once=True)


def in_order(cluster: Cluster, order: Order) -> Outcome:
    """Run a cluster by priority."""
    steps = 0
    try:
        machine = Machine(cluster)
        while (agent := next((a for a in order.ranking if machine.can_move(a)), None)) is not None:
            while machine.can_move(agent):
                machine.move(agent, -1 if order.newest and agent == machine.tma else 0)
                steps += 1
                if order.at_once:
                    break
        machine.check_end()
    except BrokenProtocolError as error:
        return Outcome(order.name, steps, error.violation)
    return Outcome(order.name, steps)


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
