"""What the spaces of the kernels over rows share: values of knobs, rules, what follows, and the default.

A row has ``n`` elements, a number that is compiled in: the loops over a row are unrolled, and every thread
knows while it is compiled which of its accesses can lie beyond the end. ``m`` is free.

The limits of the rules come from times of RMSNorm on an H200, of rows of 128 to 262144 elements: for each of
13 problems with short rows the fastest of many kernels stays legal, or one that takes at most 1 % longer; for
the rows of tests/data/rmsnorm_times.json the fastest itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from cutegen.arch import Arch, resident_clusters
from cutegen.space import Config, Launch, Rule, Space, Value, as_integer
from cutegen.space.space import Derived

from .expected import Terms, expected_us

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ACCESS_BYTES = 16
"""The widest access of a thread to memory. Source: PTX ISA, ld.global.v4.b32."""
MAX_ROW = 262_144
MANY_ROWS = 1_000_000
"""So many that no rule refuses a config because there are too few."""
WARP = 32
MAX_VALUES = 40
"""Values of a row that a thread may hold: with more, a multiprocessor has too few threads."""
OTHER_REGISTERS = 20
"""Registers of a thread beside those for its values: addresses, sums. Source: ptxas, the tests' kernels."""
LONG_ROW = 16_384
"""Bytes of a row above which a cluster shares it, however many rows there are."""

SHORT_FOR_SMEM = 65_536
"""Bytes of a row up to which it stays in registers. Source: an H200, bf16 rows: those of 32 KiB take 3 %
longer in shared memory, those of 64 KiB 1 %; those of 128 KiB 9 % longer in registers. Rows of cross-entropy,
which needs more registers, take 30 % less in shared memory already with 62 KiB."""
SMALL_GROUP = 0.02
"""How much longer a row takes, as a fraction, with half as many threads of a warp. Source: an H200."""
SHORT_KERNEL = 2**28
"""Bytes of all rows up to which a kernel may be short. Source: judgement."""
SMALL_PART, LARGE_PART = 16_384, 65_536
"""Bytes between which a CTA keeps of a row in shared memory. Source: an H200, rows of 128 to 1024 KiB: parts
of 32 and 64 KiB win, those of 16 KiB take 1 to 3 % longer."""
SUMS_BYTES = 2048
"""Shared memory of a CTA beside its part of a row, at most: sums, barriers, what the driver takes."""
RING_THREADS = 1024
"""Threads of a multiprocessor for rows that come through a ring, which leaves 64 registers to each."""
MOST_STAGES = 4
"""Stages of a ring, at most: what more of them keep in flight no longer counts. Source: judgement."""
ROWS_OF_GROUP = 4
"""Rows that a group takes whose CTA does not stay to the end. Source: an H200, rows of 64 to 256 KiB to 8
bits: with 8 of them kernels take 2 to 3 % longer, and those that stay 2 to 6 %."""
RING_VALUES = 40
"""Values of a row that a thread of a ring may hold. Source: ptxas."""
RING_REGISTERS = 24
"""Registers of a thread of a ring beside those for its values. Source: ptxas."""
SM_SMEM_BYTES, CTA_SMEM_BYTES = 233_472, 1024
"""Shared memory of a multiprocessor, and what the driver takes of it for each CTA. Source: CUDA C++
Programming Guide, technical specifications."""
RING_ROW = 49_152
"""Bytes of a row with a weight above which it comes through a ring. Source: an H200: from 64 KiB on it takes
2 to 18 % less there, with 32 KiB 1 to 5 % longer."""
SMEM_THREADS = 1536
"""Threads of a multiprocessor for rows in shared memory, at most, which leaves 40 registers to each."""
SMEM_THREADS_WIDE = 1024
"""The same with 16-bit rows and a weight in fp32, whose loads need more, and for turns of so many values that
what is worked out of them does not fit."""

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


def inputs(problem: Any) -> int:
    """Return how many matrices are read: one, and a residual where there is one."""
    return 2 if getattr(problem.signature, "residual", False) else 1


def along_row(problem: Any) -> list[str]:
    """Return the dtypes of what is read along with every row: a weight, a bias."""
    sig = problem.signature
    found = [getattr(sig, name, "") for name in ("weight", "bias")]
    return [sig.dtype if dtype == "same" else dtype for dtype in found if dtype]


def is_wide(problem: Any) -> bool:
    """Return whether rows are in 16 bits and something along them in fp32."""
    return bool(problem.signature.dtype != "fp32" and "fp32" in along_row(problem))


def access_elements(problem: Any) -> int:
    """Return the elements of one access: 16 bytes, or a single element where rows are not aligned to that."""
    return 1 if problem.signature.unaligned else ACCESS_BYTES // ELEMENT_BYTES[problem.signature.dtype]


def vectors(problem: Any) -> int:
    """Return the accesses that a row takes."""
    return int(-(-problem.n // access_elements(problem)))


def part(problem: Any, cluster_n: int) -> int:
    """Return how many of these one CTA of a cluster has; the last CTA may have fewer."""
    return -(-vectors(problem) // cluster_n)


def part_bytes(problem: Any, cluster_n: int) -> int:
    """Return the bytes of that part."""
    return part(problem, cluster_n) * access_elements(problem) * ELEMENT_BYTES[problem.signature.dtype]


def steps(problem: Any, threads_per_row: int, cluster_n: int) -> int:
    """Return how many of these one thread has; in the last step some threads may have none."""
    return -(-part(problem, cluster_n) // threads_per_row)


def values_per_thread(problem: Any, threads_per_row: int, cluster_n: int) -> int:
    """Return how many elements of one row a thread holds."""
    return steps(problem, threads_per_row, cluster_n) * access_elements(problem)


def values_registers(problem: Any, accesses: int, rows_per_thread: int, prefetch_weight: bool) -> int:
    """Return the registers for one thread's values of its rows: as loaded or as fp32, and for its weights."""
    sig = problem.signature

    def packed(element_bytes: int) -> int:
        return max(1, access_elements(problem) * element_bytes // 4)

    loaded = accesses * packed(ELEMENT_BYTES[sig.dtype]) * inputs(problem)
    values = max(loaded, accesses * access_elements(problem))
    if not prefetch_weight:
        return values
    weights = sum(packed(ELEMENT_BYTES[dtype]) for dtype in along_row(problem))
    return values + accesses // rows_per_thread * weights


def staged_bytes(problem: Any, cluster_n: int) -> int:
    """Return the shared memory that one CTA takes for its part of a row, and of the residual."""
    return part_bytes(problem, cluster_n) * inputs(problem)


def along_bytes(problem: Any, cluster_n: int) -> int:
    """Return the bytes of one CTA's part of what is read along with every row."""
    has = part(problem, cluster_n) * access_elements(problem)
    return has * sum(ELEMENT_BYTES[dtype] for dtype in along_row(problem))


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
    """Return how many CTAs of a ring a multiprocessor has: of 1024 threads, or 512 that need more registers,
    as many as have room for two rows of each group."""
    few = ring_registers(threads_per_row, rows_per_cta, cluster_n, held, problem) > 64
    most = max(1, (RING_THREADS // 2 if few else RING_THREADS) // (threads_per_row * rows_per_cta))
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
    """Return how many rows of each group are in shared memory: 2 of the 4 that it takes, else 4 at most."""
    ctas = ring_ctas(threads_per_row, rows_per_cta, cluster_n, held, problem)
    room = ring_room(ctas, threads_per_row, rows_per_cta, cluster_n, held, problem)
    return min(2 if turn == ROWS_OF_GROUP else MOST_STAGES, room)


def slots(threads_per_row: int, cluster_n: int) -> int:
    """Return the places for partial sums of one row, rounded up to 16 bytes."""
    return -(-(threads_per_row // WARP * cluster_n) // 4) * 4


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def rows_have_a_supported_length(problem: Any) -> bool:
    """A row has 1 to 262144 elements: 16 CTAs keep no more of it in registers."""
    return bool(1 <= problem.n <= MAX_ROW)


def cta_has_a_common_size(threads_per_row: int, rows_per_cta: int, rows_per_thread: int, row_in: str) -> bool:
    """rows_per_cta / rows_per_thread groups of threads make a CTA: groups of fewer than 128 threads fill it
    up to 128 or 256, larger ones are alone in it, since larger CTAs start and end more slowly; but with
    row_in=ring a CTA takes several rows, and has 192 to 512 threads, or 1024."""
    if row_in == "ring":
        return threads_per_row * rows_per_cta in (192, 224, 256, 320, 384, 448, 512, 1024)
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
    threads_per_row: int, rows_per_thread: int, problem: Any
) -> bool:
    """rows_per_thread above 1 gives a thread more loads at a time, which it lacks only where a warp holds
    whole rows and has up to 2 accesses to each."""
    return rows_per_thread == 1 or (threads_per_row <= WARP and steps(problem, threads_per_row, 1) <= 2)


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
    takes 4 rows with turn 4, and with turn 1 all that are its share."""
    if row_in != "smem":
        return turn in (1, ROWS_OF_GROUP) if row_in == "ring" else turn == 1
    return 1 < turn < steps(problem, threads_per_row, cluster_n)


def smem_is_for_long_rows(cluster_n: int, row_in: str, problem: Any) -> bool:
    """row_in=smem needs rows of more than 64 KiB, of cross-entropy 32 KiB, at multiples of 16 bytes, and a
    cluster. Each CTA keeps its part of x, and of a residual: together more than 16 KiB, since smaller parts
    take longer, and up to 64 KiB unless 16 CTAs share the row, so that a multiprocessor has room for
    several."""
    if row_in != "smem":
        return True
    short = SHORT_FOR_SMEM // 2 if problem.family == "cross_entropy" else SHORT_FOR_SMEM
    long = not problem.signature.unaligned and part_bytes(problem, 1) > short
    staged = staged_bytes(problem, cluster_n)
    return bool(long and cluster_n > 1 and staged > SMALL_PART and (staged <= LARGE_PART or cluster_n == 16))


def smem_has_threads_for_its_bytes(threads_per_row: int, cluster_n: int, row_in: str, problem: Any) -> bool:
    """With row_in=smem 128, 256 or 512 threads_per_row keep 64 to 160 bytes of a row in flight each, or more
    where that takes more than 512: CTAs of 512 threads, of which a multiprocessor has fewer, take longer."""
    if row_in != "smem":
        return True
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
    are read once for several; for rows that a warp or more share, in clusters of up to 8; and its CTAs have
    no part that is behind all sums: pdl is early or off."""
    if row_in != "ring":
        return True
    fits = cluster_n <= 8 and threads_per_row >= WARP and rows_per_thread == 1 and pdl != "late"
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


_RULES = (
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
#: Of spaces in which rows may come through a ring.
_OF_RINGS = (ring_is_for_many_rows, ring_fits_shared_memory)
#: What takes the place of a rule in a space without a weight, if anything does.
_BARE = {
    row_fits_registers: bare_row_fits_registers,
    ring_fits_shared_memory: bare_ring_fits_shared_memory,
    weight_is_late_where_registers_are_short: None,
}


# --- what follows from a config ---


def derive(
    config: Config,
    problem: Any,
    arch: Arch,
    *,
    sums_of_row: int,
    values_at_a_time: int,
    beside_values: tuple[int, int] | None,
) -> dict[str, Value]:
    """Return accesses per row, CTA and thread, groups, warps, and the exact shared memory (bytes)."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    rows_per_cta = config.integer("rows_per_cta")
    groups = rows_per_cta // config.integer("rows_per_thread")
    has = part(problem, cluster_n)
    shortest = vectors(problem) - (cluster_n - 1) * has
    sums = slots(threads_per_row, cluster_n) * 4 * groups * sums_of_row if threads_per_row > WARP else 0
    staged, barriers = 0, int(cluster_n > 1)
    ring: dict[str, Value] = {}
    if config["row_in"] == "smem":
        staged = staged_bytes(problem, cluster_n)
        barriers += -(-steps(problem, threads_per_row, cluster_n) // config.integer("turn"))
    elif config["row_in"] == "ring":
        held = config.get("prefetch_weight") is True
        stages = ring_stages(threads_per_row, rows_per_cta, cluster_n, held, config.integer("turn"), problem)
        staged = stages * groups * staged_bytes(problem, cluster_n)
        staged += 0 if held else along_bytes(problem, cluster_n)
        sums *= 2
        barriers = groups * (stages + 2 * int(cluster_n > 1)) + int(not held and bool(along_row(problem)))
        ctas = ring_ctas(threads_per_row, rows_per_cta, cluster_n, held, problem)
        clusters = ctas * resident_clusters(arch.nominal_sm_count, cluster_n)
        ring = {"stages": stages, "clusters": clusters, "weights_held": int(held)}
        ring["rows_of_group"] = config.integer("turn") if config.integer("turn") > 1 else 0
    return {
        **ring,
        "access_elements": access_elements(problem),
        "vectors": vectors(problem),
        "part": has,
        "steps": steps(problem, threads_per_row, cluster_n),
        "whole_steps": max(0, shortest) // threads_per_row if rows_per_cta == 1 or ring else 0,
        "groups": groups,
        "threads": groups * threads_per_row,
        "warps_per_row": max(1, threads_per_row // WARP),
        "slots": slots(threads_per_row, cluster_n),
        "smem_bytes": staged + sums + 8 * barriers,
        "min_blocks": min_blocks(config, problem, arch, values_at_a_time, beside_values),
    }


def _is_hard(problem: Any, config: Config) -> bool:
    """Return whether a late weight needs more registers than its 32 values of 16 bits do, or the 160 warps
    and more of a cluster that do not all hold as much of a row. Source: ptxas."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    many = values_per_thread(problem, threads_per_row, cluster_n) > 32
    odd = cluster_n == 16 and threads_per_row > 256 and part(problem, cluster_n) % threads_per_row > 0
    return many or odd or is_wide(problem) or problem.signature.dtype == "fp32"


def min_blocks(
    config: Config,
    problem: Any,
    arch: Arch,
    values_at_a_time: int,
    beside_values: tuple[int, int] | None,
) -> int:
    """Return how many CTAs must find room in the registers of a multiprocessor: as many as in shared memory,
    unless a thread has more values at a time than fit 40 registers; for rows in registers as many as
    ``beside_values`` leaves room for."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    if config["row_in"] == "registers":
        early = bool(config.get("prefetch_weight"))
        if beside_values is None or threads_per_row < 128:
            return 1
        accesses = steps(problem, threads_per_row, cluster_n)
        taken = values_registers(problem, accesses, 1, early) + beside_values[early]
        more = 0 if early or not _is_hard(problem, config) else 8  # registers come in steps of 8
        taken += more + (8 + 3 * more if config["pdl"] == "late" else 0)  # what the end of the load must keep
        return max(1, arch.registers // (threads_per_row * taken))
    if config["row_in"] == "ring":
        held = config.get("prefetch_weight") is True
        return ring_ctas(threads_per_row, config.integer("rows_per_cta"), cluster_n, held, problem)
    taken = staged_bytes(problem, cluster_n) + SUMS_BYTES
    wide = is_wide(problem) or config.integer("turn") * access_elements(problem) > values_at_a_time
    threads = SMEM_THREADS_WIDE if wide else SMEM_THREADS
    return max(1, min(arch.smem_bytes // taken, threads // threads_per_row))


def single_rows(problem: Any, sm_count: int) -> bool:
    """Return whether so few rows come that even the largest clusters all run at a time."""
    return bool(problem.m * 16 <= sm_count)


def few_long_rows(problem: Any, sm_count: int) -> bool:
    """Return whether so few rows of more than 64 KiB come that two waves of the largest clusters do."""
    return bool(problem.m * 16 <= 2 * sm_count and part_bytes(problem, 1) > SHORT_FOR_SMEM)


def clusters_by_default(problem: Any, sm_count: int) -> list[int]:
    """Return the cluster sizes to try, best first: single rows are for as many CTAs as may share them, long
    rows for CTAs of 128 threads with up to 32 values each, of which a multiprocessor has several."""
    sizes = sorted(as_integer(size) for size in DOMAINS["cluster_n"])
    if single_rows(problem, sm_count) or few_long_rows(problem, sm_count):
        return sizes[::-1]
    if part_bytes(problem, 1) <= LONG_ROW:
        return sizes
    small = [
        size
        for size in sizes
        if part(problem, size) * access_elements(problem) <= 32 * 128
        and (size <= 8 or staged_bytes(problem, size) >= 16_384)
    ]
    return [*small, 8, *sizes[::-1]]


def values_by_default(problem: Any, sm_count: int) -> int:
    """Return about how many values a thread had best hold. Source: an H200, rows of 64 to 32768 elements."""
    row = part_bytes(problem, 1) * inputs(problem)
    if row <= 1024:
        return 8 if problem.m > 512 * sm_count and problem.family == "rmsnorm" else 12
    if single_rows(problem, sm_count) or (row <= 4096 and problem.m <= 32 * sm_count):
        return 20
    if row > 10_240 or problem.m <= 16 * sm_count:
        return 32
    if row <= 2560:  # one warp has a whole row
        return 20 if problem.signature.unaligned else 40
    return 20


def smem_by_default(problem: Any, config: Config, sm_count: int) -> bool:
    """Return whether a row had better wait in shared memory than as ``config`` has it.

    It had where registers keep too few bytes in flight: less than 128 for each thread, or CTAs of more than
    256 threads. Source: an H200, where 128 threads with 64 bytes each take 9 % longer than shared memory and
    512 with as much 70 %, but with 128 bytes 128 or 256 threads take 2 % less.
    """
    threads, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    in_flight = steps(problem, threads, cluster_n) * ACCESS_BYTES * inputs(problem)
    long = part_bytes(problem, 1) > SHORT_FOR_SMEM and not few_long_rows(problem, sm_count)
    return long and (in_flight < 128 or threads > 256)


def in_smem(space: Space, problem: Any, config: Config, first_turn: int = 4) -> Config:
    """Return the config that keeps about 32 KiB of a row in shared memory, with about 128 bytes for a thread;
    ``config`` if rows are not aligned."""
    legal = [
        changed
        for cluster_n in space.domains["cluster_n"]
        for threads in (128, 256, 512)
        for turn in (first_turn, 6 - first_turn)
        if not space.explain(
            problem,
            changed := config.replace(
                threads_per_row=threads, cluster_n=cluster_n, turn=turn, row_in="smem", pdl="early"
            ),
        )
    ]

    def distance(config: Config) -> tuple[float, float]:
        staged = staged_bytes(problem, config.integer("cluster_n"))
        each = staged / config.integer("threads_per_row")
        return max(staged / 32_768, 32_768 / staged), max(each / 128, 128 / each)

    return min(legal, key=distance, default=config)


def choose_default(space: Space, problem: Any) -> Config:
    """Return a config that follows from the rows per multiprocessor, the bytes of a row, and how many of
    these a thread has in flight."""
    sm_count = space.arch.nominal_sm_count
    base: dict[str, Value] = {
        "threads_per_row": 4,
        "rows_per_cta": 32,
        "rows_per_thread": 1,
        "cluster_n": 1,
        "prefetch_weight": True,
        "row_in": "registers",
        "turn": 1,
        "pdl": start_by_default(problem, sm_count),
    }
    base = {knob: base[knob] for knob in space.domains}
    wanted = values_by_default(problem, sm_count)

    def distance(config: Config) -> tuple[bool, float]:
        threads, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
        values = values_per_thread(problem, threads, cluster_n)
        odd = threads == 4 and vectors(problem) >= 8
        odd |= cluster_n > 1 and threads != 128 and not single_rows(problem, sm_count)
        return odd, max(values / wanted, wanted / values)

    for cluster_n in clusters_by_default(problem, sm_count):
        configs = (
            Config(
                {
                    **base,
                    "threads_per_row": threads,
                    "rows_per_cta": rows_by_default(problem, threads, sm_count),
                    "cluster_n": cluster_n,
                }
            )
            for threads in sorted(as_integer(value) for value in space.domains["threads_per_row"])
        )
        legal = [config for config in configs if not space.explain(problem, config)]
        if legal:
            config = min(legal, key=distance)
            return in_smem(space, problem, config) if smem_by_default(problem, config, sm_count) else config
    return Config(base)


@lru_cache(maxsize=256)
def _kernels(space: Space, kind: Any) -> tuple[tuple[Config, Derived, tuple[int, int, int]], ...]:
    """Return configs of problems like ``kind``, for any number of rows, and what follows from each."""
    fixed: Mapping[str, Sequence[Value]] = {
        "pdl": ["off"],
        "rows_per_thread": [1],
        "row_in": ["registers", "smem"],
    }
    found = {
        config: (config, space.derive(config, kind, space.arch), loaded(kind, config))
        for m in (1, MANY_ROWS)
        for config in space.configs(kind.with_sizes(m=m), fixed)
    }
    return tuple(found.values())


@lru_cache(maxsize=256)
def _rings(space: Space, kind: Any) -> tuple[tuple[Config, Derived], ...]:
    """Return configs whose rows come through a ring, of problems like ``kind`` with many rows."""
    fixed: Mapping[str, Sequence[Value]] = {"row_in": ["ring"], "pdl": ["early"]}
    configs = space.configs(kind.with_sizes(m=MANY_ROWS), fixed)
    return tuple((config, space.derive(config, kind, space.arch)) for config in configs)


def through_a_ring(space: Space, problem: Any, stays: bool) -> Config | None:
    """Return the config whose rows come through a ring that had best be tried; None if rows had better not.

    There must be 12 rows for each group that runs at a time. Threads have about 32 values each. CTAs that
    stay have 512 threads and large clusters; others have 256, and 16 rows and more for each such group.
    """
    if part_bytes(problem, 1) <= RING_ROW or not along_row(problem):
        return None

    def distance(ring: tuple[Config, Derived]) -> tuple[float, ...]:
        config, derived = ring
        groups = as_integer(derived["clusters"]) * config.integer("rows_per_cta")
        leaves = not stays and problem.m >= 16 * groups
        threads, cluster_n = as_integer(derived["threads"]), config.integer("cluster_n")
        values = values_per_thread(problem, config.integer("threads_per_row"), cluster_n)
        return (
            (config["turn"] == ROWS_OF_GROUP) != leaves,
            abs(math.log2(values / 32)),
            abs(math.log2(threads / (256 if leaves else 512))),
            config.integer("rows_per_cta") if leaves else -cluster_n,
            config.get("prefetch_weight") is False,
        )

    few = [
        ring
        for ring in _rings(space, problem.with_sizes(m=1))
        if problem.m >= 12 * as_integer(ring[1]["clusters"]) * ring[0].integer("rows_per_cta")
    ]
    rings = sorted(few, key=distance)
    return next((config for config, _ in rings if not space.explain(problem, config)), None)


def fastest_expected(space: Space, problem: Any, *, terms: Terms, turn: int, ring: str = "") -> Config:
    """Return the valid config that is expected to take least, among those with the usual rows of a CTA.

    If its rows are in shared memory, it is the usual one of these, which prefers turns of so many vectors.
    Long rows with a weight come through a ring if there is one.
    """
    sm_count = space.arch.nominal_sm_count
    if ring and (found := through_a_ring(space, problem, ring == "stays")) is not None:
        return found

    def expected(kernel: tuple[Config, Derived, tuple[int, int, int]]) -> float:
        config, derived, per_thread = kernel
        taken = expected_us(config, problem, derived, per_thread, space.arch, terms)
        # Of parts of a warp that take about as long, those with fewer accesses each are a little faster.
        return taken * (1 + SMALL_GROUP * max(0.0, math.log2(WARP / config.integer("threads_per_row"))))

    usual = [
        kernel
        for kernel in _kernels(space, problem.with_sizes(m=1))
        if kernel[0]["rows_per_cta"]
        == rows_by_default(problem, kernel[0].integer("threads_per_row"), sm_count)
    ]
    pdl = start_by_default(problem, sm_count) if problem.min_bytes <= SHORT_KERNEL else "early"
    for config, derived, _ in sorted(usual, key=expected):
        if config["row_in"] == "smem":
            return in_smem(space, problem, config, turn)
        chosen = config.replace(pdl=pdl)
        if as_integer(derived["min_blocks"]) > as_integer(
            space.derive(chosen, problem, space.arch)["min_blocks"]
        ):
            chosen = config.replace(pdl="early")  # what the end must keep leaves room for fewer CTAs
        if not space.explain(problem, chosen):
            return chosen
    return Config({knob: values[0] for knob, values in space.domains.items()})


def start_by_default(problem: Any, sm_count: int) -> str:
    """Return when the next kernel may start: behind the sums where a kernel is short but has several rows."""
    return "late" if sm_count < 16 * problem.m <= 256 * sm_count else "early"


def rows_by_default(problem: Any, threads_per_row: int, sm_count: int) -> int:
    """Return the rows of a CTA: it has 128 threads, or 256 where many would start and end too often, since
    they have two rows of two warps, less than 4 KiB, or come in hundreds."""
    if threads_per_row >= 128:
        return 1
    rows = 128 // threads_per_row
    if threads_per_row == WARP:
        return rows
    short = threads_per_row == 64 or rows * part_bytes(problem, 1) < 4096
    return 2 * rows if problem.m > (8 if short else 512) * sm_count else rows


def loaded(problem: Any, config: Config) -> tuple[int, int, int]:
    """Return a thread's values, its accesses for them, and its registers for weights that come early.

    Accesses to single elements count a quarter: more of them are under way.
    """
    rows = config.integer("rows_per_thread")
    accesses = steps(problem, config.integer("threads_per_row"), config.integer("cluster_n"))
    values = accesses * access_elements(problem)
    early = config.get("prefetch_weight", True) is True
    weights = values_registers(problem, accesses, 1, True) - values_registers(problem, accesses, 1, False)
    counted = accesses if access_elements(problem) > 1 else -(-accesses // 4)
    return values * rows, counted * rows, weights if early else 0


def row_space(
    family: str,
    arch: Arch,
    *,
    weight: bool = True,
    sums_of_row: int = 1,
    values_at_a_time: int = 32,
    beside_values: tuple[int, int] | None = None,
    terms: Terms | None = None,
    turn: int = 2,
    ring: str = "",
) -> Space:
    """Return the space of a family of kernels over rows, bound to ``arch``.

    Args:
        family: Its name.
        arch: The target.
        weight: Whether there is something along a row to load, so that ``prefetch_weight`` is a knob.
        sums_of_row: How many numbers the warps of a row exchange.
        values_at_a_time: With how many values of a row in shared memory, at most, a thread gets along with 40
            registers. Source: ptxas, the tests' kernels.
        beside_values: Registers of a thread beside its values and weights, where these are loaded late, and
            early by 128 threads: the compiler gets no more. None where it takes few enough. Source: ptxas.
        terms: What its kernels are expected to take, by which its default is chosen; else it follows from the
            sizes alone.
        turn: Of rows in shared memory, by that default.
        ring: Whether rows may come through a ring: to CTAs whose default ``stays`` to the end, or ``leaves``.
    """
    domains = {k: v for k, v in DOMAINS.items() if weight or k != "prefetch_weight"}
    domains["row_in"] = domains["row_in"] if ring else ("registers", "smem")
    known = _RULES if ring else [rule for rule in _RULES if rule not in _OF_RINGS]
    rules = known if weight else [_BARE.get(rule, rule) for rule in known]
    return Space(
        family=family,
        arch=arch,
        domains=domains,
        rules=tuple(Rule.of(rule) for rule in rules if rule is not None),
        derive=partial(
            derive, sums_of_row=sums_of_row, values_at_a_time=values_at_a_time, beside_values=beside_values
        ),
        choose_default=choose_default
        if terms is None
        else partial(fastest_expected, terms=terms, turn=turn, ring=ring),
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
    )
