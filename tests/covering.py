"""A small set of kernels in which every choice meets every other: each pair of choices that can be legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import sqrt
from random import Random

from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.space import Config, Space, Value
from tools.bringup_parts.random_problems import random_config, random_problem

__all__ = ["choices", "cover", "covering_set", "reads_c_in_pairs", "seconds"]

#: Problems from which the set is drawn, and how the draws for each are steered towards what is rare.
PROBLEMS = 1000
STEERS: tuple[Mapping[str, tuple[Value, ...]], ...] = (
    {},
    {"pingpong": (True,)},
    {"stream_k": (True,)},
    {"reduction": ("arrival",)},
    {"split_k": (2, 3, 4)},
    {"use_tma_store": (True,)},
)


def choices(problem: Problem, config: Config) -> dict[str, object]:
    """Return what was chosen, in classes: what one class does for the code, its other members do too."""
    tile, epilogue = config["tile_shape_mn"], problem.epilogue
    assert isinstance(tile, tuple)
    staged = config["use_tma_store"] and config["split_k"] == 1
    singles = not staged and (config["swap_ab"] or problem.unaligned_out)
    parts = (
        "stream" if config["stream_k"] else str(config["reduction"]) if config["split_k"] != 1 else "whole"
    )
    return {
        "tile_m": tile[0],
        "width": tile[1] if tile[1] <= 32 else f"tail {tile[1] % 32}",
        "k_bytes": int(str(config["tile_k"])) * DTYPE_BYTES[problem.ab_dtype],
        "shared": tuple(size > 1 for size in config["cluster_shape_mn"]),  # type: ignore[union-attr]
        "team": "pingpong" if config["pingpong"] else config["mma_warpgroups"],
        "swap_ab": config["swap_ab"],
        "store": "tma" if staged else "single elements" if singles else "pairs",
        "pdl": config["use_pdl"],
        "parts": parts,
        "ab": {"e5m2": "e4m3"}.get(problem.ab_dtype, problem.ab_dtype),
        "out": problem.out_dtype,
        "plain": epilogue == Epilogue(),
        "layout": problem.layout,
        "batched": problem.batch > 1,
        "unaligned": problem.unaligned_out,
        "alpha": epilogue.alpha,
        "beta": epilogue.beta,
        "scale": epilogue.scale,
        "bias": epilogue.bias,
        "activation": epilogue.activation,
        "promote": problem.promote,
    }


def _draws(space: Space, generator: Random) -> Iterator[tuple[Problem, Config]]:
    for i in range(PROBLEMS):
        problem = random_problem(generator)
        if i % 2:  # sizes with a small last wave and a deep k, where every steer leads somewhere
            sizes = generator.choice((320, 640)), 4096, 4096
            problem = replace(problem.resized(*sizes, min(problem.batch, 2)), any_order=True)
        for steer in STEERS if i % 2 and not problem.unaligned_out else STEERS[: 5 if i % 2 else 2]:
            config = random_config(space, problem, generator, steer)
            if config is not None:
                yield problem, config


def covering_set(space: Space, seed: int = 0) -> tuple[tuple[Problem, Config], ...]:
    """Return pairs that together hold every pair of choices that the draws hold.

    And every tile width, every cluster, every type of results with each type of operands, and C that is read
    in pairs with each way in which results leave.
    """

    def held(problem: Problem, config: Config) -> list[object]:
        tile, chosen = config["tile_shape_mn"], choices(problem, config)
        assert isinstance(tile, tuple)
        types = (problem.ab_dtype, problem.out_dtype)
        alone = [("tile_n", tile[1]), ("cluster", config["cluster_shape_mn"]), types]
        alone.append((problem.out_dtype, chosen["plain"]))
        alone.append(("C", chosen["store"] if reads_c_in_pairs(problem, config) else ""))
        return [*alone, *combinations(chosen.items(), 2)]

    return cover(list(_draws(space, Random(seed))), held, seconds)


def reads_c_in_pairs(problem: Problem, config: Config) -> bool:
    """Whether the epilogue reads C, two aligned elements of 16 bits at a time, and no bias one by one."""
    aligned = not config["swap_ab"] and not problem.unaligned_out
    only_c = problem.epilogue.beta and not problem.epilogue.bias
    return only_c and problem.out_dtype in ("bf16", "fp16") and aligned


def seconds(problem: Problem, config: Config) -> float:
    """Return about how long a Hopper kernel takes to compile: by what its epilogue does to each element.

    Least squares over 68 kernels, whose times it follows with a correlation of 0.89.
    """
    tile, epilogue = config.pair("tile_shape_mn"), problem.epilogue
    elements = tile[0] * tile[1] / (128 * config.integer("mma_warpgroups"))
    divided = config["split_k"] != 1
    steps = (
        bool(epilogue.beta)
        + bool(epilogue.bias)
        + {"": 0, "gelu": 3}.get(epilogue.activation, 1)
        + (divided or config["use_tma_store"] is False)
        + (divided or config["stream_k"] is True)
    )
    return 0.83 + 0.004 * elements * steps


def cover(
    draws: Sequence[tuple[Problem, Config]],
    held: Callable[[Problem, Config], Sequence[object]],
    cost: Callable[[Problem, Config], float] = lambda problem, config: 1.0,
) -> tuple[tuple[Problem, Config], ...]:
    """Return some of ``draws`` that together hold everything that all of them hold, at a low cost.

    Greedy: the draw that adds most comes next, over the root of its cost; over the cost itself there would
    be too many cheap ones. What a draw holds are the bits of one integer.
    """
    bits: dict[object, int] = {}
    masks = [
        sum(1 << bits.setdefault(thing, len(bits)) for thing in held(problem, config))
        for problem, config in draws
    ]
    missing = (1 << len(bits)) - 1
    worth = [1 / sqrt(cost(problem, config)) for problem, config in draws]
    chosen = []
    while missing:
        best = max(range(len(masks)), key=lambda i: ((masks[i] & missing).bit_count() * worth[i], -i))
        chosen.append(draws[best])
        missing &= ~masks[best]
    return tuple(chosen)
