"""Kernels on a real GPU, on poisoned outputs with guards around them, against fp64, twice.

Two lists: a random walk over problems and configs, and a covering set in which every choice meets every
other. Each test is named by its number, problem and config, so ``-k`` picks kernels by any knob.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from family_kernels import config_is_right
from hopper import GPU, NEEDS_HOPPER

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from covering import covering_set

from tools.bringup_parts.random_problems import random_pairs

SPACE = find_space("gemm", find_arch("sm_90a"))
#: Pairs of the walk; raise it, or change the seed, for a longer one.
WALK, SEED = 60, 0
#: What the walk meets too rarely: tiny sizes, narrow tiles, and each way in which parts of k can meet.
CHOSEN_LINES = [
    ("gemm 5x7x16 bf16 kk", ""),
    ("gemm 1x1x8 fp16 kk", ""),
    ("gemm 1x4096x4096 bf16 kk", ""),
    ("gemm 5x4097x4104 bf16 kk", "tile_shape_mn=64x8"),
    ("gemm 5x4097x4104 bf16 kk", "tile_shape_mn=64x24 use_pdl=true"),
    ("gemm 300x4097x1032 bf16 kk", "tile_shape_mn=256x176 mma_warpgroups=2 swap_ab=true"),
    ("gemm 300x4097x1032 bf16 kk", "tile_shape_mn=128x168 mma_warpgroups=1 pingpong=true swap_ab=true"),
    ("gemm 300x4097x1032 bf16 kk", "tile_shape_mn=192x192 mma_warpgroups=3"),
    (
        "gemm 2x304x1000x1032 bf16 mn out=fp32 unaligned",
        "tile_shape_mn=128x120 mma_warpgroups=1 pingpong=true",
    ),
    ("gemm 300x4096x1032 bf16 kk", "tile_shape_mn=64x24 use_tma_store=false"),
    ("gemm 300x4096x1032 bf16 kk unaligned bias=m act=gelu", "tile_shape_mn=128x40 mma_warpgroups=2"),
    # Single elements of tiles that are not swapped: odd rows and columns of D, a last tile that ends with it.
    ("gemm 301x4099x1032 bf16 kk", "tile_shape_mn=128x256 mma_warpgroups=2"),
    ("gemm 2x67x1003x520 fp16 kk beta bias=n", "tile_shape_mn=128x40 mma_warpgroups=2"),
    ("gemm 63x33x520 fp16 kk act=gelu", "tile_shape_mn=64x64 mma_warpgroups=1"),
    # Pieces of C arrive where those of D leave: several tiles, narrower last pieces, two warpgroups.
    ("gemm 1500x2056x520 bf16 kk beta", "tile_shape_mn=128x104 mma_warpgroups=1 pingpong=true"),
    ("gemm 5000x4104x264 bf16 kk beta", "tile_shape_mn=256x136 mma_warpgroups=2 swap_ab=true"),
    ("gemm 3x712x1000x264 fp16 mn out=fp32 beta act=relu", "tile_shape_mn=192x72 mma_warpgroups=3"),
    (
        "gemm 900x5000x72 bf16 kk alpha beta bias=m",
        "tile_shape_mn=64x24 mma_warpgroups=1 pingpong=true swap_ab=true",
    ),
    ("gemm 4000x4608x1032 bf16 kk beta", "tile_shape_mn=256x128 mma_warpgroups=2 stream_k=true"),
    ("gemm 1000x2000x1040 e4m3 kk out=fp16 scale beta", "tile_shape_mn=128x96 mma_warpgroups=2"),
    ("gemm 1000x4600x1000 bf16 kk", "tile_shape_mn=256x200 mma_warpgroups=2 cluster_shape_mn=2x1"),
    # Clusters of eight, some of whose tiles lie outside of D.
    ("gemm 1049x904x1032 bf16 kk", "tile_shape_mn=64x136 mma_warpgroups=1 cluster_shape_mn=2x4 swap_ab=true"),
    ("gemm 2x304x1000x1032 bf16 mn beta", "tile_shape_mn=128x96 mma_warpgroups=2 cluster_shape_mn=4x2"),
    (
        "gemm 900x2560x2056 bf16 kk bias=n",
        "tile_shape_mn=128x104 mma_warpgroups=1 pingpong=true cluster_shape_mn=2x4",
    ),
    # A bias of columns, from the lanes that loaded it, and of rows; past both ends of D, of 16 and 32 bits.
    ("gemm 1500x2056x520 bf16 kk bias=n", "tile_shape_mn=128x104 mma_warpgroups=1 pingpong=true"),
    ("gemm 1501x2051x520 bf16 kk bias=n", "tile_shape_mn=128x152 mma_warpgroups=1 pingpong=true"),
    ("gemm 1501x2056x520 bf16 kk bias=n act=silu", "tile_shape_mn=256x136 mma_warpgroups=2 swap_ab=true"),
    ("gemm 3x301x1000x264 fp16 kn out=fp32 bias=n act=relu", "tile_shape_mn=192x72 mma_warpgroups=3"),
    ("gemm 3x301x1000x264 fp16 kn out=fp32 bias=m", "tile_shape_mn=128x160 mma_warpgroups=2 swap_ab=true"),
    ("gemm 40x3000x520 bf16 kk bias=n", "tile_shape_mn=256x40 mma_warpgroups=1 pingpong=true swap_ab=true"),
    ("gemm 65x129x8200 bf16 kk", "tile_shape_mn=64x64 use_tma_store=false split_k=7"),
    ("gemm 2x65x136x8200 bf16 kn", "tile_shape_mn=64x64 use_tma_store=false split_k=31"),
    # One, two and four warpgroups add up a piece, of 3, 5 and 9 in a tile.
    ("gemm 512x2056x1032 bf16 kk bias=n", "tile_shape_mn=64x24 use_tma_store=false split_k=2"),
    ("gemm 3x200x1000x1032 bf16 kk", "tile_shape_mn=64x40 use_tma_store=false split_k=3"),
    ("gemm 200x136x4104 bf16 kk beta", "tile_shape_mn=64x72 use_tma_store=false split_k=6"),
    ("gemm 65x136x8200 bf16 kk beta", "tile_shape_mn=64x48 use_tma_store=false split_k=5 swap_ab=true"),
    ("gemm 65x129x8200 bf16 kk any_order", "use_tma_store=false split_k=7 reduction=arrival"),
    ("gemm 65x128x8208 int8 kk any_order", "use_tma_store=false split_k=3 reduction=arrival"),
    ("gemm 4000x4608x1032 bf16 kk", "tile_shape_mn=256x128 mma_warpgroups=2 stream_k=true"),
    ("gemm 4000x4607x1032 bf16 kk", "tile_shape_mn=256x128 mma_warpgroups=2 stream_k=true"),
    ("gemm 500x1000x1040 e4m3 kk promote scale", "tile_shape_mn=128x96 mma_warpgroups=2"),
    ("gemm 500x1000x1040 int8 kk", "tile_shape_mn=128x24 mma_warpgroups=2"),
]


def chosen(line: str, words: str) -> tuple[Problem, Config]:
    """A problem, and its default config with some knobs changed."""
    problem = Problem.parse(line)
    config = SPACE.default(problem).replace(**Config.parse(words))
    SPACE.require(problem, config)
    return problem, config


def all_pairs() -> Iterator[tuple[str, Problem, Config]]:
    """Every kernel to run, named."""
    for number, pair in enumerate(CHOSEN):
        yield f"chosen{number}", *pair
    for number, pair in enumerate(covering_set(SPACE)):
        yield f"cover{number}", *pair
    for number, pair in enumerate(random_pairs(SPACE, SEED, WALK)):
        yield f"walk{number}", *pair


CHOSEN = [chosen(*line) for line in CHOSEN_LINES]
PAIRS = all_pairs() if GPU is not None and GPU.arch.name == "sm_90a" else ()
CASES = {f"{name} {problem} | {config}": (problem, config) for name, problem, config in PAIRS}
pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
test_a_legal_config_computes_the_product = config_is_right
