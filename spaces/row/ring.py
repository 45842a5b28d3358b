"""What rows take that come through a ring in shared memory: registers, CTAs of a multiprocessor, stages."""

from __future__ import annotations

from typing import Any

from .sizes import WARP, along_bytes, is_wide, slots, staged_bytes, steps, values_registers, vectors

SM_REGISTERS = 65_536
"""Registers of a multiprocessor. Source: CUDA C++ Programming Guide, technical specifications."""
MOST_STAGES = 4
"""Stages of a ring, at most: what more of them keep in flight no longer counts. Source: judgement."""
ROWS_OF_GROUP = 4
"""Rows that a group takes, at most, whose CTA does not stay to the end. Source: an H200. To 8 bits, of 64 to
256 KiB: with 8 of them kernels take 2 to 3 % longer, with 2 as long or 8 % longer, and those that stay 2 to
6 %. LayerNorm of rows of 8 KiB takes 2.5 % less with 2."""
RING_REGISTERS, HELD_REGISTERS = 24, 16
"""Registers of a thread of a ring beside those for its values, and more where it holds weights, without which
the compiler spills in a CTA of which a multiprocessor has several. Source: ptxas."""
SM_SMEM_BYTES, CTA_SMEM_BYTES = 233_472, 1024
"""Shared memory of a multiprocessor, and what the driver takes of it for each CTA. Source: CUDA C++
Programming Guide, technical specifications."""


def ring_registers(threads_per_row: int, rows_per_cta: int, cluster_n: int, held: bool, problem: Any) -> int:
    """Return the registers that a thread of a ring needs. Source: ptxas, all such kernels of the examples."""
    accesses = steps(problem, threads_per_row, cluster_n)
    needed = values_registers(problem, accesses, 1, held) + RING_REGISTERS
    if not held:
        needed += values_registers(problem, 1, 1, True) - values_registers(problem, 1, 1, False)
        needed += 8 if is_wide(problem) else 0
    if vectors(problem) % (threads_per_row * cluster_n):
        needed += 16  # warps hold different numbers of values
    warps = threads_per_row * cluster_n // WARP
    return needed + (2 * warps if 1 < warps <= 8 else 0) + (8 if rows_per_cta > 1 else 0)


def ring_ctas(threads_per_row: int, rows_per_cta: int, cluster_n: int, held: bool, problem: Any) -> int:
    """Return how many CTAs of a ring a multiprocessor has: as many as have room for their registers, of which
    a thread takes a multiple of 8, and in shared memory for two rows of each group."""
    needed = ring_registers(threads_per_row, rows_per_cta, cluster_n, held, problem)
    needed = -(-needed // 8) * 8 + (HELD_REGISTERS if held else 0)
    most = max(1, SM_REGISTERS // needed // (threads_per_row * rows_per_cta))
    room = (
        ring_room(ctas, threads_per_row, rows_per_cta, cluster_n, held, problem)
        for ctas in range(1, most + 1)
    )
    return max(1, sum(stages >= 2 for stages in room))


def ring_room(
    ctas: int, threads_per_row: int, rows_per_cta: int, cluster_n: int, held: bool, problem: Any
) -> int:
    """Return how many rows of each group find room if a multiprocessor has so many CTAs."""
    room = SM_SMEM_BYTES // ctas - CTA_SMEM_BYTES
    # Sums of two rows of each group, four numbers each at most, and barriers.
    room -= rows_per_cta * (8 * 4 * slots(threads_per_row, cluster_n) + 64) + 16
    room -= 0 if held else along_bytes(problem, cluster_n)
    return max(0, room // (rows_per_cta * staged_bytes(problem, cluster_n)))


def ring_stages(
    threads_per_row: int, rows_per_cta: int, cluster_n: int, held: bool, turn: int, problem: Any
) -> int:
    """Return how many rows of each group are in shared memory: 2 of those that it takes, or 4 at most
    of a CTA that stays."""
    ctas = ring_ctas(threads_per_row, rows_per_cta, cluster_n, held, problem)
    room = ring_room(ctas, threads_per_row, rows_per_cta, cluster_n, held, problem)
    return min(2 if turn > 1 else MOST_STAGES, room)
