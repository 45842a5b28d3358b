"""Which RMSNorm configs exist, which are legal, and what follows from each of them, on every target.

A row has ``n`` elements, a number that is compiled in: the loops over a row are unrolled, and every thread
knows while it is compiled which of its accesses can lie beyond the end. ``m`` is free.

The limits of the rules come from times of bf16 rows of 128 to 32768 elements on an H200: for each of 13
problems the fastest of these kernels stays legal, or one that takes at most 1 % longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutegen.arch import Arch
from cutegen.space import Config, Launch, Rule, Space, Value, as_integer

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ACCESS_BYTES = 16
"""The widest access of a thread to memory. Source: PTX ISA, ld.global.v4.b32."""
MAX_ROW = 262_144
WARP = 32
MAX_VALUES = 40
"""Values of a row that a thread may hold: with more, a multiprocessor has too few threads."""
OTHER_REGISTERS = 20
"""Registers of a thread beside those for its values: addresses, sums. Source: ptxas, the tests' kernels."""
LONG_ROW = 16_384
"""Bytes of a row above which a cluster shares it, however many rows there are."""

SUMS_BYTES = 2048
"""Shared memory of a CTA beside its part of a row, at most: sums, barriers, what the driver takes."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "threads_per_row": (128, 256, 192, 224, 512, 64, 32, 16, 8, 4, 160, 320, 384, 448, 640, 768, 896, 1024),
    "rows_per_cta": (1, 2, 4, 8, 16, 32, 64),
    "rows_per_thread": (1, 2),
    "cluster_n": (1, 2, 4, 8, 16),
    "prefetch_weight": (True, False),
    "row_in": ("registers", "cache", "smem"),
    "turn": (1, 2, 4, 8),
    "pdl": ("off", "early", "late"),
}


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

    loaded = accesses * packed(ELEMENT_BYTES[sig.dtype]) * (2 if sig.residual else 1)
    values = max(loaded, accesses * access_elements(problem))
    if not (sig.weight and prefetch_weight):
        return values
    weight_bytes = 4 if sig.weight == "fp32" else ELEMENT_BYTES[sig.dtype]
    return values + accesses // rows_per_thread * packed(weight_bytes)


def staged_bytes(problem: Any, cluster_n: int, row_in: str) -> int:
    """Return the shared memory that one CTA takes for its part of a row."""
    return (
        part_bytes(problem, cluster_n) * (2 if problem.signature.residual else 1) if row_in == "smem" else 0
    )


def slots(threads_per_row: int, cluster_n: int) -> int:
    """Return the places for partial sums of one row, rounded up to 16 bytes."""
    return -(-(threads_per_row // WARP * cluster_n) // 4) * 4


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def rows_have_a_supported_length(problem: Any) -> bool:
    """A row has 1 to 262144 elements: 16 CTAs keep no more of it in registers."""
    return bool(1 <= problem.n <= MAX_ROW)


def cta_has_a_common_size(threads_per_row: int, rows_per_cta: int, rows_per_thread: int) -> bool:
    """rows_per_cta / rows_per_thread groups of threads make a CTA: groups of fewer than 128 threads fill it
    up to 128 or 256, larger ones are alone in it, since larger CTAs start and end more slowly."""
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
    return held * ELEMENT_BYTES[problem.signature.dtype] >= 16 and lacking <= has


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
    accesses = steps(problem, threads_per_row, cluster_n) * rows_per_thread
    if row_in != "registers":
        return True
    if accesses * access_elements(problem) > MAX_VALUES:
        return False
    threads = max(1, rows_per_cta // rows_per_thread) * threads_per_row
    room = min(arch.registers // threads, arch.registers_per_thread)
    return values_registers(problem, accesses, rows_per_thread, prefetch_weight) + OTHER_REGISTERS <= room


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
    long = share >= 8192 and part_bytes(problem, 1) >= LONG_ROW
    return threads_per_row >= 128 and (long or (share >= 4096 and problem.m <= 4 * arch.nominal_sm_count))


def grid_fits_32_bits(cluster_n: int, problem: Any) -> bool:
    """CTAs are numbered with 31 bits, so m * cluster_n must stay below 2147483648."""
    return bool(problem.m * cluster_n < 2**31)


def weight_is_late_where_registers_are_short(
    threads_per_row: int, cluster_n: int, prefetch_weight: bool, problem: Any
) -> bool:
    """prefetch_weight=false loads the weight after the sum, which takes longer and saves registers; it needs
    a weight, 32 values per thread, and 256 threads_per_row, whose CTAs find room less often."""
    if prefetch_weight:
        return True
    held = values_per_thread(problem, threads_per_row, cluster_n)
    return bool(problem.signature.weight) and held >= 32 and threads_per_row >= 128


def two_passes_are_for_rows_of_a_cta(
    threads_per_row: int, row_in: str, turn: int, prefetch_weight: bool
) -> bool:
    """row_in other than registers needs 128 threads_per_row."""
    if row_in == "registers":
        return turn == 1
    return threads_per_row >= 128 and prefetch_weight


def part_fits_smem(cluster_n: int, row_in: str, problem: Any, arch: Arch) -> bool:
    """row_in=smem needs rows at multiples of 16 bytes, and room for a CTA's part in shared memory."""
    if row_in != "smem":
        return True
    room = arch.smem_bytes - SUMS_BYTES
    return not problem.signature.unaligned and staged_bytes(problem, cluster_n, row_in) <= room


RULES = tuple(
    Rule.of(function)
    for function in (
        rows_have_a_supported_length,
        cta_has_a_common_size,
        threads_have_work,
        row_fits_registers,
        several_rows_per_thread_are_for_short_rows,
        cluster_shares_long_or_few_rows,
        grid_fits_32_bits,
        weight_is_late_where_registers_are_short,
        two_passes_are_for_rows_of_a_cta,
        part_fits_smem,
    )
)


# --- what follows from a config ---


def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
    """Return accesses per row, CTA and thread, groups, warps, and the exact shared memory (bytes)."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    rows_per_cta = config.integer("rows_per_cta")
    groups = rows_per_cta // config.integer("rows_per_thread")
    has = part(problem, cluster_n)
    shortest = vectors(problem) - (cluster_n - 1) * has
    row_in, turn = str(config["row_in"]), config.integer("turn")
    sums = slots(threads_per_row, cluster_n) * 4 * groups if threads_per_row > WARP else 0
    barriers = 8 if cluster_n > 1 else 0
    if row_in == "smem":
        barriers += 8 * -(-steps(problem, threads_per_row, cluster_n) // turn)
    return {
        "access_elements": access_elements(problem),
        "vectors": vectors(problem),
        "part": has,
        "steps": steps(problem, threads_per_row, cluster_n),
        "whole_steps": max(0, shortest) // threads_per_row if rows_per_cta == 1 else 0,
        "groups": groups,
        "threads": groups * threads_per_row,
        "warps_per_row": max(1, threads_per_row // WARP),
        "slots": slots(threads_per_row, cluster_n),
        "smem_bytes": staged_bytes(problem, cluster_n, row_in) + sums + barriers,
        "min_blocks": min_blocks(config, problem, arch),
    }


def min_blocks(config: Config, problem: Any, arch: Arch) -> int:
    """Return how many CTAs find room in the registers of a multiprocessor: as many as in shared memory."""
    if config["row_in"] != "smem":
        return 1
    taken = staged_bytes(problem, config.integer("cluster_n"), "smem") + SUMS_BYTES
    return max(1, min(arch.smem_bytes // taken, 1536 // config.integer("threads_per_row"), 16))


def single_rows(problem: Any, sm_count: int) -> bool:
    """Return whether so few rows come that even the largest clusters all run at a time."""
    return bool(problem.m * 16 <= sm_count)


def clusters_by_default(problem: Any, sm_count: int) -> list[int]:
    """Return the cluster sizes to try, best first: single rows are for as many CTAs as may share them, long
    rows for CTAs with at most 8 KiB each, of which a multiprocessor has several."""
    sizes = sorted(as_integer(size) for size in DOMAINS["cluster_n"])
    if single_rows(problem, sm_count):
        return sizes[::-1]
    if part_bytes(problem, 1) <= LONG_ROW:
        return sizes
    return [size for size in sizes if part_bytes(problem, size) <= 8192] + sizes[::-1]


def values_by_default(problem: Any, sm_count: int) -> int:
    """Return about how many values a thread had best hold. Source: an H200, rows of 128 to 32768 elements."""
    row = part_bytes(problem, 1)
    if single_rows(problem, sm_count):
        return 20
    if row <= 1024:
        return 8 if problem.m > 512 * sm_count else 32
    return 32 if row > 10_240 or problem.m <= 16 * sm_count else 20


def choose_default(space: Space, problem: Any) -> Config:
    """Return a config that follows from the rows per multiprocessor and the bytes of a row.

    It takes at most 1 % longer than the best legal config for the 13 problems that were measured.
    """
    sm_count = space.arch.nominal_sm_count
    cta = 256 if problem.m > 512 * sm_count else 128
    base: dict[str, Value] = {
        "threads_per_row": 4,
        "rows_per_cta": cta // 4,
        "rows_per_thread": 1,
        "cluster_n": 1,
        "prefetch_weight": True,
        "row_in": "registers",
        "turn": 1,
        "pdl": "late" if sm_count < 16 * problem.m <= 256 * sm_count else "early",
    }
    wanted = values_by_default(problem, sm_count)

    def distance(config: Config) -> float:
        values = values_per_thread(problem, config.integer("threads_per_row"), config.integer("cluster_n"))
        return max(values / wanted, wanted / values)

    for cluster_n in clusters_by_default(problem, sm_count):
        legal = []
        for threads in sorted(as_integer(value) for value in space.domains["threads_per_row"]):
            rows = 1 if threads >= 128 else cta // threads
            changes: dict[str, Value] = {
                "threads_per_row": threads,
                "rows_per_cta": rows,
                "cluster_n": cluster_n,
            }
            config = Config({**base, **changes})
            if not space.explain(problem, config):
                legal.append(config)
        if legal:
            return min(legal, key=distance)
    return Config(base)


def build_space(arch: Arch) -> Space:
    """Return the space of RMSNorm bound to ``arch``."""
    return Space(
        family="rmsnorm",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
    )
