"""Which Hopper GEMMs exist whose clusters split k, which are legal, and what follows from each of them.

Where tiles are few, blocks that share one, each with a part of k, keep more multiprocessors busy with tiles
that are large. Large tiles multiply more per byte of shared memory that they load and read. Partial sums stay
on the chip: a block writes them to the shared memory of those that finish them.

``tile_shape_mn`` is the tile as the kernel sees it, as for the general algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from cutegen.arch import Arch, resident_clusters
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Launch, Rule, Space, Value

from . import sm90
from .hopper_resources import SLAB, accumulators, epilogue_columns, stage_bytes
from .shared import padded_blocks, sizes_round_up_below_2_to_31, tma_store_needs_aligned_output

ALGORITHM = "cluster_split"
MIN_K_TILES = 4
"""K tiles that a block must have, or filling its pipeline and adding up take longer than its MMAs."""
LARGEST_TILE = 256 * 200
"""Elements of D in the largest tile whose sums two warpgroups hold."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "algorithm": (ALGORITHM,),
    "tile_shape_mn": tuple((m, n) for m in (128, 64, 192, 256) for n in range(16, 257, 8)),
    "tile_k": (64, 128),
    "cluster_shape_mn": ((1, 1), (2, 1), (1, 2)),
    "cluster_k": (2, 3, 4),
    "mma_warpgroups": (2, 1, 3),
    "swap_ab": (False, True),
    "use_tma_store": (True, False),
    "use_pdl": (False, True),
}


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def cluster_split_is_for_hopper(arch: Arch) -> bool:
    """The kernel's MMAs are those of sm_90a."""
    return arch.family == "sm90"


def product_has_few_tiles(problem: Problem, arch: Arch) -> bool:
    """cluster_k makes up for missing tiles; where there is one of the largest, of 256 x 200, for every
    multiprocessor, none are missing."""
    return problem.m * problem.n * problem.batch < LARGEST_TILE * arch.nominal_sm_count


def operands_have_16_bits(problem: Problem) -> bool:
    """Blocks exchange fp32 sums, and nothing but bf16 and fp16 was tried."""
    return problem.ab_dtype in ("bf16", "fp16")


def single_stores_leave_registers(
    tile_shape_mn: tuple[int, int], mma_warpgroups: int, swap_ab: bool, use_tma_store: bool, problem: Problem
) -> bool:
    """Without a TMA store, swap_ab or an unaligned D makes every element a store of its own, whose address
    takes registers: a thread may then hold at most 176 accumulators."""
    if use_tma_store or not (swap_ab or problem.unaligned_out):
        return True
    return accumulators(tile_shape_mn, mma_warpgroups) <= 176


def stages_fit_shared_memory(
    tile_shape_mn: tuple[int, int],
    tile_k: int,
    mma_warpgroups: int,
    use_tma_store: bool,
    problem: Problem,
    arch: Arch,
) -> bool:
    """At least 3 stages of (tile_m + tile_n) * tile_k elements and two store buffers per warpgroup must
    fit the shared memory of a thread block, or loads cannot run ahead of the tensor cores."""
    return sm90.stages_fit_shared_memory(
        tile_shape_mn, tile_k, mma_warpgroups, False, use_tma_store, problem, arch
    )


def sums_fit_the_stages(
    tile_shape_mn: tuple[int, int],
    tile_k: int,
    cluster_shape_mn: tuple[int, int],
    cluster_k: int,
    mma_warpgroups: int,
    swap_ab: bool,
    use_tma_store: bool,
    problem: Problem,
    arch: Arch,
) -> bool:
    """What other blocks send of the sums takes the place of the stages: cluster_k - 1 times a block's share
    of tile_m * tile_n * 4 bytes must fit there."""
    config = Config(
        {
            "tile_shape_mn": tile_shape_mn,
            "tile_k": tile_k,
            "cluster_shape_mn": cluster_shape_mn,
            "cluster_k": cluster_k,
            "mma_warpgroups": mma_warpgroups,
            "swap_ab": swap_ab,
            "use_tma_store": use_tma_store,
        }
    )
    stages = derive(config, problem, arch)["stages"]
    assert isinstance(stages, int)
    return sums_bytes(config, problem) <= stages * stage_bytes(tile_shape_mn, tile_k, problem)


def cluster_is_portable(cluster_shape_mn: tuple[int, int], cluster_k: int, arch: Arch) -> bool:
    """A cluster of more than 8 thread blocks is not portable."""
    return prod(cluster_shape_mn) * cluster_k <= arch.portable_cluster


def parts_leave_work(tile_k: int, cluster_k: int, problem: Problem) -> bool:
    """Every block needs at least 4 k tiles, or adding partial sums costs more than its MMAs."""
    return cluster_k * MIN_K_TILES * tile_k <= problem.k


def tiles_are_few(
    tile_shape_mn: tuple[int, int],
    cluster_shape_mn: tuple[int, int],
    cluster_k: int,
    swap_ab: bool,
    problem: Problem,
    arch: Arch,
) -> bool:
    """There may be twice as many clusters as run at once, no more: cluster_k makes up for missing tiles, and
    the next tile of a block waits for the exchange of the one before."""
    cluster = prod(cluster_shape_mn)
    clusters = padded_blocks(tile_shape_mn, cluster_shape_mn, swap_ab, problem) // cluster
    return clusters <= 2 * resident_clusters(arch.nominal_sm_count, cluster * cluster_k)


RULES = tuple(
    Rule.of(function)
    for function in (
        cluster_split_is_for_hopper,
        sizes_round_up_below_2_to_31,
        operands_have_16_bits,
        product_has_few_tiles,
        sm90.warpgroups_divide_tile,
        sm90.tile_k_is_one_or_two_swizzle_rows,
        sm90.accumulators_fit_registers,
        single_stores_leave_registers,
        stages_fit_shared_memory,
        sm90.wide_k_is_for_small_tiles,
        tma_store_needs_aligned_output,
        cluster_is_portable,
        sm90.cluster_is_no_larger_than_problem,
        parts_leave_work,
        tiles_are_few,
        sums_fit_the_stages,
    )
)


# --- what follows from a config ---


def sums_bytes(config: Config, problem: Problem) -> int:
    """Return the shared memory that takes what other blocks send of the sums."""
    tile, parts = config.pair("tile_shape_mn"), config.integer("cluster_k")
    warpgroups = config.integer("mma_warpgroups")
    staged = config.flag("use_tma_store")
    singles = not staged and (config.flag("swap_ab") or problem.unaligned_out)
    columns, tail = epilogue_columns(tile[1], staged, singles)
    pieces = tile[0] // (SLAB * warpgroups) * (tile[1] // columns + (tail > 0))
    return -(-pieces // parts) * (parts - 1) * warpgroups * SLAB * columns * 4


def derive(config: Config, problem: Problem, arch: Arch) -> dict[str, Value]:
    """Return what follows for a kernel of the general algorithm that does not split k, too."""
    alike = {knob: config[knob] for knob in sm90.DOMAINS if knob in config}
    return sm90.derive(Config({**alike, "pingpong": False, "split_k": 1}), problem, arch)


def launch(config: Config, problem: Problem, sm_count: int) -> Launch:
    """Return clusters, and the order that has blocks of the same weights run at the same time."""
    blocks = prod(config.pair("cluster_shape_mn")) * config.integer("cluster_k")
    return Launch((resident_clusters(sm_count, blocks), 1, int(not config.flag("swap_ab"))), 0)


def default_candidates(problem: Problem) -> Iterator[dict[str, Value]]:
    """Yield nothing: before anything was measured the general algorithm answers."""
    return iter(())


def choose_default(space: Space, problem: Problem) -> Config:
    """Return the first legal config."""
    return next(space.configs(problem))


def build_space(arch: Arch) -> Space:
    """Return the space of kernels whose clusters split k, bound to ``arch``."""
    return Space(
        family="gemm",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=launch,
        compile_view=lambda config: config,
        default_candidates=default_candidates,
    )
