"""What a Hopper kernel takes of a multiprocessor: registers, shared memory, barrier arrivals."""

from __future__ import annotations

from dataclasses import dataclass

from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.problem import Problem

#: Threads of a warpgroup.
WARPGROUP = 128
#: Rows of one warpgroup's MMA (PTX ISA, wgmma: m64nNk16).
SLAB = 64
#: Bytes of the longest line that shared memory is swizzled in, and of the shortest that it had better be, of
#: 32, 64 and 128 (PTX ISA, swizzling modes of tensor maps).
LONGEST_LINE, SHORTEST_LINE = 128, 64


@dataclass(frozen=True)
class Registers:
    """Registers per thread of the loading and the multiplying warpgroups; 0 leaves it to the compiler."""

    load: int
    mma: int


#: By number of multiplying warpgroups. Each pair satisfies, for T threads in all and an entry allocation
#: of E = 65536 / T rounded down to 8: 128 * load + 128 * warpgroups * mma <= E * T, or `setmaxnreg.inc`
#: would wait for ever (PTX ISA, setmaxnreg). With one, all threads can hold the architectural maximum.
REGISTERS = {1: Registers(0, 0), 2: Registers(40, 232), 3: Registers(32, 160)}


def consumers(mma_warpgroups: int, pingpong: bool) -> int:
    """Return how many warpgroups multiply."""
    return 2 if pingpong else mma_warpgroups


def accumulators(tile_shape_mn: tuple[int, int], mma_warpgroups: int) -> int:
    """Return the fp32 accumulators that each multiplying thread holds."""
    return tile_shape_mn[0] * tile_shape_mn[1] // (WARPGROUP * mma_warpgroups)


def lies_along_columns(swap_ab: bool, problem: Problem) -> bool:
    """Return whether the operand of a tile's columns is contiguous along them."""
    return problem.layout[0] == "m" if swap_ab else problem.layout[1] == "n"


def loaded_columns(
    tile_shape_mn: tuple[int, int], cluster_shape_mn: tuple[int, int], swap_ab: bool, problem: Problem
) -> int:
    """Return how many columns are loaded for a tile: the MMA reads the first ones.

    Where the operand is contiguous along columns, lines of the swizzle lie along them, and the columns in
    shared memory are a multiple of a line. TMA moves a line at a time, so a tile that is no multiple of the
    shorter ones is loaded in long ones, unless these are too much more and thread blocks share the load.

    Source: an H200, 828 kernels timed both ways, lines of 64 bytes beside those of 128. They take 5 % less
    time for 96 columns, 3 % for 160, 2 % for 224; thread blocks that share a load take 6 % less for 72 to
    88 columns, up to 2 % more for others; one alone takes 3 % more for 72 to 88, 14 to 20 % more for 136,
    152 and 200.
    """
    width = tile_shape_mn[1]
    longest, shortest = (line // DTYPE_BYTES[problem.ab_dtype] for line in (LONGEST_LINE, SHORTEST_LINE))
    if width <= shortest or not lies_along_columns(swap_ab, problem):
        return width
    short = width % shortest == 0 or (cluster_shape_mn[0] > 1 and width < longest + shortest)
    line = shortest if short else longest
    return -(-width // line) * line


def stage_bytes(rows: int, columns: int, tile_k: int, problem: Problem) -> int:
    """Return the shared memory of one pipeline stage in bytes, of so many loaded rows and columns."""
    return (rows + columns) * tile_k * DTYPE_BYTES[problem.ab_dtype]


def empty_arrivals(cluster_shape_mn: tuple[int, int], mma_warpgroups: int) -> int:
    """Return the arrivals that free a stage: of each warp that reads it, in every block that shares it."""
    return (sum(cluster_shape_mn) - 1) * mma_warpgroups * (WARPGROUP // 32)


def epilogue_columns(tile_n: int, use_tma_store: bool, singles: bool) -> tuple[int, int]:
    """Return the width of the stores and of a narrower last one (0 if none), in columns.

    Stores of single elements come in pieces of 16 or 8 columns: a thread's 12 elements of 24 columns would
    be converted one by one, which makes ptxas serialise the MMAs (its note C7514).
    """
    if singles or (tile_n == 24 and not use_tma_store):
        return (16, 0) if tile_n % 16 == 0 else (8, 0)
    return (32, tile_n % 32) if tile_n >= 32 else (tile_n, 0)


def least_buffers(problem: Problem, free_bytes: int, per_stage: int, per_round: int) -> int:
    """Return the fewest rounds of store buffers of a kernel: with beta, C arrives in them before D leaves.

    So there are three then, where as many stages fit beside them.
    """
    fits = 3 * (per_stage + per_round) <= free_bytes
    return 3 if problem.epilogue.beta and fits else 2


def store_bytes(
    tile_n: int, mma_warpgroups: int, pingpong: bool, use_tma_store: bool, problem: Problem
) -> tuple[int, int]:
    """Return the bytes of one round of store buffers, and of the buffers for the narrower last piece.

    A round is one 64-row buffer per multiplying warpgroup; both are whole multiples of the 1024 bytes to
    which swizzled buffers are aligned.
    """
    if not use_tma_store:
        return 0, 0
    columns, tail = epilogue_columns(tile_n, True, False)
    row_bytes = consumers(mma_warpgroups, pingpong) * SLAB * DTYPE_BYTES[problem.out_dtype]
    return row_bytes * columns, row_bytes * tail
