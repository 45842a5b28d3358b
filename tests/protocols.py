"""Protocols for tests: small ones, and a few that together hold every pair of facts about a space."""

from __future__ import annotations

from itertools import combinations
from random import Random

from covering import cover

from cutegen.arch import Arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config
from tools.bringup_parts.random_problems import random_config, random_problem
from tools.schedule import KernelProtocol, protocol_of
from tools.schedule.sm90 import HopperProtocol
from tools.schedule.sm100 import BlackwellProtocol

__all__ = ["SMALL_BLACKWELL", "SMALL_HOPPER", "covering_protocols"]

#: Two blocks that share B, one warp each that multiplies.
SMALL_HOPPER = HopperProtocol(
    cluster=(2, 1),
    stages=2,
    warpgroups=1,
    groups=1,
    promote=False,
    empty_arrivals=2,
    bytes_a=64,
    bytes_b=32,
    expected_bytes=96,
    store_buffers=0,
    pieces=(),
    warps=1,
)
#: A pair of blocks, one warp each that stores.
SMALL_BLACKWELL = BlackwellProtocol(
    cluster=(2, 1),
    pair=2,
    stages=2,
    empty_arrivals=1,
    bytes_a=64,
    bytes_b=32,
    expected_bytes=192,
    acc_stages=2,
    acc_arrivals=2,
    store_buffers=0,
    pieces=1,
    warps=1,
)


def _facts(protocol: KernelProtocol, config: Config) -> list[object]:
    """Everything that makes another sequence of steps, in pairs."""
    facts: dict[str, object] = {
        "cluster": config["cluster_shape_mn"],
        "stages": protocol.stages > 4,
        "equal": protocol.equal_tiles,
    }
    if isinstance(protocol, HopperProtocol):
        facts |= {
            "team": (protocol.warpgroups, protocol.groups),
            "promote": protocol.promote,
            "buffers": protocol.store_buffers,
            "narrow": "tail" in protocol.pieces,
        }
    if isinstance(protocol, BlackwellProtocol):
        facts |= {
            "pair": protocol.pair,
            "answers": protocol.answers,
            "buffers": protocol.store_buffers,
            "pieces": min(protocol.pieces, 3),
        }
    return list(combinations(facts.items(), 2))


def covering_protocols(arch: Arch, draws: int, seed: int = 0) -> dict[KernelProtocol, tuple[Problem, Config]]:
    """Return protocols, each with a config, that together hold every pair of facts that the draws hold."""
    space, generator = find_space("gemm", arch), Random(seed)
    pairs = []
    while len(pairs) < draws:
        problem = random_problem(generator)
        steered = {"use_tma_store": (True,)} if generator.random() < 0.5 else None
        config = random_config(space, problem, generator, steered)
        if config is not None:
            pairs.append((problem, config))
    protocols = {pair: protocol_of(*pair, arch) for pair in pairs}
    chosen = cover(pairs, lambda problem, config: _facts(protocols[problem, config], config))
    return {protocols[pair]: pair for pair in chosen}
