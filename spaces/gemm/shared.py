"""What the spaces of all GEMM kernels share: rules, run-time knobs, and what shared memory holds."""

from __future__ import annotations

from cutegen.families.gemm.problem import LARGEST_SIZE, Problem
from cutegen.space import Config

RUN_TIME_KNOBS = frozenset({"split_k", "swizzle_size", "raster_along_m"})
WORKSPACE_LIMIT_BYTES = 256 * 2**20
_MAX_STORE_BUFFERS = 4


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def tma_store_needs_aligned_output(use_tma_store: bool, problem: Problem) -> bool:
    """A TMA store needs rows of D that start at multiples of 16 bytes: n * sizeof(out) and the pitch of D
    must be multiples of 16; use_tma_store=false takes any n."""
    return not (use_tma_store and problem.unaligned_out)


def swap_ab_is_for_narrow_m(swap_ab: bool, problem: Problem) -> bool:
    """swap_ab puts m on the finely divisible side of the MMA; with m above 4096 the last tile along m is a
    small part of the work, and the plain order stores better."""
    return not swap_ab or problem.m <= 4096


def split_k_stores_partial_sums(use_tma_store: bool, split_k: int) -> bool:
    """With split_k > 1 the second kernel writes D from registers, so use_tma_store must be false."""
    return split_k == 1 or not use_tma_store


def sizes_round_up_below_2_to_31(problem: Problem) -> bool:
    """Kernels round m, n and k up to whole clusters of tiles, which are at most 4096 wide, and compute
    coordinates in signed 32-bit integers: none of them may be above 2**31 - 4096 = 2147479552."""
    return max(problem.m, problem.n, problem.k) <= LARGEST_SIZE


# --- what follows from a config ---


def kernel_sizes(problem: Problem, swap_ab: bool) -> tuple[int, int]:
    """Return the sizes along m and n of the kernel."""
    return (problem.n, problem.m) if swap_ab else (problem.m, problem.n)


def tile_counts(block_tile: tuple[int, int], swap_ab: bool, problem: Problem) -> tuple[int, int]:
    """Return the tiles of single thread blocks, each ``block_tile`` large, along m and n of the kernel."""
    m, n = kernel_sizes(problem, swap_ab)
    return -(-m // block_tile[0]), -(-n // block_tile[1])


def padded_blocks(
    block_tile: tuple[int, int], cluster_shape_mn: tuple[int, int], swap_ab: bool, problem: Problem
) -> int:
    """Return the tiles of all batches, rounded up to whole clusters."""
    counts = tile_counts(block_tile, swap_ab, problem)
    along_m, along_n = (-(-t // c) * c for t, c in zip(counts, cluster_shape_mn, strict=True))
    return along_m * along_n * problem.batch


def stages_and_buffers(
    free_bytes: int,
    stage_bytes: int,
    buffer_bytes: int,
    max_stages: int,
    max_buffers: int = _MAX_STORE_BUFFERS,
    min_buffers: int = 2,
) -> tuple[int, int]:
    """Return how many pipeline stages and store buffers fit in ``free_bytes`` of shared memory.

    Stages come first, beside ``min_buffers``; further buffers take what is left. Without buffers
    (``buffer_bytes`` is 0) the second number is ``min_buffers``.
    """
    stages = min((free_bytes - min_buffers * buffer_bytes) // stage_bytes, max_stages)
    buffers = min_buffers
    while (
        buffer_bytes
        and buffers < max_buffers
        and (buffers + 1) * buffer_bytes + stages * stage_bytes <= free_bytes
    ):
        buffers += 1
    return stages, buffers


def compile_view(config: Config) -> Config:
    """Return what is compiled in: run-time knobs fall away, split_k stays as one of two kinds of kernel."""
    kept = {knob: value for knob, value in config.items() if knob not in RUN_TIME_KNOBS}
    if "split_k" in config:
        kept["split_k"] = 1 if config["split_k"] == 1 else 2
    return Config(kept)


def tile_order(config: Config) -> tuple[int, int]:
    """Return swizzle_size and raster_along_m as the kernel takes them."""
    return config.integer("swizzle_size"), int(config.flag("raster_along_m"))
