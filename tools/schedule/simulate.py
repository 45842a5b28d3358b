"""From a config to a verdict: the protocol of its kernel, simulated under several schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cutegen.arch import Arch
from cutegen.errors import ResourceError, UsageError
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.space import Config
from tools.schedule.declared import Pipeline
from tools.schedule.explore import Outcome, in_order, orders, shuffled
from tools.schedule.protocol import Cluster
from tools.schedule.sm90 import HopperProtocol
from tools.schedule.sm100 import BlackwellProtocol
from tools.schedule.violation import Violation

__all__ = ["KernelProtocol", "Report", "lengths", "protocol_of", "simulate", "simulate_cluster"]

SHUFFLES = 4
"""Random schedules of a simulation."""


class KernelProtocol(Protocol):
    """What of a config decides who waits for whom; two configs with equal ones synchronise alike."""

    @property
    def stages(self) -> int:
        """Stages of the load pipeline."""

    @property
    def equal_tiles(self) -> bool:
        """Whether the loop over k is as long for every tile."""

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines that the text of the kernel has to create, in its order."""

    def play(self, units: Sequence[int]) -> Cluster:
        """Return the cluster that works off units of so many k tiles each."""


_FAMILIES: dict[tuple[str, str], Any] = {
    ("gemm", "sm90"): HopperProtocol,
    ("gemm", "sm100"): BlackwellProtocol,
    ("gemm_blocks", "sm90"): HopperProtocol,
    ("gemm_blockscaled", "sm100"): BlackwellProtocol,
}


@dataclass(frozen=True)
class Report:
    """What a simulation found.

    Attributes:
        outcomes: One per schedule.
    """

    outcomes: tuple[Outcome, ...]

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What went wrong first, of each schedule in which anything did."""
        return tuple(o.violation for o in self.outcomes if o.violation is not None)

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong under any schedule."""
        return not self.violations

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of what went wrong."""
        return frozenset(violation.kind for violation in self.violations)

    def __str__(self) -> str:
        steps = sum(outcome.steps for outcome in self.outcomes)
        if self.clean:
            return f"clean: {len(self.outcomes)} schedules, {steps} steps"
        bad = [f"{o.schedule}: {o.violation}" for o in self.outcomes if o.violation is not None]
        return "\n".join([f"{len(bad)} of {len(self.outcomes)} schedules go wrong", *bad])


def protocol_of(problem: Problem, config: Config, arch: Arch) -> KernelProtocol:
    """Return the protocol of the kernel that ``config`` renders to.

    Raises:
        ConfigError: The config breaks rules of its space.
        ResourceError: There is no such kernel, or its roles are not described here.
    """
    space = find_space(problem.family, arch)
    space.require(problem, config)
    known = _FAMILIES.get((problem.family, arch.family))
    if known is None:
        names = ", ".join(" on ".join(name) for name in _FAMILIES)
        raise ResourceError(f"no protocol of {problem.family} on {arch.family}; described: {names}")
    protocol: KernelProtocol = known.of(problem, config, space.derive(config, problem, arch))
    return protocol


def lengths(protocol: KernelProtocol, tiles: int, k_tiles: int | None = None) -> tuple[int, ...]:
    """Return the k tiles of each of ``tiles`` units of work.

    By default one stage more than a round of the pipeline, so that every unit starts at another stage; the
    parts of a k range that is cut are of two lengths.

    Raises:
        UsageError: There is no unit, or it has no k tile.
    """
    if tiles < 1 or (k_tiles is not None and k_tiles < 1):
        raise UsageError(f"tiles={tiles} of k_tiles={k_tiles}: both must be at least 1")
    length = protocol.stages + 1 if k_tiles is None else k_tiles
    uneven = not protocol.equal_tiles and length > 1
    return tuple(length - (tile % 2 if uneven else 0) for tile in range(tiles))


def simulate_cluster(cluster: Cluster, seed: int = 0, shuffles: int = SHUFFLES) -> Report:
    """Run a cluster under each order of priority and under so many random ones."""
    ordered = [in_order(cluster, order) for order in orders(cluster)]
    return Report((*ordered, *(shuffled(cluster, seed + i) for i in range(shuffles))))


def simulate(
    problem: Problem,
    config: Config,
    arch: Arch,
    *,
    seed: int = 0,
    tiles: int = 3,
    k_tiles: int | None = None,
    shuffles: int = SHUFFLES,
) -> Report:
    """Simulate the barriers and buffers of one cluster of the kernel of ``config``.

    Args:
        problem: What is computed; its sizes matter only through the rules of the space.
        config: A legal config for it.
        arch: The target.
        seed: Of the first random schedule.
        tiles: Units of work of the cluster.
        k_tiles: Steps along k of each; by default a few more than the pipeline has stages.
        shuffles: Random schedules, beside the fixed ones.

    Raises:
        ConfigError: The config breaks rules of its space.
        ResourceError: There is no such kernel, or its roles are not described here.
        UsageError: ``tiles`` or ``k_tiles`` is not positive.
    """
    protocol = protocol_of(problem, config, arch)
    return simulate_cluster(protocol.play(lengths(protocol, tiles, k_tiles)), seed, shuffles)
