"""Configs for the operators that the API lists and cutegen can launch, and the reasons for the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cutegen.arch import Arch
from cutegen.build.store import Store
from cutegen.errors import ConfigError
from cutegen.families.gemm.problem import Problem as Gemm
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.operator_api.answers import Ask, Design, Listing, Refused, find_listing
from cutegen.space import Config, Space, Value

__all__ = ["Offers", "find_offers", "offers_of"]

#: Fields of a design by our names for them; shapes have a third number, along k, that is the operator's own.
_FIELDS = {
    "operator": "operator",
    "tile_shape_mn": "tile_shape",
    "mma_tiler_mn": "tile_shape",
    "cluster_shape_mn": "cluster_shape",
    "use_2cta_instrs": "use_2cta_mma",
    "use_tma_store": "use_tma_store",
    "tile_scheduler": "tile_scheduler",
}


@dataclass(frozen=True)
class Offers:
    """NVIDIA's candidates for one problem.

    Attributes:
        configs: Those that can be compiled and launched as cutegen's own are.
        refused: All others, with reasons: the API's, else those of the space.
    """

    configs: tuple[Config, ...]
    refused: tuple[Refused, ...]


def find_offers(problem: Problem, arch: Arch, store: Store, *, ask: Ask | None = None) -> Offers:
    """Return the operators that are candidates for ``problem``.

    Args:
        problem: What is to be computed.
        arch: The target.
        store: Where the API's answers are kept.
        ask: Replaces the question to the API, for tests.

    Raises:
        BuildError: The API cannot answer.
        ResourceError: The package is not installed, or the target has no operators.
        StoreError: The store cannot be read or written.
    """
    if not isinstance(problem, Gemm):
        return Offers((), (Refused("operators", 0, f"cutegen uses none of them for {problem.family}"),))
    space = find_space(problem.family, arch, "operators")
    broken = space.explain(problem, {})
    if broken:
        return Offers((), tuple(Refused("operators", 0, f"{v.rule}: {v.reason}") for v in broken))
    return offers_of(find_listing(problem, arch, store, ask=ask), problem, space)


def offers_of(listing: Listing, problem: Problem, space: Space) -> Offers:
    """Return the operators of ``listing`` that are in ``space``, those that cutegen has an adapter for."""
    configs: dict[Config, None] = {}
    refused: Counter[tuple[str, str]] = Counter()
    for design in listing.designs:
        config = _config(design, space)
        reason = _why_not(config, problem, space)
        if reason:
            refused[str(design["operator"]), reason] += 1
        else:
            configs[config] = None
    own = (Refused(name, count, reason) for (name, reason), count in refused.items())
    return Offers(tuple(configs), (*listing.refused, *own))


def _config(design: Design, space: Space) -> Config:
    values: dict[str, Value] = {"source": "operators"}
    for knob in space.domains:
        value = design.get(_FIELDS.get(knob, ""))
        if isinstance(value, (list, tuple)):
            if len(value) >= 2 and all(type(size) is int for size in value):
                values[knob] = (value[0], value[1])
        elif isinstance(value, (bool, int, str)):
            values[knob] = value
    return Config(values)


def _why_not(config: Config, problem: Problem, space: Space) -> str:
    known = space.domains["operator"]
    if config["operator"] not in known:
        return f"cutegen has an adapter for {', '.join(map(str, known))} only"
    try:
        space.require(problem, config)
    except ConfigError as error:
        return error.reason
    return ""
