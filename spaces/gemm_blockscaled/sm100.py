"""Which block-scaled Blackwell GEMM configs exist, which are legal, and what follows from each of them.

``mma_tiler_mn`` is the tile of one MMA as the kernel sees it: with ``use_2cta_instrs`` two thread blocks
share it, half of its rows each; with ``swap_ab`` its first number runs along n of the problem and its
second along m. Kernels of this space were compiled and inspected, but are untested on hardware.

Scale factors lie in device memory as cuBLAS takes them: tiles of 128 rows and 4 blocks along k, 512 bytes
each, those of the same rows side by side; inside a tile row r has its 4 bytes at r % 32 * 16 + r // 32 * 4.
They go to shared memory by TMA and from there to tensor memory, where the MMA reads them. Source: cuBLAS
documentation, 1D block scaling factors layout.
"""

from __future__ import annotations

from collections.abc import Mapping

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.problem import BLOCK_SCALED, SCALE_BLOCKS, SCALE_ROWS, Epilogue, Problem
from cutegen.space import Config, Launch, Rule, Space, Value

from ..gemm.blackwell import (
    EPILOGUE_WARPS,
    ROW_BYTES,
    block_tile,
    blocks_per_mma,
    cluster_is_no_larger_than_problem,
    clusters_at_once,
    derive_resources,
    pairs_lie_along_m,
    tile_counts_fit_32_bits,
    tmem_allocation,
)
from ..gemm.shared import (
    RUN_TIME_KNOBS,
    compile_view,
    swap_ab_is_for_narrow_m,
    tile_counts,
    tile_order,
    tma_store_needs_aligned_output,
)

MMA_ROWS = 128
"""Rows of the MMA in each thread block. Source: PTX ISA, tcgen05.mma block-scaled kinds with cta_group::1;
with cta_group::2 64 would do as well, but its scale factors would fill half a tile of theirs."""
WARPS = EPILOGUE_WARPS + 2
"""Four that store, one that multiplies, one that loads."""
SCALE_LANES = 32
"""Rows of tensor memory that hold scale factors, copied to all four quarters. Source: PTX ISA, tcgen05
scale factor layouts."""
EPI_COLUMNS = 32
"""Columns that leave tensor memory at once: 32 accumulators for each of 128 threads."""
MOST_SHARERS = 4
"""Blocks of a cluster that each load a part of the same 512 bytes of scale factors: TMA writes to multiples
of 128 bytes of shared memory (PTX ISA, tensor copies)."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "mma_tiler_mn": tuple((m, n) for m in (128, 256) for n in (64, 128, 192, 256)),
    "use_2cta_instrs": (False, True),
    "cluster_shape_mn": tuple(
        (blocks // n, n) for blocks in (1, 2, 4, 8, 16) for n in (1, 2, 4) if n <= blocks <= MOST_SHARERS * n
    ),
    "swap_ab": (False, True),
    "use_tma_store": (True, False),
    "use_pdl": (False, True),
    "swizzle_size": (1, 2, 4, 8),
    "raster_along_m": (False, True),
}


def scale_rows(columns: int) -> int:
    """Return the columns of B whose scale factors are loaded for a tile: whole tiles of them."""
    return -(-columns // SCALE_ROWS) * SCALE_ROWS


def scales_per_row(ab_dtype: str) -> int:
    """Return the scale factors, a byte each, of one row of a k tile."""
    scaling = BLOCK_SCALED[ab_dtype]
    return tile_k(ab_dtype) // scaling.block


def tile_k(ab_dtype: str) -> int:
    """Return the elements of a tile along k."""
    return ROW_BYTES * 8 // BLOCK_SCALED[ab_dtype].bits


def stage_bytes(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool, ab_dtype: str) -> tuple[int, int, int]:
    """Return the bytes of one stage: of A with its scale factors, of B, and of the scale factors of B.

    A pair of blocks shares out the rows of A with their scale factors, and the columns of B; each of the two
    needs the scale factors of all columns.
    """
    columns, scales = mma_tiler_mn[1] // blocks_per_mma(use_2cta_instrs), scales_per_row(ab_dtype)
    return MMA_ROWS * (ROW_BYTES + scales), columns * ROW_BYTES, scale_rows(mma_tiler_mn[1]) * scales


def scale_columns(rows: int, ab_dtype: str) -> int:
    """Return the columns of tensor memory that the scale factors of a k tile take: 4 bytes of 32 rows each.

    Source: PTX ISA, tcgen05 scale factor layouts; the compiler's layouts agree for every kernel compiled.
    """
    return rows // SCALE_LANES * (scales_per_row(ab_dtype) // SCALE_BLOCKS)


def tmem_use(mma_tiler_mn: tuple[int, int], ab_dtype: str, arch: Arch) -> tuple[int, int]:
    """Return accumulator stages and columns of tensor memory in use: two tiles unless one must do."""
    scales = scale_columns(MMA_ROWS + scale_rows(mma_tiler_mn[1]), ab_dtype)
    stages = 2 if 2 * mma_tiler_mn[1] + scales <= arch.tmem_columns else 1
    return stages, stages * mma_tiler_mn[1] + scales


def neighbouring_columns(config: Config, problem: Problem) -> int:
    """Return how many neighbouring elements of a row of D a thread holds and may move at once."""
    if config.flag("swap_ab") or problem.unaligned_out:
        return 1
    return 16 // DTYPE_BYTES[problem.out_dtype]


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def nothing_but_alpha_is_fused(problem: Problem) -> bool:
    """Behind the GEMM there is alpha and no more: beta, bias, activation and per-tensor scales are not
    written for block-scaled operands (a per-tensor scale of nvfp4 goes into alpha)."""
    return problem.epilogue in (Epilogue(), Epilogue(alpha=True))


def rows_fit_the_instruction(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> bool:
    """The MMA has 128 rows in each thread block (PTX ISA, tcgen05.mma block-scaled kinds): M=256 needs
    use_2cta_instrs and M=128 forbids it."""
    return mma_tiler_mn[0] == blocks_per_mma(use_2cta_instrs) * MMA_ROWS


def scale_factors_are_counted_in_32_bits(problem: Problem) -> bool:
    """The scale factors of all batches of an operand are one array, whose length and strides have 32 bits."""
    return max(problem.scale_factors) * problem.batch < 2**31


RULES = tuple(
    Rule.of(function)
    for function in (
        nothing_but_alpha_is_fused,
        rows_fit_the_instruction,
        pairs_lie_along_m,
        tma_store_needs_aligned_output,
        swap_ab_is_for_narrow_m,
        cluster_is_no_larger_than_problem,
        tile_counts_fit_32_bits,
        scale_factors_are_counted_in_32_bits,
    )
)


# --- what follows from a config ---


def derive(config: Config, problem: Problem, arch: Arch) -> dict[str, Value]:
    """Return stages, barrier arrivals, tensor memory, threads and exact shared memory (bytes) of a config."""
    tiler, pair = config.pair("mma_tiler_mn"), config.flag("use_2cta_instrs")
    scaling = BLOCK_SCALED[problem.ab_dtype]
    of_a, of_b, of_scales = stage_bytes(tiler, pair, problem.ab_dtype)
    buffer_bytes = MMA_ROWS * EPI_COLUMNS * DTYPE_BYTES[problem.out_dtype]
    per_buffer = buffer_bytes if config.flag("use_tma_store") else 0
    acc_stages, columns = tmem_use(tiler, problem.ab_dtype, arch)
    return {
        **derive_resources(config, arch, of_a + of_b + of_scales, per_buffer, WARPS),
        "bytes_a": of_a,
        "bytes_scales": of_scales,
        "acc_stages": acc_stages,
        "element": scaling.element,
        "scale": scaling.scale,
        "block": scaling.block,
        "tile_k": tile_k(problem.ab_dtype),
        "scale_rows": scale_rows(tiler[1]),
        "sfa_columns": scale_columns(MMA_ROWS, problem.ab_dtype),
        "sfb_columns": scale_columns(scale_rows(tiler[1]), problem.ab_dtype),
        "tmem_columns": tmem_allocation(columns),
        "epi_n": EPI_COLUMNS,
        "vector": neighbouring_columns(config, problem),
    }


def launch(config: Config, problem: Problem, sm_count: int) -> Launch:
    """Return clusters, swizzle_size and raster_along_m; there is no workspace."""
    cluster = config.pair("cluster_shape_mn")
    return Launch((clusters_at_once(sm_count, cluster[0] * cluster[1]), *tile_order(config)), 0)


def choose_default(space: Space, problem: Problem) -> Config:
    """Return a safe config that fits the shape: pairs with wide tiles if there are enough of them."""
    swap = problem.m <= 64 and problem.n > problem.m
    tiler, pair = (128, 64 if (problem.m if swap else problem.n) <= 64 else 128), False
    tiles_m, tiles_n = tile_counts(block_tile((256, 192), True), swap, problem)
    busy = tiles_m * tiles_n * problem.batch * 10 >= space.arch.nominal_sm_count * 8
    if not swap and tiles_m > 1 and busy:
        tiler, pair = (256, 192), True
    return Config(
        {
            "mma_tiler_mn": tiler,
            "use_2cta_instrs": pair,
            "cluster_shape_mn": (2, 1) if pair else (1, 1),
            "swap_ab": swap,
            "use_tma_store": not problem.unaligned_out,
            "use_pdl": False,
            "swizzle_size": 8 if pair else 1,
            "raster_along_m": True,
        }
    )


def build_space(arch: Arch) -> Space:
    """Return the space of block-scaled Blackwell GEMMs bound to ``arch``."""
    return Space(
        family="gemm_blockscaled",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=launch,
        compile_view=compile_view,
        run_time_knobs=RUN_TIME_KNOBS & DOMAINS.keys(),
    )
