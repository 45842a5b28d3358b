"""Which block-scaled Blackwell GEMM configs exist, which are legal, and what follows from each of them.

``mma_tiler_mn`` is the tile of one MMA as the kernel sees it: with ``use_2cta_instrs`` two thread blocks
share it, half of its rows each; with ``swap_ab`` its first number runs along n of the problem and its
second along m. Kernels of this space were compiled and inspected, never run by us.

Scale factors lie in device memory as cuBLAS takes them: tiles of 128 rows and 4 blocks along k, 512 bytes
each, those of the same rows side by side; inside a tile row r has its 4 bytes at r % 32 * 16 + r // 32 * 4.
They go to shared memory by TMA and from there to tensor memory, where the MMA reads them. Source: cuBLAS
documentation, 1D block scaling factors layout.
"""

from __future__ import annotations

from collections.abc import Mapping

from cutegen.arch import Arch
from cutegen.problem import (
    BLOCK_SCALED,
    DTYPE_BYTES,
    SCALE_BLOCKS,
    SCALE_ROWS,
    Epilogue,
    Problem,
)
from cutegen.space import Config, Launch, Rule, Space, Value

ROW_BYTES = 128
"""Bytes of a tile along k: the span of the shared-memory swizzle, hence the k extent of a tile."""
MMA_ROWS = 128
"""Rows of the MMA in each thread block. Source: PTX ISA, tcgen05.mma block-scaled kinds with cta_group::1;
with cta_group::2 64 would do as well, but its scale factors would fill half a tile of theirs."""
STORING_WARPS = 4
THREADS = 32 * (STORING_WARPS + 2)
"""Four warps that store, one that multiplies, one that loads."""
BARRIER_BYTES = 1024
"""Shared memory before the first tile: mbarriers and the address of tensor memory, padded to the 1024
bytes that swizzled tiles align to."""
MAX_STAGES = 32
"""A stage has two 8-byte mbarriers, which live in those 1024 bytes."""
SCALE_LANES = 32
"""Rows of tensor memory that hold scale factors, copied to all four quarters. Source: PTX ISA, tcgen05
scale factor layouts."""
MIN_TMEM_COLUMNS = 32
"""Source: PTX ISA, tcgen05.alloc."""
EPI_COLUMNS = 32
"""Columns that leave tensor memory at once: 32 sums for each of 128 threads."""
MAX_STORE_BUFFERS = 4
MOST_SHARERS = 4
"""Blocks of a cluster that each load a part of the same 512 bytes of scale factors: TMA writes to multiples
of 128 bytes of shared memory (PTX ISA, tensor copies)."""
GPC = 18
"""Multiprocessors that one cluster can be placed on. Source: assumed, from Hopper; to be measured."""

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
RUN_TIME_KNOBS = frozenset({"swizzle_size", "raster_along_m"})


def _pair(value: Value) -> tuple[int, int]:
    assert isinstance(value, tuple)
    return value[0], value[1]


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
    columns, scales = mma_tiler_mn[1] // (2 if use_2cta_instrs else 1), scales_per_row(ab_dtype)
    return MMA_ROWS * (ROW_BYTES + scales), columns * ROW_BYTES, scale_rows(mma_tiler_mn[1]) * scales


# Arrivals are counted here only; who arrives and who waits is told at the top of the template.


def empty_arrivals(use_2cta_instrs: bool, cluster_shape_mn: tuple[int, int]) -> int:
    """Return the arrivals that free a stage: one for each pair of blocks (or lone block) that reads it.

    Those are the ones in the same row and in the same column of the cluster, which share its tiles.
    """
    return cluster_shape_mn[0] // (2 if use_2cta_instrs else 1) + cluster_shape_mn[1] - 1


def acc_arrivals(use_2cta_instrs: bool) -> int:
    """Return the arrivals that free a tile of sums: one for each storing warp, of both blocks of a pair."""
    return STORING_WARPS * (2 if use_2cta_instrs else 1)


def scale_columns(rows: int, ab_dtype: str) -> int:
    """Return the columns of tensor memory that the scale factors of a k tile take: 4 bytes of 32 rows each.

    Source: PTX ISA, tcgen05 scale factor layouts; the compiler's layouts agree for every kernel compiled.
    """
    return rows // SCALE_LANES * (scales_per_row(ab_dtype) // SCALE_BLOCKS)


def tmem_use(mma_tiler_mn: tuple[int, int], ab_dtype: str, arch: Arch) -> tuple[int, int]:
    """Return stages of sums and columns of tensor memory in use: two tiles of sums unless one must do."""
    scales = scale_columns(MMA_ROWS + scale_rows(mma_tiler_mn[1]), ab_dtype)
    stages = 2 if 2 * mma_tiler_mn[1] + scales <= arch.tmem_columns else 1
    return stages, stages * mma_tiler_mn[1] + scales


def neighbouring_columns(config: Config, problem: Problem) -> int:
    """Return how many neighbouring elements of a row of D a thread holds and may move at once."""
    if config["swap_ab"] or problem.unaligned_out:
        return 1
    return 16 // DTYPE_BYTES[problem.out_dtype]


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def nothing_but_alpha_is_fused(problem: Problem) -> bool:
    """Behind the product there is alpha and no more: beta, bias, activation and per-tensor scales are not
    written for block-scaled operands (a per-tensor scale of nvfp4 goes into alpha)."""
    return problem.epilogue in (Epilogue(), Epilogue(alpha=True))


def rows_fit_the_instruction(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> bool:
    """The MMA has 128 rows in each thread block (PTX ISA, tcgen05.mma block-scaled kinds): M=256 needs
    use_2cta_instrs and M=128 forbids it."""
    return mma_tiler_mn[0] == (2 if use_2cta_instrs else 1) * MMA_ROWS


def pairs_lie_along_m(use_2cta_instrs: bool, cluster_shape_mn: tuple[int, int]) -> bool:
    """use_2cta_instrs joins two blocks that lie next to each other along m of their cluster, so
    cluster_shape_mn must be even along m."""
    return not use_2cta_instrs or cluster_shape_mn[0] % 2 == 0


def tma_store_needs_aligned_output(use_tma_store: bool, problem: Problem) -> bool:
    """A TMA store needs rows of D that start at multiples of 16 bytes: n * sizeof(out) and the pitch of D
    must be multiples of 16; use_tma_store=false takes any n."""
    return not (use_tma_store and problem.unaligned_out)


def swap_ab_is_for_narrow_m(swap_ab: bool, problem: Problem) -> bool:
    """swap_ab puts m on the finely divisible side of the MMA; with m above 512 the plain order does the
    same work with better stores."""
    return not swap_ab or problem.m <= 512


def cluster_is_no_larger_than_problem(
    mma_tiler_mn: tuple[int, int],
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    problem: Problem,
) -> bool:
    """A cluster must not be more than twice as tall or wide as D, since blocks outside D only wait."""
    tiles = _tiles(mma_tiler_mn, swap_ab, problem)
    return all(c == 1 or c < 2 * t for c, t in zip(cluster_shape_mn, tiles, strict=True))


def tile_counts_fit_32_bits(
    mma_tiler_mn: tuple[int, int],
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    problem: Problem,
) -> bool:
    """Work units are numbered with 32-bit integers."""
    tiles = _tiles(mma_tiler_mn, swap_ab, problem)
    along_m, along_n = (-(-t // c) * c for t, c in zip(tiles, cluster_shape_mn, strict=True))
    return along_m * along_n * problem.batch < 2**30


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


def _tiles(mma_tiler_mn: tuple[int, int], swap_ab: bool, problem: Problem) -> tuple[int, int]:
    """Return the tiles of single thread blocks along m and n of the kernel."""
    m, n = (problem.n, problem.m) if swap_ab else (problem.m, problem.n)
    return -(-m // MMA_ROWS), -(-n // mma_tiler_mn[1])


# --- what follows from a config ---


def clusters_at_once(sm_count: int, blocks: int) -> int:
    """Return how many clusters of ``blocks`` thread blocks run at once, one block per multiprocessor.

    Source: assumed; clusters larger than pairs stay inside a GPC and leave its remainder idle. A persistent
    kernel with one cluster too many would run it alone, after all others, so this is a careful guess.
    """
    if blocks <= 2:
        return max(1, sm_count // blocks)
    return max(1, sm_count // GPC * (GPC // blocks))


def derive(config: Config, problem: Problem, arch: Arch) -> dict[str, Value]:
    """Return stages, barrier arrivals, tensor memory, threads and exact shared memory (bytes) of a config."""
    tiler, pair = _pair(config["mma_tiler_mn"]), bool(config["use_2cta_instrs"])
    scaling = BLOCK_SCALED[problem.ab_dtype]
    of_a, of_b, of_scales = stage_bytes(tiler, pair, problem.ab_dtype)
    per_stage = of_a + of_b + of_scales
    per_buffer = MMA_ROWS * EPI_COLUMNS * DTYPE_BYTES[problem.out_dtype] if config["use_tma_store"] else 0
    free = arch.smem_bytes - BARRIER_BYTES
    stages = min((free - 2 * per_buffer) // per_stage, MAX_STAGES)
    buffers = 2
    while (
        per_buffer and buffers < MAX_STORE_BUFFERS and (buffers + 1) * per_buffer + stages * per_stage <= free
    ):
        buffers += 1
    acc_stages, columns = tmem_use(tiler, problem.ab_dtype, arch)
    return {
        "stages": stages,
        "stage_bytes": per_stage,
        "bytes_a": of_a,
        "bytes_scales": of_scales,
        "expected_bytes": per_stage * (2 if pair else 1),
        "empty_arrivals": empty_arrivals(pair, _pair(config["cluster_shape_mn"])),
        "acc_stages": acc_stages,
        "acc_arrivals": acc_arrivals(pair),
        "element": scaling.element,
        "scale": scaling.scale,
        "block": scaling.block,
        "tile_k": tile_k(problem.ab_dtype),
        "scale_rows": scale_rows(tiler[1]),
        "sfa_columns": scale_columns(MMA_ROWS, problem.ab_dtype),
        "sfb_columns": scale_columns(scale_rows(tiler[1]), problem.ab_dtype),
        "tmem_columns": max(MIN_TMEM_COLUMNS, 1 << (columns - 1).bit_length()),
        "epi_n": EPI_COLUMNS,
        "epi_stages": buffers,
        "vector": neighbouring_columns(config, problem),
        "smem_bytes": BARRIER_BYTES + stages * per_stage + buffers * per_buffer,
        "threads": THREADS,
        "max_registers": min(arch.registers_per_thread, arch.registers // THREADS // 8 * 8),
    }


def compile_view(config: Config) -> Config:
    """Return what is compiled in: run-time knobs fall away."""
    return Config({knob: value for knob, value in config.items() if knob not in RUN_TIME_KNOBS})


def launch(config: Config, problem: Problem, sm_count: int) -> Launch:
    """Return clusters, swizzle_size and raster_along_m; there is no workspace."""
    cluster = _pair(config["cluster_shape_mn"])
    clusters = clusters_at_once(sm_count, cluster[0] * cluster[1])
    return Launch((clusters, int(str(config["swizzle_size"])), int(bool(config["raster_along_m"]))), 0)


def choose_default(space: Space, problem: Problem) -> Config:
    """Return a safe config that fits the shape: pairs with wide tiles if there are enough of them."""
    swap = problem.m <= 64 and problem.n > problem.m
    tiler, pair = (128, 64 if (problem.m if swap else problem.n) <= 64 else 128), False
    tiles_m, tiles_n = _tiles((256, 192), swap, problem)
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
        run_time_knobs=RUN_TIME_KNOBS,
    )
