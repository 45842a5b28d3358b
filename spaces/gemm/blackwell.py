"""What the spaces of the Blackwell GEMM kernels share, with and without scale factors."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Value

from .shared import padded_blocks, stages_and_buffers, tile_counts

ROW_BYTES = 128
"""Bytes of a tile along k: the span of the shared-memory swizzle, hence the k size of a tile."""
EPILOGUE_WARPS = 4
_BARRIER_BYTES = 1024
"""Shared memory before the first tile: mbarriers and the address of tensor memory, padded to the 1024
bytes that swizzled tiles align to."""
_MAX_STAGES = 32
"""A stage has two 8-byte mbarriers, which live in those 1024 bytes."""
_MIN_TMEM_COLUMNS = 32
"""Source: PTX ISA, tcgen05.alloc."""
_GPC = 18
"""Multiprocessors that one cluster can be placed on. Source: assumed, from Hopper; to be measured."""


def blocks_per_mma(use_2cta_instrs: bool) -> int:
    """Return the thread blocks that share one MMA."""
    return 2 if use_2cta_instrs else 1


def block_tile(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> tuple[int, int]:
    """Return rows and columns of the tile that one thread block stores."""
    return mma_tiler_mn[0] // blocks_per_mma(use_2cta_instrs), mma_tiler_mn[1]


# Arrivals are counted here only; who arrives and who waits is told at the top of the template.


def empty_arrivals(use_2cta_instrs: bool, cluster_shape_mn: tuple[int, int]) -> int:
    """Return the arrivals that free a stage: one for each pair of blocks (or lone block) that reads it.

    Those are the ones in the same row and in the same column of the cluster, which share its tiles.
    """
    return cluster_shape_mn[0] // blocks_per_mma(use_2cta_instrs) + cluster_shape_mn[1] - 1


def acc_arrivals(use_2cta_instrs: bool) -> int:
    """Return the arrivals that free a tile of accumulators: one for each epilogue warp, of both blocks of a
    pair."""
    return EPILOGUE_WARPS * blocks_per_mma(use_2cta_instrs)


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def pairs_lie_along_m(use_2cta_instrs: bool, cluster_shape_mn: tuple[int, int]) -> bool:
    """use_2cta_instrs joins two blocks that lie next to each other along m of their cluster, so
    cluster_shape_mn must be even along m."""
    return not use_2cta_instrs or cluster_shape_mn[0] % 2 == 0


def cluster_is_no_larger_than_problem(
    mma_tiler_mn: tuple[int, int],
    use_2cta_instrs: bool,
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    problem: Problem,
) -> bool:
    """A cluster must not be more than twice as tall or wide as D, since blocks outside D only wait."""
    counts = tile_counts(block_tile(mma_tiler_mn, use_2cta_instrs), swap_ab, problem)
    return all(c == 1 or c < 2 * t for c, t in zip(cluster_shape_mn, counts, strict=True))


def tile_counts_fit_32_bits(
    mma_tiler_mn: tuple[int, int],
    use_2cta_instrs: bool,
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    problem: Problem,
) -> bool:
    """Work units are numbered with 32-bit integers."""
    tile = block_tile(mma_tiler_mn, use_2cta_instrs)
    return padded_blocks(tile, cluster_shape_mn, swap_ab, problem) < 2**30


# --- what follows from a config ---


def clusters_at_once(sm_count: int, blocks: int) -> int:
    """Return how many clusters of ``blocks`` thread blocks run at once, one block per multiprocessor.

    Source: assumed; clusters larger than pairs stay inside a GPC and leave its remainder idle. A persistent
    kernel with one cluster too many would run it alone, after all others, so this is a careful guess.
    """
    if blocks <= 2:
        return max(1, sm_count // blocks)
    return max(1, sm_count // _GPC * (_GPC // blocks))


def tmem_allocation(columns: int) -> int:
    """Return the columns of tensor memory to allocate for ``columns``: a power of two, at least 32."""
    return max(_MIN_TMEM_COLUMNS, 1 << (columns - 1).bit_length())


def derive_resources(
    config: Config, arch: Arch, stage_bytes: int, buffer_bytes: int, warps: int
) -> dict[str, Value]:
    """Return stages, store buffers, barrier arrivals, threads, registers and exact shared memory (bytes).

    Args:
        config: A config of a Blackwell kernel.
        arch: The target.
        stage_bytes: Shared memory of one pipeline stage.
        buffer_bytes: Shared memory of one store buffer, 0 for a kernel that stores from registers.
        warps: Warps of a thread block.
    """
    free, threads = arch.smem_bytes - _BARRIER_BYTES, 32 * warps
    stages, buffers = stages_and_buffers(free, stage_bytes, buffer_bytes, _MAX_STAGES)
    two_blocks = config.flag("use_2cta_instrs")
    return {
        "stages": stages,
        "stage_bytes": stage_bytes,
        "expected_bytes": stage_bytes * blocks_per_mma(two_blocks),
        "empty_arrivals": empty_arrivals(two_blocks, config.pair("cluster_shape_mn")),
        "acc_arrivals": acc_arrivals(two_blocks),
        "epi_stages": buffers,
        "smem_bytes": _BARRIER_BYTES + stages * stage_bytes + buffers * buffer_bytes,
        "threads": threads,
        "max_registers": min(arch.registers_per_thread, arch.registers // threads // 8 * 8),
    }
