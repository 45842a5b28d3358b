"""Grouped fp8 GEMM whose blocks of 128 have fp32 factors, as ``grouped_gemm`` and ``gemm_blocks``.

``out[r] = (scale_a * a)[r] @ (scale_b * b)[i].T`` for rows ``r`` of group ``i``. Every 128 elements of a row
of ``a`` have a factor, those of one place in k side by side in memory, and every 128 x 128 elements of each
matrix of ``b``; k and n are whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.declared import DeclaredProblem, integers, read, update
from cutegen.families.gemm.problem import FACTOR_BLOCK
from cutegen.families.grouped_gemm.family import (
    GROUPED_GEMM,
    TOKENS,
    GroupedFamily,
    count_bytes,
    count_flops,
)
from cutegen.families.grouped_gemm.groups import KnownRanges, Range, grouped_products, spread
from cutegen.family import Baseline, Inputs, Option, Size, Tensors
from cutegen.strategy import Strategy

__all__ = ["GROUPED_GEMM_BLOCKS", "GroupedBlocksFamily"]

#: Sizes of the problems on which candidates are checked besides their own, as those of ``grouped_gemm``.
_TAILS = ((333, 384, 256, 5), (1000, 1152, 384, 3), (4001, 2176, 128, 4), (9001, 2176, 128, 2))
#: cuBLAS takes factors of a multiple of this many rows, and of blocks of k (torch 2.11, on an H200).
_ROWS_OF_CUBLAS, _BLOCKS_OF_CUBLAS = 4, 4


class GroupedBlocksFamily(GroupedFamily):
    """A grouped GEMM of operands whose blocks have factors."""

    def tails(self, problem: DeclaredProblem) -> Sequence[DeclaredProblem]:
        """Return small problems with empty groups and sizes that fit no tile."""
        return [problem.with_sizes(m=m, n=n, k=k, g=g) for m, n, k, g in _TAILS]

    def strategy(self, arch: Arch, algorithm: str = "") -> Strategy | None:
        """Return the model of one such GEMM, asked about one of as many tiles."""
        from cutegen.families.grouped_gemm_blocks.strategy import GroupedBlocksStrategy

        return GroupedBlocksStrategy.of(arch)

    def baselines(self, problem: DeclaredProblem, inputs: Inputs, outputs: Tensors) -> Mapping[str, Baseline]:
        """Return a loop of cuBLAS's GEMM where it has one, or of one GEMM for each block of k.

        The host is told the rows of each group.
        """
        if problem.out == "bf16" and problem.k % (_BLOCKS_OF_CUBLAS * FACTOR_BLOCK) == 0:
            return {"loop of torch._scaled_mm": _Loop()}
        return {"loop of torch.mm for each block": _ByBlocks()}


class _ByBlocks:
    """One GEMM for each group and block of k, added up in fp32."""

    def __init__(self) -> None:
        self._ranges = KnownRanges()

    def __call__(self, inputs: Inputs, outputs: Tensors) -> None:
        from cutegen.families.gemm.stand_in import factored_product

        tensors, out = inputs.tensors, outputs["out"]
        for group, _, first, end in self._ranges.of(tensors):
            of_rows, of_matrix = tensors["scale_a"][:, first:end].mT, tensors["scale_b"][group].mT
            product = factored_product(tensors["a"][first:end], tensors["b"][group].mT, of_rows, of_matrix)
            out[first:end].copy_(product)


class _Group(NamedTuple):
    """What cuBLAS takes for a group; ``rows`` are rounded up as it wants, ``end`` is where they end."""

    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    first: int
    end: int
    rows: int


class _Loop:
    """One GEMM for each group. Factors are laid out once for each set of inputs, not while it is timed.

    What is behind a group's rows is overwritten by the next group's.
    """

    def __init__(self) -> None:
        self._ranges = KnownRanges()
        self._known: dict[int, list[_Group]] = {}

    def __call__(self, inputs: Inputs, outputs: Tensors) -> None:
        import torch

        plain: Any = torch.ops.aten._scaled_mm.out
        out = outputs["out"]
        groups = self._groups(inputs.tensors)
        for a, b, scale_a, scale_b, first, end, rows in groups:
            inside = first + rows <= groups[-1].end
            target = out[first : first + rows] if inside else out.new_empty((rows, out.shape[1]))
            plain(a, b, scale_a, scale_b, out_dtype=out.dtype, out=target)
            if not inside:
                out[first:end].copy_(target[: end - first])

    def _groups(self, tensors: Tensors) -> list[_Group]:
        """Return what cuBLAS takes, known or not; what is made for a CUDA graph belongs to that alone."""
        import torch

        key = tensors["a"].data_ptr()
        if key in self._known:
            return self._known[key]
        made = _of_groups(tensors, self._ranges.of(tensors))
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._known[key] = made
        return made


def _of_groups(tensors: Tensors, ranges: Sequence[Range]) -> list[_Group]:
    """Return what cuBLAS takes for each group."""
    import torch

    pad = torch.nn.functional.pad
    found: list[_Group] = []
    for group, _, first, end in ranges:
        rows = -(-(end - first) // _ROWS_OF_CUBLAS) * _ROWS_OF_CUBLAS
        behind = min(first + rows, ranges[-1].end)
        missing = first + rows - behind
        a, scale_a = tensors["a"][first:behind], tensors["scale_a"][:, first:behind]
        if missing:
            a = pad(a.view(torch.uint8), (0, 0, 0, missing)).view(a.dtype)
            scale_a = pad(scale_a, (0, missing), value=1.0)
        scale_b = tensors["scale_b"][group].contiguous()
        found.append(_Group(a, tensors["b"][group].mT, scale_a.contiguous().mT, scale_b.mT, first, end, rows))
    return found


def _bytes(problem: DeclaredProblem) -> int:
    """Those of rows and matrices, with their factors."""
    blocks_k, blocks_n = problem.k // FACTOR_BLOCK, problem.n // FACTOR_BLOCK
    of_row = problem.k + 4 * blocks_k + problem.n * DTYPE_BYTES[str(problem.out)]
    of_matrix = problem.n * problem.k + 4 * blocks_n * blocks_k
    return count_bytes(problem, of_row, of_matrix)


GROUPED_GEMM_BLOCKS = GroupedBlocksFamily(
    "grouped_gemm_blocks",
    "one fp8 GEMM for each group, rows sorted by group, with blockwise fp32 scales",
    sizes=(
        Size("m", "rows of all groups"),
        Size("n", "columns of out, a multiple of 128"),
        Size("k", "columns of a, a multiple of 128"),
        Size("g", "groups"),
    ),
    options=(
        Option("dtype", "of a and b", ("e4m3",), "e4m3"),
        Option("out", "of the result", ("bf16", "fp16", "fp32"), "bf16"),
        TOKENS,
    ),
    arguments=(
        read("a", "dtype", ("m", "k"), aligned=True),
        read("b", "dtype", ("g", "n", "k"), aligned=True),
        read("scale_a", "fp32", (f"k/{FACTOR_BLOCK}", "m"), anywhere=True),
        read("scale_b", "fp32", ("g", f"n/{FACTOR_BLOCK}", f"k/{FACTOR_BLOCK}"), anywhere=True),
        read("offs", "int32", ("g",)),
        update("out", "out", ("m", "n")),
        integers(),
    ),
    reference=grouped_products,
    adjust=spread,
    flops=count_flops,
    min_bytes=_bytes,
    repeat="idempotent",
    knobs=GROUPED_GEMM.knobs,
    examples=(
        "32768x6144x7168x4 e4m3",
        "32768x4096x2048x8 e4m3 tokens=zipf",
        "65536x1536x2048x128 e4m3",
        "4096x1536x2048x128 e4m3 out=fp16",
        "512x768x2048x128 e4m3 tokens=zipf",
        "64x4096x4096x8 e4m3",
        "300x1024x256x5 e4m3 out=fp32",
    ),
)
