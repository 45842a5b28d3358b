"""Which Blackwell GEMM configs exist, which are legal, and what follows from each of them.

``mma_tiler_mn`` is the tile of one MMA as the kernel sees it: with ``use_2cta_instrs`` two thread blocks
share it, half of its rows each; with ``swap_ab`` its first number runs along n of the problem and its
second along m. Kernels of this space were compiled and inspected, but are untested on hardware.

``promote`` asks for nothing more here: fp8 accumulators stay in tensor memory, where users of a B200 saw
25 bits of fraction (DeepGEMM issue 176), against the 13 for which Hopper's are promoted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.problem import LAYOUTS, Problem
from cutegen.space import Config, Launch, Rule, Space, Value

from .blackwell import (
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
from .shared import (
    RUN_TIME_KNOBS,
    WORKSPACE_LIMIT_BYTES,
    compile_view,
    padded_blocks,
    sizes_round_up_below_2_to_31,
    split_k_stores_partial_sums,
    swap_ab_is_for_narrow_m,
    tile_counts,
    tile_order,
    tma_store_needs_aligned_output,
)

WARPS = EPILOGUE_WARPS + 2
"""Four epilogue warps, an MMA warp, a load warp: they take part in every work unit."""
CLC_RESPONSES = 1
"""Responses of cluster launch control under way: each further one would claim work that an idle
multiprocessor could begin at once."""
ACC_STAGES = 2
"""Accumulator tiles in tensor memory: one is stored while the next is computed."""
LONE_HALF = 64
"""Rows of the smallest MMA, whose accumulators are read from tensor memory as pairs of columns."""
REDUCED = 8
"""Accumulators that one thread of the second kernel of split_k finishes."""
ADDERS = 4
"""Groups of 128 threads of its blocks, each adding up a quarter of the parts."""
PIECE = 4096
"""Elements that leave tensor memory at once: 32 for each of 128 threads."""

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

#: Tile, whether two blocks share it, cluster, kind. Source: of 1900 kernels these, added one by one, leave
#: the best of them the least behind the best of all by the model, over 160 sizes (m from 1 to 8192): 0.9 % in
#: the geometric mean. Nothing was measured.
DEFAULT_CANDIDATES = (
    ((256, 256), True, (2, 1), ""),
    ((256, 224), True, (2, 1), ""),
    ((256, 160), True, (2, 1), ""),
    ((256, 128), True, (2, 2), ""),
    ((128, 64), True, (2, 2), ""),
    ((128, 32), True, (2, 2), ""),
    ((64, 16), False, (1, 1), "swapped"),
    ((128, 32), True, (2, 2), "swapped"),
    ((128, 32), True, (4, 1), "swapped"),
    ((128, 64), True, (2, 1), "swapped"),
    ((256, 64), True, (2, 2), "swapped"),
    ((256, 96), True, (2, 2), "swapped"),
    ((256, 96), True, (4, 1), "swapped"),
    ((256, 192), True, (2, 1), "swapped"),
    ((256, 192), True, (2, 2), "swapped"),
    ((256, 128), True, (2, 2), "split"),
    ((64, 16), False, (1, 1), "swapped split"),
    ((128, 32), True, (4, 1), "swapped split"),
    ((128, 64), True, (4, 1), "swapped split"),
    ((256, 96), True, (2, 2), "swapped split"),
)


def stage_bytes(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the shared memory of one stage of tiles in bytes; a pair shares out the rows of B as well."""
    return sum(mma_tiler_mn) // blocks_per_mma(use_2cta_instrs) * ROW_BYTES


def answer_arrivals(cluster_shape_mn: tuple[int, int]) -> int:
    """Return the arrivals that free an answer of cluster launch control at the cluster's first block.

    One for each warp of every block that takes part in work units, and one for the warp that asks.
    """
    return WARPS * cluster_shape_mn[0] * cluster_shape_mn[1] + 1


def epilogue_columns(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the columns that leave tensor memory at once: the most that divide the tile evenly."""
    columns = PIECE // block_tile(mma_tiler_mn, use_2cta_instrs)[0]
    while mma_tiler_mn[1] % columns:
        columns //= 2
    return columns


def tmem_columns(mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool) -> int:
    """Return the columns of tensor memory to allocate.

    A column of accumulators fills the 128 lanes of one; with 64 rows per block two share it, the other tile's
    of a lone block, the other half's of a pair (PTX ISA, tcgen05 data path layouts).
    """
    rows, columns = block_tile(mma_tiler_mn, use_2cta_instrs)
    return tmem_allocation(ACC_STAGES * columns // (128 // rows))


def neighbouring_columns(config: Config, problem: Problem) -> int:
    """Return how many neighbouring elements of a row of D a thread holds and may move at once."""
    if config.flag("swap_ab") or problem.unaligned_out:
        return 1
    width = DTYPE_BYTES[problem.out_dtype]
    if config.pair("mma_tiler_mn")[0] > LONE_HALF:
        return 16 // width
    return 1 if config.flag("use_tma_store") and width == 4 else 2


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
    16: N must be a multiple of 32 (the compiler crashes on other multiples of 16)."""
    return not use_2cta_instrs or mma_tiler_mn[1] % 32 == 0


def tf32_columns_fill_swizzle_rows(
    mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool, swap_ab: bool, problem: Problem
) -> bool:
    """Where k is not the contiguous size of tf32 values, the MMA reads them in rows of 128 swizzled bytes
    only (PTX ISA, tcgen05 shared memory layouts): each block needs a multiple of 32 columns of such a B."""
    axis = LAYOUTS[problem.layout][0 if swap_ab else 1]
    if problem.ab_dtype != "tf32" or axis == "k":
        return True
    return mma_tiler_mn[1] // (2 if use_2cta_instrs else 1) % 32 == 0


def shares_of_b_are_whole_rows(mma_tiler_mn: tuple[int, int], cluster_shape_mn: tuple[int, int]) -> bool:
    """The blocks along m of a cluster load an equal share each of their tiles of B. Shares must be whole rows
    and begin at multiples of 128 bytes of shared memory (PTX ISA, tensor copies), so N must be a multiple
    of cluster_shape_mn along m."""
    return mma_tiler_mn[1] % cluster_shape_mn[0] == 0


def split_k_leaves_work(split_k: int, problem: Problem) -> bool:
    """Every part of a split k range needs at least 4 k tiles of 128 bytes, or adding its partial sums
    costs more than its MMAs."""
    return split_k == 1 or split_k * 4 * ROW_BYTES <= problem.k * DTYPE_BYTES[problem.ab_dtype]


def split_k_is_for_few_tiles(
    mma_tiler_mn: tuple[int, int], use_2cta_instrs: bool, swap_ab: bool, split_k: int, problem: Problem
) -> bool:
    """split_k makes up for missing tiles; above 1024 of them every multiprocessor is busy anyway."""
    tiles_m, tiles_n = tile_counts(block_tile(mma_tiler_mn, use_2cta_instrs), swap_ab, problem)
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
    tile = block_tile(mma_tiler_mn, use_2cta_instrs)
    needed = _workspace_bytes(tile, cluster_shape_mn, swap_ab, split_k, problem)
    return split_k == 1 or needed <= WORKSPACE_LIMIT_BYTES


RULES = tuple(
    Rule.of(function)
    for function in (
        sizes_round_up_below_2_to_31,
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


def _workspace_bytes(
    tile: tuple[int, int], cluster_shape_mn: tuple[int, int], swap_ab: bool, split_k: int, problem: Problem
) -> int:
    """Return the bytes of the fp32 partial sums of all parts."""
    return split_k * padded_blocks(tile, cluster_shape_mn, swap_ab, problem) * tile[0] * tile[1] * 4


# --- what follows from a config ---


def derive(config: Config, problem: Problem, arch: Arch) -> dict[str, Value]:
    """Return stages, barrier arrivals, tensor memory, threads and exact shared memory (bytes) of a config."""
    tiler, pair, clc = config.pair("mma_tiler_mn"), config.flag("use_2cta_instrs"), config.flag("use_clc")
    columns = epilogue_columns(tiler, pair)
    elements = block_tile(tiler, pair)[0] * columns
    per_buffer = elements * DTYPE_BYTES[problem.out_dtype] if config.flag("use_tma_store") else 0
    return {
        **derive_resources(config, arch, stage_bytes(tiler, pair), per_buffer, WARPS + clc),
        "acc_stages": ACC_STAGES,
        "answers": CLC_RESPONSES if clc else 0,
        "answer_arrivals": answer_arrivals(config.pair("cluster_shape_mn")) if clc else 0,
        "split": config["split_k"] != 1,
        "tile_k": ROW_BYTES // DTYPE_BYTES[problem.ab_dtype],
        "tmem_columns": tmem_columns(tiler, pair),
        "epi_n": columns,
        "reduced": min(REDUCED, elements // (32 * EPILOGUE_WARPS)),
        "adders": ADDERS,
        "vector": neighbouring_columns(config, problem),
    }


def launch(config: Config, problem: Problem, sm_count: int) -> Launch:
    """Return clusters (unless the hardware hands out work), swizzle_size, raster_along_m (and split_k if it
    is not 1), and the workspace."""
    cluster, split_k = config.pair("cluster_shape_mn"), config.integer("split_k")
    clusters = () if config.flag("use_clc") else (clusters_at_once(sm_count, cluster[0] * cluster[1]),)
    scalars = (*clusters, *tile_order(config))
    if split_k == 1:
        return Launch(scalars, 0)
    tile = block_tile(config.pair("mma_tiler_mn"), config.flag("use_2cta_instrs"))
    needed = _workspace_bytes(tile, cluster, config.flag("swap_ab"), split_k, problem)
    return Launch((*scalars, split_k), needed)


def choose_default(space: Space, problem: Problem) -> Config:
    """Return a safe config that fits the shape: pairs with wide tiles if there are enough of them."""
    sm_count = space.arch.nominal_sm_count
    swap = problem.m <= 64 and problem.n > problem.m
    n = problem.m if swap else problem.n
    narrow = 32 if problem.ab_dtype == "tf32" else 16
    tiler, pair = (128, 64 if n > 32 else 32 if n > 16 else narrow), False
    for wide, two in (((256, 256), True), ((256, 128), True), ((128, 128), False)):
        tiles_m, tiles_n = tile_counts(block_tile(wide, two), swap, problem)
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


def default_candidates(problem: Problem) -> Iterator[dict[str, Value]]:
    """Yield what is chosen from before anybody measured; the rest of each is the default's."""
    for tiler, pair, cluster, kind in DEFAULT_CANDIDATES:
        yield {
            "mma_tiler_mn": tiler,
            "use_2cta_instrs": pair,
            "cluster_shape_mn": cluster,
            "swap_ab": "swapped" in kind,
            "use_tma_store": not problem.unaligned_out and "split" not in kind,
            "split_k": 2 if "split" in kind else 1,
        }


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
        default_candidates=default_candidates,
    )
