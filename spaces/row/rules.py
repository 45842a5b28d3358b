"""Values of the knobs of kernels over rows, and the rules between them.

Parameters of a rule name the knobs that it looks at, docstrings are the reasons that users read.

The limits come from times of RMSNorm on an H200, of rows of 128 to 262144 elements: for each of 13 problems
with short rows the fastest of many kernels stays legal, or one that takes at most 1 % longer; for the rows of
tests/data/rmsnorm_times.json the fastest itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutegen.arch import Arch
from cutegen.space import Value

from .ring import ROWS_OF_GROUP, ring_registers, ring_room
from .sizes import (
    ELEMENT_BYTES,
    WARP,
    access_elements,
    along_row,
    is_peeled,
    is_wide,
    part,
    part_bytes,
    staged_bytes,
    steps,
    values_per_thread,
    values_registers,
    vectors,
)
from .traits import RowsInSmem

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "threads_per_row": (128, 256, 192, 224, 512, 64, 32, 16, 8, 4, 160, 320, 384, 448),
    "rows_per_cta": (1, 2, 4, 8, 16, 32, 64),
    "rows_per_thread": (1, 2),
    "cluster_n": (1, 2, 4, 8, 16),
    "prefetch_weight": (True, False),
    "row_in": ("registers", "smem", "ring"),
    "turn": (1, 2, 4),
    "pdl": ("off", "early", "late"),
}
MAX_ROW = 262_144
MAX_VALUES = 40
"""Values of a row that a thread may hold: with more, a multiprocessor has too few threads."""
OTHER_REGISTERS = 20
"""Registers of a thread beside those for its values: addresses, sums. Source: ptxas, the tests' kernels."""
LONG_ROW = 16_384
"""Bytes of a row above which a cluster shares it, however many rows there are."""
SHORT_OF_TWO = 32_768
"""Bytes of a row up to which a thread takes no two of them at a time in shared memory."""
SMALL_PART, LARGE_PART = 16_384, 65_536
"""Bytes between which a CTA keeps of a row in shared memory. Source: an H200, rows of 128 to 1024 KiB: parts
of 32 and 64 KiB win, those of 16 KiB take 1 to 3 % longer."""
RING_VALUES = 40
"""Values of a row that a thread of a ring may hold. Source: ptxas."""


def rows_have_a_supported_length(problem: Any) -> bool:
    """A row has 1 to 262144 elements: 16 CTAs keep no more of it in registers."""
    return bool(1 <= problem.n <= MAX_ROW)


def cta_has_a_common_size(threads_per_row: int, rows_per_cta: int, rows_per_thread: int, row_in: str) -> bool:
    """rows_per_cta / rows_per_thread groups of threads make a CTA: groups of fewer than 128 threads fill it
    up to 128 or 256, larger ones are alone in it, since larger CTAs start and end more slowly; but with
    row_in=ring a CTA takes several rows, and has 192 to 512 threads, or 1024."""
    if row_in == "ring":
        return threads_per_row * rows_per_cta in (128, 192, 224, 256, 320, 384, 448, 512, 1024)
    groups = rows_per_cta // rows_per_thread
    return groups == 1 if threads_per_row >= 128 else groups * threads_per_row in (128, 256)


def threads_have_work(threads_per_row: int, cluster_n: int, problem: Any) -> bool:
    """Fewer than half of up to 32 threads_per_row may be idle. More must hold 32 bytes of a row each, and in
    the last step lack at most a quarter of the row, or half of it for 64 threads_per_row."""
    has = part(problem, cluster_n)
    if threads_per_row <= WARP:
        return threads_per_row < 2 * has or threads_per_row == 4
    held = values_per_thread(problem, threads_per_row, cluster_n)
    idle = steps(problem, threads_per_row, cluster_n) * threads_per_row - has
    lacking = idle * (2 if threads_per_row == 64 else 4)
    return held * ELEMENT_BYTES[problem.signature.dtype] >= 32 and lacking <= has


def row_fits_registers(
    threads_per_row: int,
    rows_per_cta: int,
    rows_per_thread: int,
    cluster_n: int,
    prefetch_weight: bool,
    row_in: str,
    problem: Any,
    arch: Arch,
) -> bool:
    """A thread holds its part of a row, at most 40 values, and of a prefetched weight; all threads of a CTA
    together must find room in the registers of a multiprocessor."""
    if row_in == "smem":
        return True
    if row_in == "ring":
        held = values_per_thread(problem, threads_per_row, cluster_n)
        needed = ring_registers(threads_per_row, rows_per_cta, cluster_n, prefetch_weight, problem)
        return 16 <= held <= RING_VALUES and needed <= (112 if threads_per_row * rows_per_cta <= 512 else 64)
    groups = max(1, rows_per_cta // rows_per_thread)
    accesses = steps(problem, threads_per_row, cluster_n) * rows_per_thread
    if accesses * access_elements(problem) > MAX_VALUES:
        return False
    # A quarter of the registers is for every fourth warp.
    quarters = -(-groups * threads_per_row // (4 * WARP)) * 4 * WARP
    room = min(arch.registers // quarters, arch.registers_per_thread)
    return values_registers(problem, accesses, rows_per_thread, prefetch_weight) + OTHER_REGISTERS <= room


def bare_row_fits_registers(
    threads_per_row: int,
    rows_per_cta: int,
    rows_per_thread: int,
    cluster_n: int,
    row_in: str,
    problem: Any,
    arch: Arch,
) -> bool:
    """A thread holds its part of a row, at most 40 values, and of a weight if there is one; all threads of a
    CTA together must find room in the registers of a multiprocessor."""
    early = row_in != "ring"
    return row_fits_registers(
        threads_per_row, rows_per_cta, rows_per_thread, cluster_n, early, row_in, problem, arch
    )


def several_rows_per_thread_are_for_short_rows(
    threads_per_row: int,
    rows_per_thread: int,
    cluster_n: int,
    row_in: str,
    turn: int,
    problem: Any,
    in_smem: RowsInSmem,
) -> bool:
    """rows_per_thread above 1 gives a thread more loads at a time, which it lacks only where a warp holds
    whole rows and has up to 2 accesses to each. With row_in=smem it is for LayerNorm, of which a thread then
    reads its part of weight and bias once for 2 rows, 4 accesses with turn 2, the same number for each."""
    if rows_per_thread == 1 or row_in == "ring":
        return rows_per_thread == 1
    if row_in == "smem":
        takes = in_smem.two_at_a_time and problem.signature.dtype != "fp32" and not is_wide(problem)
        even = vectors(problem) == 4 * threads_per_row * cluster_n
        return takes and bool(along_row(problem)) and even and turn == 2
    whole = threads_per_row <= WARP and not is_peeled(problem)
    return whole and steps(problem, threads_per_row, 1) <= 2


def cluster_shares_long_or_few_rows(threads_per_row: int, cluster_n: int, problem: Any, arch: Arch) -> bool:
    """With cluster_n above 1 every CTA needs 128 threads, and 8 KiB of a row of more than 16 KiB, or 4 KiB
    where m is at most 4 times the multiprocessors; else exchanging sums takes longer than what it saves."""
    if cluster_n == 1:
        return True
    share = part_bytes(problem, cluster_n)
    long = share >= 8192 and part_bytes(problem, 1) > LONG_ROW
    return threads_per_row >= 128 and (long or (share >= 4096 and problem.m <= 4 * arch.nominal_sm_count))


def cluster_has_small_ctas(threads_per_row: int, cluster_n: int, row_in: str, problem: Any) -> bool:
    """With cluster_n above 1 and row_in=registers, CTAs are small, so that a multiprocessor has several: more
    than 128 threads_per_row hold 16 values each, and more than 256 are for clusters of 16."""
    if cluster_n == 1 or row_in != "registers" or threads_per_row <= 128:
        return True
    held = values_per_thread(problem, threads_per_row, cluster_n)
    return held >= 16 and (threads_per_row <= 256 or cluster_n == 16)


def grid_fits_32_bits(cluster_n: int, problem: Any) -> bool:
    """CTAs are numbered with 31 bits, so m * cluster_n must stay below 2147483648."""
    return bool(problem.m * cluster_n < 2**31)


def weight_is_late_where_registers_are_short(
    threads_per_row: int, cluster_n: int, prefetch_weight: bool, row_in: str, problem: Any
) -> bool:
    """prefetch_weight=false loads the weight after the sum, which takes longer and saves registers; it needs
    a weight, 32 values per thread, and 256 threads_per_row, whose CTAs find room less often. With row_in=smem
    the weight comes after the sum in any case: prefetch_weight=true."""
    if prefetch_weight or row_in == "ring":
        return prefetch_weight or bool(along_row(problem))
    held = values_per_thread(problem, threads_per_row, cluster_n)
    useful = held >= 32 and threads_per_row >= 256 and row_in == "registers"
    return bool(along_row(problem)) and useful


def turns_are_for_rows_in_smem(
    threads_per_row: int, cluster_n: int, row_in: str, turn: int, problem: Any
) -> bool:
    """row_in=smem takes turn 2 or 4, and each thread at least two turns, so that sums begin before the whole
    part is there; row_in=registers holds everything at a time: turn 1. With row_in=ring each group of threads
    takes 2 or 4 rows with such a turn, and with turn 1 all that are its share."""
    if row_in != "smem":
        return turn in (1, 2, ROWS_OF_GROUP) if row_in == "ring" else turn == 1
    return 1 < turn < steps(problem, threads_per_row, cluster_n)


def smem_is_for_long_rows(
    cluster_n: int, rows_per_thread: int, row_in: str, problem: Any, in_smem: RowsInSmem
) -> bool:
    """row_in=smem needs rows of more than 64 KiB, of cross-entropy and with two rows_per_thread 32 KiB, at
    multiples of 16 bytes, and a cluster. Each CTA keeps its part of x, and of a residual: together more than
    16 KiB, since smaller parts take longer, and up to 64 KiB unless 16 CTAs share the row, so that a
    multiprocessor has room for several. Rows of cross-entropy of 16 to 24 KiB are for cluster_n=1."""
    if row_in != "smem":
        return True
    if in_smem.of_one_cta is not None and cluster_n == 1 and not problem.signature.unaligned:
        least, most = in_smem.of_one_cta
        return least <= part_bytes(problem, 1) <= most
    short = in_smem.longer_than if rows_per_thread == 1 else SHORT_OF_TWO
    long = not problem.signature.unaligned and part_bytes(problem, 1) > short
    staged = staged_bytes(problem, cluster_n) * rows_per_thread
    return bool(long and cluster_n > 1 and staged > SMALL_PART and (staged <= LARGE_PART or cluster_n == 16))


def smem_has_threads_for_its_bytes(
    threads_per_row: int, cluster_n: int, rows_per_thread: int, row_in: str, problem: Any
) -> bool:
    """With row_in=smem 128, 256 or 512 threads_per_row keep 64 to 160 bytes of a row in flight each, or more
    where that takes more than 512: CTAs of 512 threads, of which a multiprocessor has fewer, take longer.
    With two rows_per_thread 128 threads_per_row or more have 64 bytes of each."""
    if row_in != "smem" or rows_per_thread > 1:
        return row_in != "smem" or threads_per_row >= 128
    staged = staged_bytes(problem, cluster_n)
    enough = threads_per_row in (128, 256, 512) and threads_per_row * 64 <= staged
    return enough and (staged <= threads_per_row * 160 or threads_per_row == 512)


def ring_is_for_many_rows(
    threads_per_row: int,
    rows_per_cta: int,
    rows_per_thread: int,
    cluster_n: int,
    row_in: str,
    pdl: str,
    problem: Any,
    arch: Arch,
) -> bool:
    """row_in=ring is for at least 4 rows for each group of threads, at multiples of 16 bytes, so that weights
    are read once for several; for rows that a warp or more share; and its CTAs have no part that is behind
    all sums: pdl is early or off."""
    if row_in != "ring":
        return True
    fits = threads_per_row >= WARP and rows_per_thread == 1 and pdl != "late"
    groups = 512 * arch.nominal_sm_count // (threads_per_row * cluster_n)
    return fits and not problem.signature.unaligned and problem.m >= 4 * groups


def ring_fits_shared_memory(
    threads_per_row: int, rows_per_cta: int, cluster_n: int, prefetch_weight: bool, row_in: str, problem: Any
) -> bool:
    """With row_in=ring two rows of each group find room in shared memory, and what comes along with rows."""
    if row_in != "ring":
        return True
    return ring_room(1, threads_per_row, rows_per_cta, cluster_n, prefetch_weight, problem) >= 2


def bare_ring_fits_shared_memory(
    threads_per_row: int, rows_per_cta: int, cluster_n: int, row_in: str, problem: Any
) -> bool:
    """With row_in=ring two rows of each group find room in shared memory, and what comes along with rows."""
    return ring_fits_shared_memory(threads_per_row, rows_per_cta, cluster_n, False, row_in, problem)


RULES = (
    rows_have_a_supported_length,
    cta_has_a_common_size,
    threads_have_work,
    row_fits_registers,
    several_rows_per_thread_are_for_short_rows,
    cluster_shares_long_or_few_rows,
    cluster_has_small_ctas,
    grid_fits_32_bits,
    weight_is_late_where_registers_are_short,
    turns_are_for_rows_in_smem,
    smem_is_for_long_rows,
    smem_has_threads_for_its_bytes,
    ring_is_for_many_rows,
    ring_fits_shared_memory,
)
#: Of spaces in which rows may come through a ring, beside the others.
RULES_OF_RINGS = (ring_is_for_many_rows, ring_fits_shared_memory)
#: What looks at how a family's rows wait in shared memory.
RULES_OF_SMEM = (several_rows_per_thread_are_for_short_rows, smem_is_for_long_rows)
#: What takes the place of a rule in a space without a weight, if anything does.
BARE_RULES = {
    row_fits_registers: bare_row_fits_registers,
    ring_fits_shared_memory: bare_ring_fits_shared_memory,
    weight_is_late_where_registers_are_short: None,
}
