"""Which Blackwell GEMM configs exist, which are legal, and what follows from each of them.

``mma_tiler_mn`` is the tile of one MMA as the kernel sees it: with ``use_2cta_instrs`` two thread blocks
share it, half of its rows each; with ``swap_ab`` its first number runs along n of the problem and its
second along m. Kernels of this space were compiled and inspected, never run by us.

``promote`` asks for nothing more here: sums of fp8 products stay in tensor memory, where users of a B200 saw
25 bits of fraction (DeepGEMM issue 176), against the 13 for which Hopper's are promoted.
"""

from __future__ import annotations

from collections.abc import Mapping

from cutegen.arch import Arch
from cutegen.problem import DTYPE_BYTES, LAYOUTS, Problem
from cutegen.space import Config, Launch, Rule, Space, Value, extents_round_up_below_2_to_31

ROW_BYTES = 128
"""Bytes of a tile along k: the span of the shared-memory swizzle, hence the k extent of a tile."""
STORING_WARPS = 4
WARPS = STORING_WARPS + 2
"""Four that store, one that multiplies, one that loads: they take part in every work unit."""
BARRIER_BYTES = 1024
"""Shared memory before the first tile: mbarriers and the address of tensor memory, padded to the 1024
bytes that swizzled tiles align to."""
MAX_STAGES = 32
"""A stage has two 8-byte mbarriers, which live in those 1024 bytes."""
ANSWERS = 1
"""Answers of cluster launch control under way: each further one would claim work that an idle
multiprocessor could begin at once."""
ACC_STAGES = 2
"""Tiles of sums in tensor memory: one is stored while the next is computed."""
MIN_TMEM_COLUMNS = 32
"""Source: PTX ISA, tcgen05.alloc."""
LONE_HALF = 64
"""Rows of the smallest MMA, whose sums are read from tensor memory as pairs of columns."""
REDUCED = 8
"""Sums that one thread of the second kernel of split_k finishes."""
ADDERS = 4
"""Groups of 128 threads of its blocks, each adding up a quarter of the parts."""
WORKSPACE_LIMIT_BYTES = 256 * 2**20
PIECE = 4096
"""Elements that leave tensor memory at once: 32 for each of 128 threads."""
MAX_STORE_BUFFERS = 4
GPC = 18
"""Multiprocessors that one cluster can be placed on. Source: assumed, from Hopper; to be measured."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "mma_tiler_mn": tuple(
        (m, n) for m in (128, 256, 64) for n in range(16, 257, 8) if n % {64: 8, 128: 16, 256: 32}[m] == 0
    ),
    "use_2cta_instrs": (False, True),
    "cluster_shape_mn": tuple(
        (blocks // n, n) for blocks in (1, 2, 4, 8, 16) for n in (1, 2, 4, 8, 16) if n <= blocks
    ),
    "swap_ab": (False, True),
    "use_tma_store": (True, False),
    "use_clc": (False, True),
    "use_pdl": (False, True),
    "split_k": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32),
    "swizzle_size": (1, 2, 4, 8),
    "raster_along_m": (False, True),
}
RUN_TIME_KNOBS = frozenset({"split_k", "swizzle_size", "raster_along_m"})


def _pair(value: Value) -> tuple[int, int]:
    assert isinstance(value, tuple)
    return value[0], value[1]


def block_rows(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the rows of the tile that one thread block stores."""
    return mma_tiler_mn[0] // (2 if use_2cta_instrs else 1)


def stage_bytes(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the shared memory of one stage of tiles in bytes; a pair shares out the rows of B as well."""
    blocks = 2 if use_2cta_instrs else 1
    return sum(mma_tiler_mn) // blocks * ROW_BYTES


# Arrivals are counted here only; who arrives and who waits is told at the top of the template.


def empty_arrivals(use_2cta_instrs: bool, cluster_shape_mn: tuple[int, int]) -> int:
    """Return the arrivals that free a stage: one for each pair of blocks (or lone block) that reads it.

    Those are the ones in the same row and in the same column of the cluster, which share its tiles.
    """
    return cluster_shape_mn[0] // (2 if use_2cta_instrs else 1) + cluster_shape_mn[1] - 1


def acc_arrivals(use_2cta_instrs: bool) -> int:
    """Return the arrivals that free a tile of sums: one for each storing warp, of both blocks of a pair."""
    return STORING_WARPS * (2 if use_2cta_instrs else 1)


def answer_arrivals(cluster_shape_mn: tuple[int, int]) -> int:
    """Return the arrivals that free an answer of cluster launch control at the cluster's first block.

    One for each warp of every block that takes part in work units, and one for the warp that asks.
    """
    return WARPS * cluster_shape_mn[0] * cluster_shape_mn[1] + 1


def epilogue_columns(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the columns that leave tensor memory at once: the most that divide the tile evenly."""
    columns = PIECE // block_rows(mma_tiler_mn, use_2cta_instrs)
    while mma_tiler_mn[1] % columns:
        columns //= 2
    return columns


def tmem_columns(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the columns of tensor memory to allocate: a power of two, at least 32.

    A column of sums fills the 128 lanes of one; with 64 rows per block two share it, the other tile's of a
    lone block, the other half's of a pair (PTX ISA, tcgen05 data path layouts).
    """
    shared = 128 // block_rows(mma_tiler_mn, use_2cta_instrs)
    used = ACC_STAGES * mma_tiler_mn[1] // shared
    return int(max(MIN_TMEM_COLUMNS, 1 << (used - 1).bit_length()))


def neighbouring_columns(config: Config, problem: Problem) -> int:
    """Return how many neighbouring elements of a row of D a thread holds and may move at once."""
    if config["swap_ab"] or problem.unaligned_out:
        return 1
    width = DTYPE_BYTES[problem.out_dtype]
    if _pair(config["mma_tiler_mn"])[0] > LONE_HALF:
        return 16 // width
    return 1 if config["use_tma_store"] and width == 4 else 2


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def arch_multiplies_the_dtype(problem: Problem, arch: Arch) -> bool:
    """sm_103a has no MMA of int8 (PTX ISA, tcgen05.mma kind::i8); sm_100a and sm_90a have one."""
    return problem.ab_dtype != "int8" or arch.name != "sm_103a"


def rows_fit_the_instruction(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> bool:
    """The MMA of one thread block has 64 or 128 rows, that of two has 128 or 256 (PTX ISA, tcgen05.mma):
    M=256 needs use_2cta_instrs and M=64 forbids it."""
    return mma_tiler_mn[0] in ((128, 256) if use_2cta_instrs else (64, 128))


def int8_tiles_have_widths_of_the_mma(mma_tiler_mn: tuple[int, int], problem: Problem) -> bool:
    """The int8 MMA has up to 32 columns in steps of 8, above that in steps of 16 (PTX ISA, tcgen05.mma
    kind::i8), so N must too."""
    return problem.ab_dtype != "int8" or mma_tiler_mn[1] <= 32 or mma_tiler_mn[1] % 16 == 0


def pairs_split_columns_evenly(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> bool:
    """With use_2cta_instrs each block holds half of the tile's columns of B, which must be a multiple of
    16: N must be a multiple of 32 (the compiler dies on other multiples of 16)."""
    return not use_2cta_instrs or mma_tiler_mn[1] % 32 == 0


def tf32_columns_fill_swizzle_rows(
    mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool, swap_ab: bool, problem: Problem
) -> bool:
    """Where k is not the contiguous extent of tf32 values, the MMA reads them in rows of 128 swizzled bytes
    only (PTX ISA, tcgen05 shared memory layouts): each block needs a multiple of 32 columns of such a B."""
    axis = LAYOUTS[problem.layout][0 if swap_ab else 1]
    if problem.ab_dtype != "tf32" or axis == "k":
        return True
    return mma_tiler_mn[1] // (2 if use_2cta_instrs else 1) % 32 == 0


def pairs_lie_along_m(use_2cta_instrs: bool, cluster_shape_mn: tuple[int, int]) -> bool:
    """use_2cta_instrs joins two blocks that lie next to each other along m of their cluster, so
    cluster_shape_mn must be even along m."""
    return not use_2cta_instrs or cluster_shape_mn[0] % 2 == 0


def shares_of_b_are_whole_rows(mma_tiler_mn: tuple[int, int], cluster_shape_mn: tuple[int, int]) -> bool:
    """The blocks along m of a cluster load an equal share each of their tiles of B. Shares must be whole rows
    and begin at multiples of 128 bytes of shared memory (PTX ISA, tensor copies), so N must be a multiple
    of cluster_shape_mn along m."""
    return mma_tiler_mn[1] % cluster_shape_mn[0] == 0


def tma_store_needs_aligned_output(use_tma_store: bool, problem: Problem) -> bool:
    """A TMA store needs rows of D that start at multiples of 16 bytes: n * sizeof(out) and the pitch of D
    must be multiples of 16; use_tma_store=false takes any n."""
    return not (use_tma_store and problem.unaligned_out)


def split_k_leaves_work(split_k: int, problem: Problem) -> bool:
    """Every part of a split k range needs at least 4 k tiles of 128 bytes, or its sums cost more than its
    products."""
    return split_k == 1 or split_k * 4 * ROW_BYTES <= problem.k * DTYPE_BYTES[problem.ab_dtype]


def split_k_stores_partial_sums(use_tma_store: bool, split_k: int) -> bool:
    """With split_k > 1 the second kernel writes D from registers, so use_tma_store must be false."""
    return split_k == 1 or not use_tma_store


def split_k_is_for_few_tiles(
    mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool, swap_ab: bool, split_k: int, problem: Problem
) -> bool:
    """split_k makes up for missing tiles; above 1024 of them every multiprocessor is busy anyway."""
    tiles_m, tiles_n = _tiles(mma_tiler_mn, use_2cta_instrs, swap_ab, problem)
    return split_k == 1 or tiles_m * tiles_n * problem.batch <= 1024


def split_k_workspace_is_bounded(
    mma_tiler_mn: tuple[int, int],
    use_2cta_instrs: bool,
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    split_k: int,
    problem: Problem,
) -> bool:
    """The fp32 partial sums of all parts together may take at most 256 MiB."""
    if split_k == 1:
        return True
    blocks = _blocks(mma_tiler_mn, use_2cta_instrs, cluster_shape_mn, swap_ab, problem)
    return split_k * blocks * _sums_bytes(mma_tiler_mn, use_2cta_instrs) <= WORKSPACE_LIMIT_BYTES


def swap_ab_is_for_narrow_m(swap_ab: bool, problem: Problem) -> bool:
    """swap_ab puts m on the finely divisible side of the MMA; with m above 512 the plain order does the
    same work with better stores."""
    return not swap_ab or problem.m <= 512


def cluster_is_no_larger_than_problem(
    mma_tiler_mn: tuple[int, int],
    use_2cta_instrs: bool,
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    problem: Problem,
) -> bool:
    """A cluster must not be more than twice as tall or wide as D, since blocks outside D only wait."""
    tiles = _tiles(mma_tiler_mn, use_2cta_instrs, swap_ab, problem)
    return all(c == 1 or c < 2 * t for c, t in zip(cluster_shape_mn, tiles, strict=True))


def tile_counts_fit_32_bits(
    mma_tiler_mn: tuple[int, int],
    use_2cta_instrs: bool,
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    problem: Problem,
) -> bool:
    """Work units are numbered with 32-bit integers; with use_clc each is a cluster of the grid."""
    return _blocks(mma_tiler_mn, use_2cta_instrs, cluster_shape_mn, swap_ab, problem) < 2**30


RULES = tuple(
    Rule.of(function)
    for function in (
        extents_round_up_below_2_to_31,
        arch_multiplies_the_dtype,
        rows_fit_the_instruction,
        int8_tiles_have_widths_of_the_mma,
        pairs_split_columns_evenly,
        tf32_columns_fill_swizzle_rows,
        pairs_lie_along_m,
        shares_of_b_are_whole_rows,
        tma_store_needs_aligned_output,
        swap_ab_is_for_narrow_m,
        split_k_leaves_work,
        split_k_stores_partial_sums,
        split_k_is_for_few_tiles,
        split_k_workspace_is_bounded,
        cluster_is_no_larger_than_problem,
        tile_counts_fit_32_bits,
    )
)


def _tiles(
    mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool, swap_ab: bool, problem: Problem
) -> tuple[int, int]:
    """Return the tiles of single thread blocks along m and n of the kernel."""
    m, n = (problem.n, problem.m) if swap_ab else (problem.m, problem.n)
    return -(-m // block_rows(mma_tiler_mn, use_2cta_instrs)), -(-n // mma_tiler_mn[1])


def _blocks(
    mma_tiler_mn: tuple[int, int],
    use_2cta_instrs: bool,
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    problem: Problem,
) -> int:
    """Return the tiles of all batches, rounded up to whole clusters."""
    tiles = _tiles(mma_tiler_mn, use_2cta_instrs, swap_ab, problem)
    along_m, along_n = (-(-t // c) * c for t, c in zip(tiles, cluster_shape_mn, strict=True))
    return along_m * along_n * problem.batch


def _sums_bytes(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the bytes of one thread block's sums of one tile."""
    return block_rows(mma_tiler_mn, use_2cta_instrs) * mma_tiler_mn[1] * 4


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
    split = config["split_k"] != 1
    columns = epilogue_columns(tiler, pair)
    fragment = block_rows(tiler, pair) * columns // (32 * STORING_WARPS)
    per_stage = stage_bytes(tiler, pair)
    per_buffer = 0
    if config["use_tma_store"]:
        per_buffer = block_rows(tiler, pair) * columns * DTYPE_BYTES[problem.out_dtype]
    free = arch.smem_bytes - BARRIER_BYTES
    stages = min((free - 2 * per_buffer) // per_stage, MAX_STAGES)
    buffers = 2
    while (
        per_buffer and buffers < MAX_STORE_BUFFERS and (buffers + 1) * per_buffer + stages * per_stage <= free
    ):
        buffers += 1
    clc, cluster = bool(config["use_clc"]), _pair(config["cluster_shape_mn"])
    threads = 32 * (WARPS + (1 if clc else 0))
    return {
        "stages": stages,
        "stage_bytes": per_stage,
        "expected_bytes": per_stage * (2 if pair else 1),
        "empty_arrivals": empty_arrivals(pair, cluster),
        "acc_stages": ACC_STAGES,
        "acc_arrivals": acc_arrivals(pair),
        "answers": ANSWERS if clc else 0,
        "answer_arrivals": answer_arrivals(cluster) if clc else 0,
        "split": split,
        "tile_k": ROW_BYTES // DTYPE_BYTES[problem.ab_dtype],
        "tmem_columns": tmem_columns(tiler, pair),
        "epi_n": columns,
        "epi_stages": buffers,
        "reduced": min(REDUCED, fragment),
        "adders": ADDERS,
        "vector": neighbouring_columns(config, problem),
        "smem_bytes": BARRIER_BYTES + stages * per_stage + buffers * per_buffer,
        "threads": threads,
        "max_registers": min(arch.registers_per_thread, arch.registers // threads // 8 * 8),
    }


def compile_view(config: Config) -> Config:
    """Return what is compiled in: run-time knobs fall away, split_k stays as one of two kinds of kernel."""
    kept = {knob: value for knob, value in config.items() if knob not in RUN_TIME_KNOBS}
    return Config({**kept, "split_k": 1 if config["split_k"] == 1 else 2})


def launch(config: Config, problem: Problem, sm_count: int) -> Launch:
    """Return clusters (unless the hardware hands out work), swizzle_size, raster_along_m (and split_k if it
    is not 1), and the workspace."""
    tiler, pair = _pair(config["mma_tiler_mn"]), bool(config["use_2cta_instrs"])
    cluster, split_k = _pair(config["cluster_shape_mn"]), int(str(config["split_k"]))
    scalars = [int(str(config["swizzle_size"])), int(bool(config["raster_along_m"]))]
    if not config["use_clc"]:
        scalars.insert(0, clusters_at_once(sm_count, cluster[0] * cluster[1]))
    if split_k == 1:
        return Launch(tuple(scalars), 0)
    blocks = _blocks(tiler, pair, cluster, bool(config["swap_ab"]), problem)
    return Launch((*scalars, split_k), split_k * blocks * _sums_bytes(tiler, pair))


def choose_default(space: Space, problem: Problem) -> Config:
    """Return a safe config that fits the shape: pairs with wide tiles if there are enough of them."""
    sm_count = space.arch.nominal_sm_count
    swap = problem.m <= 64 and problem.n > problem.m
    n = problem.m if swap else problem.n
    narrow = 32 if problem.ab_dtype == "tf32" else 16
    tiler, pair = (128, 64 if n > 32 else 32 if n > 16 else narrow), False
    for wide, two in (((256, 256), True), ((256, 128), True), ((128, 128), False)):
        tiles_m, tiles_n = _tiles(wide, two, swap, problem)
        if not swap and tiles_m * tiles_n * problem.batch * 10 >= sm_count * 8 and (tiles_m > 1 or not two):
            tiler, pair = wide, two
            break
    return Config(
        {
            "mma_tiler_mn": tiler,
            "use_2cta_instrs": pair,
            "cluster_shape_mn": (2, 1) if pair else (1, 1),
            "swap_ab": swap,
            "use_tma_store": not problem.unaligned_out,
            "use_clc": False,
            "use_pdl": False,
            "split_k": 1,
            "swizzle_size": 8 if pair else 1,
            "raster_along_m": True,
        }
    )


def build_space(arch: Arch) -> Space:
    """Return the space of Blackwell GEMMs bound to ``arch``."""
    return Space(
        family="gemm",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=launch,
        compile_view=compile_view,
        run_time_knobs=RUN_TIME_KNOBS,
    )
