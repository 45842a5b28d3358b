"""Which config of a kernel over rows is the default: by the sizes alone, or by what kernels should take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from cutegen.arch import resident_clusters
from cutegen.space import Config, Space, Value, as_integer
from cutegen.space.space import Derived

from .expected import Kernel, expected_us
from .registers import RegistersTaken, resident_ctas
from .ring import ROWS_OF_GROUP
from .rules import DOMAINS, LONG_ROW, MAX_VALUES
from .sizes import (
    ACCESS_BYTES,
    WARP,
    access_elements,
    along_row,
    inputs,
    part,
    part_bytes,
    staged_bytes,
    steps,
    values_per_thread,
    values_registers,
    vectors,
)
from .traits import SHORT_FOR_SMEM, DefaultByTerms

MANY_ROWS = 1_000_000
"""So many that no rule refuses a config because there are too few."""
SMALL_GROUP = 0.02
"""How much longer a row takes, as a fraction, with half as many threads of a warp. Source: an H200."""
LONG_FOR_TWO_WARPS = 4096
"""Bytes of a row from which two warps take no whole row. Source: an H200, 65536 rows of 2048 elements: 128
threads take 2 to 5 % less."""
MANY_FOR_FOUR = 8
"""Vectors of a row from which four threads take no row. Source: an H200, 69 problems of 64 elements and more:
eight threads take less time for 65 of them, and 1 % longer at most."""
ROWS_OF_GROUP_AT_LEAST, VERY_LONG_ROW = 10, 98_304
"""Rows for each group of threads that runs at a time, below which no ring is tried: half as many where
groups stay and rows have more bytes than the second number. Source: judgement, between rows of 53 KiB, of
which 7 for each group take 25 % longer than in registers, and those of 122 KiB. 708 and 719 rows of 29592 and
27360 elements, 11 for each of 66 groups, take 11 and 28 % less than with 60 groups."""
LEFT_IN_L2 = 36 * 2**20
"""Bytes of all rows up to which no ring is tried: the kernel before may have left them in L2, where they are
soon read. Source: an H200 with 50 MiB of L2, behind a kernel that writes the rows (untuned_rows_457.json):
LayerNorm of 18 to 36 MB takes 13 to 32 % longer through a ring, of 39 MB and more as long, or up to 47 % less
time."""
IN_SMEM, FEW_IN_SMEM = 28_672, 20_480
"""Bytes of a row that a CTA had best keep in shared memory, of many rows and of few. Source: an H200, behind
another kernel (untuned_rows_457.json, untuned_rows_479.json): with 31 to 39 KiB for each CTA cross-entropy
and softmax of many rows take 0 to 5 % less than with half of that, with 42 to 49 KiB 2 to 14 % more;
LayerNorm of 85 to 124 rows takes 13 to 27 % less with 17 to 27 KiB than with twice that."""
MOST_APART = 0.5
"""Of the values of a ring's thread from 32, where doubling is 1."""
RING_ROW = 40_960
"""Bytes of a row with a weight above which it comes through a ring. Source: an H200: from 64 KiB on it takes
2 to 18 % less there, 2858 rows of 43 KiB 28 % less, those of 32 KiB 1 to 5 % longer."""


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
    # Elements that are read one by one are under way anyway: 128 threads may have up to 40 of them.
    one_by_one = access_elements(problem) == 1 and part(problem, 8) > MAX_VALUES * 128 >= part(problem, 16)
    return [*small, *([16] if one_by_one else []), 8, *sizes[::-1]]


def values_by_default(problem: Any, sm_count: int) -> int:
    """Return about how many values a thread had best hold. Source: an H200, rows of 64 to 32768 elements."""
    row = part_bytes(problem, 1) * inputs(problem)
    if row <= 1024:
        return 8 if problem.m > 512 * sm_count else 12
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
    512 with as much 70 %, but with 128 bytes 128 or 256 threads take 2 % less. Up to two rows for each
    multiprocessor wait in registers of up to 256 threads: 44 rows of 51024 elements take 40 % less so, 254 of
    38424 20 %.
    """
    threads, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    in_flight = steps(problem, threads, cluster_n) * ACCESS_BYTES * inputs(problem)
    long = part_bytes(problem, 1) > SHORT_FOR_SMEM and not few_long_rows(problem, sm_count)
    many = problem.m > 2 * sm_count or threads > 256
    return long and many and (in_flight < 128 or threads > 256)


def few_for_smem(problem: Any, sm_count: int) -> bool:
    """Return whether so few rows wait in shared memory that small CTAs share them out better.

    Source: an H200: from 61 to 254 rows of 36K to 78K elements take 7 to 17 % less with 16 KiB for each CTA
    than with 32; 500 rows and more take no less.
    """
    return bool(problem.m <= 2 * sm_count)


def in_smem(
    space: Space, problem: Any, config: Config, *, wanted: int = IN_SMEM, first_turn: int = 2
) -> Config:
    """Return the config that keeps about the wanted bytes of a row in shared memory of a CTA, with about 128
    for a thread; ``config`` if rows are not aligned."""
    legal = [
        changed
        for cluster_n in space.domains["cluster_n"]
        for threads in (128, 256, 512)
        for turn in (first_turn, 6 - first_turn)
        if not space.explain(
            problem,
            changed := config.replace(threads_per_row=threads, cluster_n=cluster_n, turn=turn, row_in="smem"),
        )
    ]

    def distance(config: Config) -> tuple[float, float]:
        staged = staged_bytes(problem, config.integer("cluster_n"))
        each = staged / config.integer("threads_per_row")
        return max(staged / wanted, wanted / staged), max(each / 128, 128 / each)

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
        "pdl": "off",
    }
    base = {knob: base[knob] for knob in space.domains}
    wanted = values_by_default(problem, sm_count)

    def distance(config: Config) -> tuple[bool, float]:
        threads, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
        values = values_per_thread(problem, threads, cluster_n)
        odd = threads == 4 and vectors(problem) >= MANY_FOR_FOUR
        odd |= cluster_n > 1 and threads != 128 and not single_rows(problem, sm_count)
        # Few rows are for the fewest threads that may hold them. Source: an H200, rows of 51024 elements.
        fewest = odd and cluster_n > 1 and few_for_smem(problem, sm_count)
        return odd, threads if fewest else max(values / wanted, wanted / values)

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
            if not smem_by_default(problem, config, sm_count):
                return config
            return in_smem(space, problem, config, first_turn=4)
    # So many long rows that the grid has no room for the clusters that keep them in registers.
    return next(space.configs(problem), Config(base))


def kernel_of(space: Space, problem: Any, config: Config, registers: RegistersTaken) -> Kernel:
    """Return what is known of the kernel with a config, for any number of rows."""
    derived = space.derive(config, problem, space.arch)
    values, accesses, weights = loaded(problem, config)
    resident = resident_ctas(config, derived, values, weights, space.arch, registers)
    return Kernel(config, derived, accesses, resident)


@lru_cache(maxsize=256)
def _kernels(space: Space, kind: Any, registers: RegistersTaken) -> tuple[Kernel, ...]:
    """Return kernels of problems like ``kind``, for any number of rows."""
    fixed: Mapping[str, Sequence[Value]] = {
        "pdl": ["off"],
        "rows_per_thread": [1],
        "row_in": ["registers", "smem"],
    }
    found = {
        config: kernel_of(space, kind, config, registers)
        for m in (1, MANY_ROWS)
        for config in space.configs(kind.with_sizes(m=m), fixed)
    }
    return tuple(found.values())


@lru_cache(maxsize=256)
def _rings(space: Space, kind: Any) -> tuple[tuple[Config, Derived], ...]:
    """Return configs whose rows come through a ring, of problems like ``kind`` with many rows."""
    fixed: Mapping[str, Sequence[Value]] = {"row_in": ["ring"], "pdl": ["off"]}
    configs = space.configs(kind.with_sizes(m=MANY_ROWS), fixed)
    return tuple((config, space.derive(config, kind, space.arch)) for config in configs)


@lru_cache(maxsize=256)
def _pairs(space: Space, kind: Any) -> tuple[tuple[Config, int], ...]:
    """Return configs that take two long rows at a time, of problems like ``kind``, and how many rows run at
    a time."""
    fixed: Mapping[str, Sequence[Value]] = {"row_in": ["smem"], "rows_per_thread": [2], "pdl": ["off"]}
    found = []
    for config in space.configs(kind.with_sizes(m=MANY_ROWS), fixed):
        ctas = as_integer(space.derive(config, kind, space.arch)["min_blocks"])
        clusters = resident_clusters(space.arch.nominal_sm_count, config.integer("cluster_n"))
        found.append((config, 2 * ctas * clusters))
    return tuple(found)


def two_at_a_time(space: Space, problem: Any) -> Config | None:
    """Return the config that takes two long rows at a time and had best be tried; None if there is none.

    There must be 12 rows for each that runs at a time. CTAs have 192 to 320 threads, in clusters of up to
    8. Source: an H200, LayerNorm of 32K and 64K elements: 3 to 6 % less time than a ring; of 128K, with 512
    threads or in clusters of 16, 1 to 5 % more.
    """
    if part_bytes(problem, 1) <= RING_ROW:
        return None
    fit = [
        config
        for config, rows in _pairs(space, problem.with_sizes(m=1))
        if config.integer("cluster_n") <= 8
        and 192 <= config.integer("threads_per_row") <= 320
        and problem.m >= 12 * rows
        and not space.explain(problem, config)
    ]
    return min(fit, key=lambda config: abs(math.log2(config.integer("threads_per_row") / 256)), default=None)


def through_a_ring(space: Space, problem: Any, stays: bool) -> Config | None:
    """Return the config whose rows come through a ring that had best be tried; None if rows had better not.

    There must be 10 rows for each group that runs at a time; 5 where rows are very long and more than 8
    groups run; and more in all than the L2 may still have. Threads have about 32 values each. CTAs that stay
    have 512 threads and large clusters; others have 256, and 16 rows and more for each such group. Source: an
    H200, LayerNorm: with half the values for each thread 117 rows of 94104 take 68 % longer.
    """
    is_left = problem.m * part_bytes(problem, 1) * inputs(problem) <= LEFT_IN_L2
    if part_bytes(problem, 1) <= RING_ROW or is_left or not along_row(problem):
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

    few_do = stays and part_bytes(problem, 1) > VERY_LONG_ROW

    def has_rows(ring: tuple[Config, Derived]) -> bool:
        groups = as_integer(ring[1]["clusters"]) * ring[0].integer("rows_per_cta")
        halved = few_do and groups > 8
        return bool(problem.m >= groups * (ROWS_OF_GROUP_AT_LEAST // 2 if halved else ROWS_OF_GROUP_AT_LEAST))

    kind = problem.with_sizes(m=1)
    few = [ring for ring in _rings(space, kind) if has_rows(ring) and distance(ring)[1] <= MOST_APART]
    rings = sorted(few, key=distance)
    return next((config for config, _ in rings if not space.explain(problem, config)), None)


def fastest_expected(space: Space, problem: Any, *, by: DefaultByTerms, ring: str) -> Config:
    """Return the valid config that is expected to take least, among those with the usual rows of a CTA.

    If its rows are in shared memory, it is the usual one of these. Long rows with a weight come two at a time
    or, unless ``ring`` is empty, through a ring, where they may.
    """
    sm_count = space.arch.nominal_sm_count
    if ring:
        found = two_at_a_time(space, problem) or through_a_ring(space, problem, ring == "stays")
        if found is not None:
            return found

    min_bytes = problem.min_bytes

    def expected(kernel: Kernel) -> float:
        return expected_us(kernel, problem.m, min_bytes, space.arch, by.terms) * of_small_group(kernel.config)

    kernels = _kernels(space, problem.with_sizes(m=1), by.registers)
    usual = [kernel for kernel in kernels if is_usual(problem, kernel.config, sm_count, by.lane_values)]
    for config, *_ in sorted(usual or kernels, key=expected):
        if config["row_in"] == "smem":
            wanted = FEW_IN_SMEM if few_for_smem(problem, sm_count) else IN_SMEM
            config = in_smem(space, problem, config, wanted=wanted)
            if not space.explain(problem, config):
                return config
        elif not space.explain(problem, config):
            least, most = (rows * sm_count for rows in by.half_warps)
            if problem.m <= by.pairs:
                return in_pairs(space, problem, config, WARP)
            return in_pairs(space, problem, config, 8) if least < problem.m <= most else config
    first = Config({knob: values[0] for knob, values in space.domains.items()})
    return next(space.configs(problem), first)  # the grid has no room for the usual clusters


def in_pairs(space: Space, problem: Any, config: Config, threads: int) -> Config:
    """Return the config with two rows at a time, if so many ``threads`` have a row; ``config`` if not.

    A warp has twice the rows then. Fewer threads are doubled, and a CTA keeps its rows.
    """
    if config["threads_per_row"] != threads:
        return config
    rows = config.integer("rows_per_cta")
    more = {"rows_per_cta": 2 * rows} if threads == WARP else {"threads_per_row": 2 * threads}
    paired = config.replace(rows_per_thread=2, **more)
    return config if space.explain(problem, paired) else paired


def of_small_group(config: Config) -> float:
    """Return how much longer than expected a row takes: of parts of a warp that take about as long, those
    with fewer accesses each are a little faster."""
    return 1 + SMALL_GROUP * max(0.0, math.log2(WARP / config.integer("threads_per_row")))


def is_usual(problem: Any, config: Config, sm_count: int, lane_values: int | None) -> bool:
    """Return whether a config has the usual rows of a CTA, and none of what expectations do not see."""
    usual = config["rows_per_cta"] == rows_by_default(problem, config.integer("threads_per_row"), sm_count)
    alone = lane_values is not None and waits_alone(problem, config, sm_count, lane_values)
    two_warps = config["threads_per_row"] == 64 and part_bytes(problem, 1) >= LONG_FOR_TWO_WARPS
    needless = has_needless_warps(problem, config, sm_count) or shares_needlessly(problem, config, sm_count)
    few_lanes = config["threads_per_row"] == 4 and vectors(problem) >= MANY_FOR_FOUR
    return usual and not (alone or two_warps or needless or few_lanes or reads_one_by_one(problem, config))


def reads_one_by_one(problem: Any, config: Config) -> bool:
    """Return whether threads of less than a warp read more than 8 single elements of a row each, or of one
    warp more than 30 with at most one weight.

    Source: an H200 (docs/results/untuned_rows_53.json, untuned_rows_67.json). Softmax and LayerNorm of 223 to
    535 elements, 1 to 19000 rows: a whole warp takes as long as 16 threads or up to 36 % less, and 38 to 59 %
    less than 8. Cross-entropy of 999 elements, quantized RMSNorm of 1055: two warps take 13 to 31 % less than
    one, for 49528 rows 3 % more.
    """
    if access_elements(problem) > 1 or config["row_in"] != "registers":
        return False
    threads = config.integer("threads_per_row")
    most = 8 if threads < WARP else 30 if len(along_row(problem)) < 2 else MAX_VALUES
    return threads <= WARP and values_per_thread(problem, threads, config.integer("cluster_n")) > most


def has_needless_warps(problem: Any, config: Config, sm_count: int) -> bool:
    """Return whether 16 CTAs have more than 256 threads each for a row that fewer threads could hold.

    Each warp sends its sums to all CTAs, and each CTA waits for those of all warps. Source: an H200, softmax
    of 128256 elements: 512 threads take 4 % longer than 256 for one row, 38 % for 16 rows, 53 % for 32;
    cross-entropy of 191687 elements: 512 take 6 % longer than 320 for two rows, 45 % for 23, 66 % for 335.
    Of up to 8 rows those that fewer threads could hold with 32 values each: softmax of 5 rows of 147240
    elements takes 32 % longer with 40 values for each of 256 threads than with 32 for each of 320.
    """
    if config["row_in"] != "registers" or config["cluster_n"] != 16:
        return False
    fewer = [threads for threads in (256, 320, 384, 448) if threads < config.integer("threads_per_row")]
    most = 32 if single_rows(problem, sm_count) else MAX_VALUES
    return any(values_per_thread(problem, threads, 16) <= most for threads in fewer)


def shares_needlessly(problem: Any, config: Config, sm_count: int) -> bool:
    """Return whether a cluster shares each of many rows that come with a weight and that one CTA could hold.

    Source: an H200, LayerNorm of 11K to 16K elements, 1500 to 8200 rows: one CTA, which loads the weight
    behind the sums, takes 8 to 13 % less. RMSNorm to fp8 of 11560 and 12199 elements, 1900 to 5200 rows: 7 to
    20 % less; 2620 rows of 15472, 15 %; of 16480, 26 % more.
    """
    if not along_row(problem) or config["cluster_n"] == 1:
        return False
    return part_bytes(problem, 1) <= 2 * LONG_ROW and problem.m > 8 * sm_count


def waits_alone(problem: Any, config: Config, sm_count: int, lane_values: int) -> bool:
    """Return whether lanes have so much to do for a row with a weight each that few rows do not hide it."""
    if not along_row(problem) or config["row_in"] != "registers":
        return False
    threads = config.integer("threads_per_row")
    few = problem.m <= 5 * sm_count
    return bool(threads <= WARP and few) and values_per_thread(problem, threads, 1) > lane_values


def rows_by_default(problem: Any, threads_per_row: int, sm_count: int) -> int:
    """Return the rows of a CTA: it has 128 threads, or 256 where many would start and end too often, since
    they have less than 4 KiB or come in hundreds. Source: an H200, where CTAs of four rows of two warps each
    take up to 38 % longer than those of two, in all 33 problems with up to 42000 rows. Many rows of a warp
    each and up to 512 bytes come by eight: 1 to 20 % less time than by four in 12 of 14 problems of LayerNorm
    and softmax, 4 % more in the others, which have 462 bytes."""
    if threads_per_row >= 128:
        return 1
    rows = 128 // threads_per_row
    if threads_per_row == WARP:
        return 2 * rows if part_bytes(problem, 1) <= 512 and problem.m > 32 * sm_count else rows
    short = rows * part_bytes(problem, 1) < 4096
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
