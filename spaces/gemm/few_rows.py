"""Which kernels for GEMMs of few rows exist, which are legal, and what follows from each of them.

They use no tensor cores: with at most 4 rows of A the time is that of reading B, once, and a thread can do
its multiplications while it waits for memory. What decides is how many bytes a multiprocessor has under way.

Measurements that a rule or a value rests on are those of ``docs/results/few_rows.json``, of an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.problem import LAYOUTS, Problem
from cutegen.space import Config, Launch, Rule, Space, Value

from .shared import sizes_round_up_below_2_to_31

WARP = 32
LOAD_BYTES = 16
"""The widest load of a thread on Hopper. Source: PTX ISA, ld.global.v4.b32."""
MAX_ROWS = 4
"""Source: measured; with 4 rows level with tensor cores, with 8 rows 1.5 times as slow."""
MIN_LOADS, MAX_LOADS = 4, 16
"""Loads of weights that a thread has under way. Source: measured for one row; with 4 and 16 some kernels are
the fastest, with 8 some within 1.5 % of them. 16 take 64 registers."""
SHORT = 256
"""Loads that a short column takes: 4 KiB. Source: assumed."""
MAX_GRID_Y = 65535
"""Source: CUDA C++ Programming Guide, technical specifications."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "algorithm": ("few_rows",),
    "rows_per_cta": (1, 2, 4),
    "threads_per_cta": (128, 256, 64, 512),
    "columns_per_warp": (2, 4, 1, 8),
    "warps_along_k": (2, 4, 8, 1),
    "unroll": (1, 2, 4, 8),
    "cluster_k": (1, 4),
    "use_pdl": (False, True),
}

Candidates: TypeAlias = Mapping[int, tuple[tuple[int, int, int, int], ...]]
"""For so many rows some kernels: threads of a CTA, columns of a warp, warps along k, unrolled loads."""

DEFAULT_CANDIDATES: Candidates = {
    1: (
        (128, 2, 4, 2), (256, 2, 8, 2), (128, 2, 2, 2), (128, 4, 4, 2), (256, 2, 8, 4), (128, 2, 4, 4),
        (256, 2, 1, 2),
    ),
    2: (
        (64, 2, 2, 2), (256, 4, 4, 2), (64, 4, 1, 2), (256, 2, 8, 2), (64, 4, 2, 1), (64, 4, 1, 1),
        (64, 1, 2, 4),
    ),
    4: ((128, 2, 4, 2), (64, 2, 2, 2), (128, 2, 2, 2), (64, 4, 1, 4), (64, 2, 1, 2)),
}  # fmt: skip
"""Source: times of 250 problems behind another kernel (docs/results/untuned_few_rows_1601.json.xz, 1602, 1609
and 1613). Of sets of so many they and a kernel on tensor cores reach the most if a model chooses that has not
seen the problem: 0.993, 0.982 and 0.977 of the speed of the fastest."""


def vectors(problem: Problem) -> int:
    """Return the loads that a column of B takes."""
    return problem.k * DTYPE_BYTES[problem.ab_dtype] // LOAD_BYTES


def column_warps(threads_per_cta: int, warps_along_k: int) -> int:
    """Return the warps of a CTA that have columns of their own."""
    return threads_per_cta // WARP // warps_along_k


def registers(rows_per_cta: int, columns_per_warp: int, unroll: int) -> int:
    """Return about how many registers a thread takes: for loads, of A too, accumulators and addresses.

    Source: fitted to what ptxas took for 71 kernels; off by 14 in the root mean square.
    """
    of_a = min(unroll * rows_per_cta, 20)
    return 26 + unroll * columns_per_warp + round(5.6 * of_a) + 10 * columns_per_warp


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def rows_are_few(problem: Problem) -> bool:
    """Without tensor cores every row costs as many instructions as the first: m must be at most 4. With 4
    rows they take about as long as reading B does; with 8 these kernels were measured to take 1.5 times as
    long as those with tensor cores."""
    return problem.m <= MAX_ROWS


def operands_have_16_bits(problem: Problem) -> bool:
    """The kernel turns bf16 and fp16 into fp32; other dtypes are for the tensor cores."""
    return problem.ab_dtype in ("bf16", "fp16")


def operands_are_contiguous_along_k(problem: Problem) -> bool:
    """The lanes of a warp lie along k, where each loads 16 bytes of A and of B: layout must be kk."""
    return LAYOUTS[problem.layout] == ("k", "k")


def batches_fit_the_grid(problem: Problem) -> bool:
    """Batches are numbered by the second axis of the grid: at most 65535."""
    return problem.batch <= MAX_GRID_Y


def rows_fit_the_problem(rows_per_cta: int, problem: Problem) -> bool:
    """A CTA computes all rows, so rows_per_cta must be at least m; with twice as many, half of the work would
    be thrown away."""
    return problem.m <= rows_per_cta < 2 * problem.m


def warps_along_k_divide_the_cta(threads_per_cta: int, warps_along_k: int) -> bool:
    """warps_along_k warps share columns, so a CTA must have that many."""
    return WARP * warps_along_k <= threads_per_cta


def loads_fit_registers(columns_per_warp: int, unroll: int) -> bool:
    """A thread has columns_per_warp * unroll loads of 4 registers under way: at most 16, or too few threads
    find room on a multiprocessor; and at least 4, or too few bytes are under way."""
    return MIN_LOADS <= columns_per_warp * unroll <= MAX_LOADS


def cta_fits_registers(
    rows_per_cta: int, threads_per_cta: int, columns_per_warp: int, unroll: int, arch: Arch
) -> bool:
    """All threads of a CTA must find room in the registers of a multiprocessor: 512 threads have 128 each, so
    what takes about 150 or more would spill."""
    room = min(arch.registers // threads_per_cta, arch.registers_per_thread)
    return registers(rows_per_cta, columns_per_warp, unroll) <= room * 6 // 5


def one_row_takes_narrow_shapes(
    rows_per_cta: int, threads_per_cta: int, columns_per_warp: int, warps_along_k: int, problem: Problem
) -> bool:
    """One row leaves threads little to multiply, so CTAs of 64 and 512 threads, 8 columns and, unless k is at
    most 2048, a single warp along k do not pay: on three problems none of these was measured within 1.5 % of
    the fastest, and some took a third longer."""
    if rows_per_cta > 1:
        return True
    narrow = threads_per_cta in (128, 256) and columns_per_warp <= 4
    return narrow and (warps_along_k > 1 or vectors(problem) <= SHORT)


def threads_have_work(warps_along_k: int, unroll: int, cluster_k: int, problem: Problem) -> bool:
    """A thread loads unroll vectors of 16 bytes at a time: k must have more than unroll - 1 for each of the
    32 * warps_along_k * cluster_k threads along it."""
    return vectors(problem) > WARP * warps_along_k * cluster_k * (unroll - 1)


def cluster_is_for_few_columns(
    threads_per_cta: int,
    columns_per_warp: int,
    warps_along_k: int,
    cluster_k: int,
    problem: Problem,
    arch: Arch,
) -> bool:
    """cluster_k above 1 makes up for missing columns, and costs an exchange: columns and batches must make
    fewer CTAs than there are multiprocessors, and the warps of a CTA must all lie along k."""
    if cluster_k == 1 or column_warps(threads_per_cta, warps_along_k) != 1:
        return cluster_k == 1
    return -(-problem.n // columns_per_warp) * problem.batch < arch.nominal_sm_count


RULES = tuple(
    Rule.of(function)
    for function in (
        sizes_round_up_below_2_to_31,
        rows_are_few,
        operands_have_16_bits,
        operands_are_contiguous_along_k,
        batches_fit_the_grid,
        rows_fit_the_problem,
        warps_along_k_divide_the_cta,
        loads_fit_registers,
        cta_fits_registers,
        one_row_takes_narrow_shapes,
        threads_have_work,
        cluster_is_for_few_columns,
    )
)


# --- what follows from a config ---


def derive(config: Config, problem: Problem, arch: Arch) -> dict[str, Value]:
    """Return how warps share a CTA, the places of a warp's sums, threads, and exact shared memory (bytes)."""
    threads, k_warps = config.integer("threads_per_cta"), config.integer("warps_along_k")
    groups = column_warps(threads, k_warps)
    rows, columns = config.integer("rows_per_cta"), config.integer("columns_per_warp")
    per_warp = rows * columns
    results = per_warp * groups
    cluster = config.integer("cluster_k")
    sums = -(-results * k_warps * 4 // 16) * 16
    return {
        "column_warps": groups,
        "results_per_warp": per_warp,
        "threads": threads,
        "registers": min(
            registers(rows, columns, config.integer("unroll")),
            arch.registers // threads,
            arch.registers_per_thread,
        ),
        "smem_bytes": results * k_warps * 4
        if cluster == 1
        else sums + -(-results * cluster * 4 // 8) * 8 + 8,
    }


def default_candidates(problem: Problem) -> Iterator[dict[str, Value]]:
    """Yield the knobs of a few kernels of which one does well on problems of as many rows."""
    return candidates(problem.m, DEFAULT_CANDIDATES)


def candidates(m: int, known: Candidates) -> Iterator[dict[str, Value]]:
    """Yield the knobs of the known kernels for as many rows."""
    rows = next((count for count in known if count >= m), MAX_ROWS)
    for threads, columns, k_warps, unroll in known[rows]:
        yield {
            "algorithm": "few_rows",
            "rows_per_cta": rows,
            "threads_per_cta": threads,
            "columns_per_warp": columns,
            "warps_along_k": k_warps,
            "unroll": unroll,
            "cluster_k": 1,
            "use_pdl": True,
        }


def choose_default(space: Space, problem: Problem) -> Config:
    """Return the first default candidate that is valid, else the first legal config."""
    candidates = map(Config, space.default_candidates(problem))
    valid = (config for config in candidates if not space.explain(problem, config))
    return next(valid, None) or next(space.configs(problem))


def build_space(arch: Arch) -> Space:
    """Return the space of kernels for few rows bound to ``arch``."""
    return Space(
        family="gemm",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
        default_candidates=default_candidates,
    )
