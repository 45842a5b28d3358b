"""The model of fp8 GEMMs with factors of blocks, asked about one that has the tiles of a grouped one."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.strategy import GemmStrategy
from cutegen.families.gemm.problem import BLOCKS_FAMILY, MAX_SIZE, Problem
from cutegen.families.grouped_gemm.batched_gemm import batched_gemm
from cutegen.families.grouped_gemm.strategy import GroupedStrategy
from cutegen.families.registry import find_space
from cutegen.space import Config, Space

__all__ = ["GroupedBlocksStrategy", "side_by_side"]

#: Tiles that three warpgroups share take so much longer than the GEMM's model says. Source: seven shapes on
#: an H200 (``docs/results/grouped_gemm_blocks.json``), where they took 2 to 8 % longer, others 3 % at most.
_SHARED_BY_THREE = 1.05


def side_by_side(problem: DeclaredProblem) -> Problem:
    """Return the GEMM of the rows of one group with the matrices of all groups side by side.

    Groups that have rows, that is. It has as many tiles, cut off alike along rows, and reads as much of b;
    there are no batches of such GEMMs.
    """
    one = batched_gemm(problem)
    wide = min(one.n * one.batch, MAX_SIZE)
    return Problem(
        one.m,
        wide,
        one.k,
        1,
        one.ab_dtype,
        one.out_dtype,
        unaligned_out=one.unaligned_out,
        family=BLOCKS_FAMILY,
    )


class GroupedBlocksStrategy(GroupedStrategy):
    """Chooses configs of grouped GEMMs with factors of blocks by predicted time."""

    @classmethod
    def of(cls, arch: Arch) -> GroupedBlocksStrategy | None:
        """Return the strategy for ``arch``; None where the model's constants are not known."""
        gemm = GemmStrategy.of(arch)
        return None if gemm is None else cls(gemm, side_by_side)

    def asked_space(self, space: Space, problem: DeclaredProblem) -> Space:
        """Return the space of one such GEMM."""
        return find_space(BLOCKS_FAMILY, space.arch)

    def slower(self, config: Config, problem: DeclaredProblem) -> float:
        """Return what a prediction of the GEMM's model is multiplied by."""
        shared = _SHARED_BY_THREE if config["mma_warpgroups"] == 3 else 1.0
        return super().slower(config, problem) * shared
