"""Which kernels of NVIDIA's CUTLASS Operator API can be launched as GEMM candidates, and what for.

What the API offers is asked of the API itself (``cutegen/operator_api``); this table says what cutegen has an
adapter for. The kernels take A, B, D and a number of clusters, and compute plain GEMMs. Knobs are called
as in cutegen's own spaces; what the API fixes (rasterization, k per tile, stages) is no knob.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cutegen.arch import Arch, resident_clusters
from cutegen.dtypes import DTYPE_BYTES, TORCH_DTYPES
from cutegen.families.gemm.problem import LAYOUTS, Epilogue, Problem
from cutegen.space import Config, Launch, Rule, Space, Value

from .blackwell import pairs_lie_along_m
from .shared import sizes_round_up_below_2_to_31
from .sm100 import rows_fit_the_instruction

HOPPER: Mapping[str, tuple[Value, ...]] = {
    "source": ("operators",),
    "operator": ("Sm90StaticPersistentGemmOperator",),
    "tile_shape_mn": tuple((m, n) for m in (128, 64) for n in (256, 128, 64)),
    "cluster_shape_mn": ((1, 1), (2, 1), (1, 2), (2, 2)),
}
"""Source: nvidia-cutlass-operators 0.3.0, as listed by its manifest for sm_90a."""
BLACKWELL: Mapping[str, tuple[Value, ...]] = {
    "source": ("operators",),
    "operator": ("PersistentDenseGemmOperator",),
    "mma_tiler_mn": tuple((m, n) for m in (128, 256, 64) for n in (256, 128, 64, 32)),
    "use_2cta_instrs": (False, True),
    "cluster_shape_mn": tuple(
        (blocks // n, n) for blocks in (1, 2, 4, 8, 16) for n in (1, 2, 4, 8, 16) if n <= blocks
    ),
    "use_tma_store": (True,),
    "tile_scheduler": ("static", "clc"),
}
"""Source: nvidia-cutlass-operators 0.3.0, as listed by its manifest for sm_100a. ``static`` deals the tiles
out before the launch, ``clc`` as clusters ask for them (cluster launch control)."""


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def product_is_plain(problem: Problem) -> bool:
    """The operators fuse nothing: alpha, beta, bias, activation and scales are for cutegen's own kernels."""
    return problem.epilogue == Epilogue()


def operands_are_tensors(problem: Problem) -> bool:
    """The Operator API is asked with torch tensors, and torch has no tf32; fp32 would be another GEMM."""
    return problem.ab_dtype in TORCH_DTYPES


def output_rows_are_aligned(problem: Problem) -> bool:
    """The operators store D by TMA, which needs rows that start at multiples of 16 bytes."""
    return not problem.unaligned_out


def sums_are_not_promoted(problem: Problem) -> bool:
    """The operators leave fp8 accumulators in the tensor cores; promote is for cutegen's own kernels."""
    return not problem.promote


def bytes_lie_along_k(problem: Problem) -> bool:
    """MMA instructions on operands of 8 bits read them along k (PTX ISA, wgmma): layout must be kk."""
    return DTYPE_BYTES[problem.ab_dtype] > 1 or LAYOUTS[problem.layout] == ("k", "k")


def integer_sums_stay_exact(problem: Problem) -> bool:
    """The operators store int8 GEMMs as int32 or fp32, in no 16-bit type."""
    return problem.ab_dtype != "int8" or DTYPE_BYTES[problem.out_dtype] == 4


PROBLEM_RULES: tuple[Callable[..., bool], ...] = (
    sizes_round_up_below_2_to_31,
    product_is_plain,
    operands_are_tensors,
    output_rows_are_aligned,
    sums_are_not_promoted,
    bytes_lie_along_k,
    integer_sums_stay_exact,
)


def launch(config: Config, problem: Problem, sm_count: int) -> Launch:
    """Return the number of clusters that run at once; the operators take no workspace."""
    cluster = config.pair("cluster_shape_mn")
    return Launch((resident_clusters(sm_count, cluster[0] * cluster[1]),), 0)


def derive(config: Config, problem: Problem, arch: Arch) -> dict[str, Value]:
    """Return nothing: stages, threads and shared memory are the operator's own affair."""
    return {}


def choose_default(space: Space, problem: Problem) -> Config:
    """Return the first legal config; without a measurement cutegen's own default is used."""
    return next(space.configs(problem))


def build_space(arch: Arch) -> Space:
    """Return the space of operators that can be launched on ``arch``."""
    hopper = arch.family == "sm90"
    of_pairs: tuple[Callable[..., bool], ...] = (rows_fit_the_instruction, pairs_lie_along_m)
    rules = PROBLEM_RULES if hopper else (*PROBLEM_RULES, *of_pairs)
    return Space(
        family="gemm",
        arch=arch,
        domains=HOPPER if hopper else BLACKWELL,
        rules=tuple(Rule.of(rule) for rule in rules),
        derive=derive,
        choose_default=choose_default,
        launch=launch,
        compile_view=lambda config: config,
    )
