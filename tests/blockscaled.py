"""A few block-scaled kernels that together hold every choice, and what their instructions should be."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from blackwell import B200, B300, Kernel, pair
from covering import cover

from cutegen.arch import Arch
from cutegen.families.gemm.problem import BLOCK_SCALED, Problem
from cutegen.families.registry import find_space
from cutegen.space import Config
from tools.bringup_parts.random_problems import random_config, random_pairs

__all__ = ["FOR_B300", "LAUNCHED", "PLAIN", "SPACE", "chosen", "instruction_descriptor"]

SPACE = find_space("gemm_blockscaled", B200)
PLAIN = Problem.parse("gemm_blockscaled 4096x4096x4096 nvfp4 kk")
FOR_B300 = 3
"""Kernels of the set that are compiled for sm_103a as well: they differ in the name of the target only."""
#: Problems with odd edges in every direction, and kernels for them whose launches are looked at.
LAUNCHED = (
    (
        "gemm_blockscaled 1000x520x1056 nvfp4 kk alpha",
        "cluster_shape_mn=4x2 use_pdl=true mma_tiler_mn=256x192",
    ),
    ("gemm_blockscaled 1000x520x1056 mxfp8_e5m2 kk", "mma_tiler_mn=128x64 cluster_shape_mn=1x2"),
)


def choices(problem: Problem, config: Config) -> dict[str, object]:
    """What was chosen, in classes."""
    return {
        "tiler": config["mma_tiler_mn"],
        "cluster": config["cluster_shape_mn"],
        "swap_ab": config["swap_ab"],
        "store": "tma" if config["use_tma_store"] else SPACE.derive(config, problem, B200)["vector"],
        "pdl": config["use_pdl"],
        "ab": problem.ab_dtype,
        "out": problem.out_dtype,
        "batched": problem.batch > 1,
        "unaligned": problem.unaligned_out,
        "alpha": problem.epilogue.alpha,
    }


def held(problem: Problem, config: Config) -> list[object]:
    """Each choice, and each width of a tile with each number of scale factors."""
    width = pair(config["mma_tiler_mn"])[1]
    return [*choices(problem, config).items(), (width, problem.ab_dtype == "nvfp4")]


def draws() -> Iterator[tuple[Problem, Config]]:
    """Random problems, half of them large enough for every cluster."""
    generator = Random(0)
    for problem, config in random_pairs(SPACE, seed=0, count=150, dtypes=tuple(BLOCK_SCALED)):
        yield problem, config
        large = problem.resized(512, 2048, 1024, min(problem.batch, 2))
        found = random_config(SPACE, large, generator)
        assert found is not None
        yield large, found


def chosen() -> list[tuple[Problem, Config, Arch]]:
    """The covering set for one target, some of it for the other, and what is launched."""
    found = cover(list(draws()), held)
    launched = [(Problem.parse(line), words) for line, words in LAUNCHED]
    odd = [(p, SPACE.default(p).replace(**changes(words)), B200) for p, words in launched]
    return [(*one, B200) for one in found] + [(*one, B300) for one in found[:FOR_B300]] + odd


def changes(words: str) -> Config:
    """The knobs that ``words`` name, and with a tile whether two blocks share it."""
    config = Config.parse(words)
    return config.replace(use_2cta_instrs=pair(config["mma_tiler_mn"])[0] == 256)


#: Codes of element and scale types in an instruction descriptor. Source: PTX ISA, tcgen05.mma.
CODES = {"mxfp8_e4m3": (0, 1), "mxfp8_e5m2": (1, 1), "nvfp4": (1, 0)}


def instruction_descriptor(kernel: Kernel) -> int:
    """What the MMA has to be told: types of elements and scale factors, columns and rows.

    Source: PTX ISA, tcgen05 instruction descriptor of kinds mxf8f6f4 and mxf4nvf4.
    """
    tile_m, tile_n = pair(kernel.config["mma_tiler_mn"])
    element, scale = CODES[kernel.problem.ab_dtype]
    fields = ((element, 7), (element, 10), (tile_n // 8, 17), (scale, 23), (tile_m // 128, 27))
    return sum(value << at for value, at in fields)
