"""The families of the package, in the order in which they are listed."""

from __future__ import annotations

from cutegen.family import Family

__all__ = ["shipped_families"]


def shipped_families() -> tuple[Family, ...]:
    """Return the families, which are imported now: some of them ask the registry for others."""
    from cutegen.families.activation.family import ACTIVATION, ACTIVATION_BACKWARD
    from cutegen.families.cross_entropy.family import CROSS_ENTROPY
    from cutegen.families.gated.family import GATED, GATED_BACKWARD
    from cutegen.families.gated_gemm.family import GATED_GEMM
    from cutegen.families.gemm.family import BLOCK_SCALED_GEMM, BLOCKS_GEMM, GEMM
    from cutegen.families.grouped_gated_gemm.family import GROUPED_GATED_GEMM, GROUPED_GATED_GEMM_MASKED
    from cutegen.families.grouped_gemm.family import GROUPED_GEMM, GROUPED_GEMM_MASKED
    from cutegen.families.grouped_gemm_blocks.family import GROUPED_GEMM_BLOCKS
    from cutegen.families.layernorm.family import LAYERNORM
    from cutegen.families.rmsnorm.family import RMSNORM
    from cutegen.families.rmsnorm_quantized.family import RMSNORM_QUANTIZED
    from cutegen.families.rope.family import ROPE
    from cutegen.families.softmax.family import SOFTMAX

    rows = (RMSNORM, RMSNORM_QUANTIZED, LAYERNORM, SOFTMAX, CROSS_ENTROPY)
    gated_groups = (GROUPED_GATED_GEMM, GROUPED_GATED_GEMM_MASKED)
    grouped = (GROUPED_GEMM, GROUPED_GEMM_MASKED, *gated_groups, GROUPED_GEMM_BLOCKS)
    gemms = (GEMM, BLOCK_SCALED_GEMM, BLOCKS_GEMM, GATED_GEMM)
    return *gemms, *grouped, *rows, GATED, GATED_BACKWARD, ACTIVATION, ACTIVATION_BACKWARD, ROPE
