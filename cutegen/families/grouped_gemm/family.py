"""Grouped GEMM as declared families: ``out[rows of group i] = a[rows of group i] @ b[i].T``.

How many rows each group has is known on the device only. In ``grouped_gemm`` the groups' rows follow one
another in one matrix, and ``offs`` says where each ends, as in ``torch._grouped_mm``; in
``grouped_gemm_masked`` every group has a matrix, whose first ``counts`` rows are its own. Rows of no group
are neither read nor written, so the output counts as updated in place.

Which config is fast depends on how rows spread over the groups, so a problem declares it: ``tokens`` and,
where no size says it, ``mean``. Kernels are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.declared import Declared, DeclaredFamily, DeclaredProblem, integers, read, update
from cutegen.families.gemm.knobs import KNOBS
from cutegen.families.grouped_gemm.as_gemm import ALL, MASKED, RANGES, as_gemm, gemm_of, mean_rows
from cutegen.family import Baseline, Chunk, Inputs, Option, Size, StandIn, Strategy, Tensors
from cutegen.space import Config, Value

if TYPE_CHECKING:
    import torch

__all__ = ["GROUPED_GEMM", "GROUPED_GEMM_MASKED", "MEANS", "SPREADS", "GroupedFamily"]

#: How tokens choose their group: at random, each equally likely; or with a probability of 1 / rank.
SPREADS = ("uniform", "zipf")
#: Rows of a group in the mean, in steps of at most a quarter from 4 on.
MEANS = (1, 2, 3, *(part << step for step in range(12) for part in (4, 5, 6, 7)))
#: Elements of the reference of all groups together; more are sampled.
_REFERENCE_ELEMENTS = 2**26
#: Sizes of the problems on which candidates are checked besides their own: rows, or rows of each group in the
#: masked form, then n, k and groups. Larger ones are for larger clusters.
_TAILS = ((333, 392, 200, 5), (1000, 1192, 264, 3), (4001, 2232, 136, 4), (9001, 2232, 136, 2))


def _spread_rows(problem: DeclaredProblem, awkward: bool) -> list[int]:
    """Return the rows of each group in inputs of ``problem``, the same ones every time.

    Awkward ones leave the first group empty and some rows to none, and one group has half of them.
    """
    import torch

    groups, most = int(problem.g), int(problem.m)
    masked = problem.family == MASKED
    rows = mean_rows(problem) * groups if masked else most
    odds = torch.ones(groups) if problem.tokens == "uniform" else 1 / torch.arange(1, groups + 1)
    if awkward:
        odds = torch.linspace(0, 1, groups + 1)[1:] ** 4
        odds[: groups // 3] = 0.0
        rows -= rows // 7
    generator = torch.Generator().manual_seed(groups)
    odds = odds[torch.randperm(groups, generator=generator)]
    chosen = torch.multinomial(odds, rows, replacement=True, generator=generator)
    counts = [int(count) for count in torch.bincount(chosen, minlength=groups)]
    return [min(count, most) for count in counts] if masked else counts


def _adjust(problem: DeclaredProblem, tensors: Mapping[str, Any], awkward: bool) -> None:
    """Spread rows over the groups; where inputs are to be awkward, rows of no group are NaN."""
    import torch

    counts, a = torch.tensor(_spread_rows(problem, awkward), dtype=torch.int32), tensors["a"]
    if "counts" in tensors:
        tensors["counts"].copy_(counts)
    else:
        tensors["offs"].copy_(counts.cumsum(0))
    if awkward:
        for index, first, end in _unused(tensors):
            a[index, first:end, :] = math.nan


def _ranges(tensors: Mapping[str, Any]) -> Iterator[tuple[int, Any, int, int]]:
    """Yield each group's number, the index of its rows' matrix in ``a``, and its first and last row."""
    if "counts" in tensors:
        for group, count in enumerate(tensors["counts"].tolist()):
            yield group, group, 0, count
    else:
        first = 0
        for group, end in enumerate(tensors["offs"].tolist()):
            yield group, ..., first, end
            first = end


def _unused(tensors: Mapping[str, Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield index, first and last of the rows of no group."""
    a, end = tensors["a"], 0
    for _, index, _, end in _ranges(tensors):
        if index is not ...:
            yield index, end, a.shape[1]
    if a.dim() == 2:
        yield ..., end, a.shape[0]


def _reference(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    offs: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the output without reading counts on the host: slow, as each matrix multiplies all rows."""
    import torch

    rows = torch.arange(a.shape[-2], device=a.device)
    found = out
    for group, matrix in enumerate(b):
        if counts is not None:
            found = found.clone() if found is out else found
            product = a[group] @ matrix.mT
            found[group] = torch.where((rows < counts[group])[:, None], product, out[group])
        elif offs is not None:
            inside = rows < offs[group]
            if group:
                inside &= rows >= offs[group - 1]
            found = torch.where(inside[:, None], a @ matrix.mT, found)
    return {"out": found}


class _GroupedReference:
    """Each group as a GEMM of its own, and the rows of no group, which stay what they were."""

    def __init__(self, problem: DeclaredProblem, inputs: Inputs) -> None:
        from cutegen.families.gemm.reference import GemmReference

        tensors = inputs.tensors
        self._before = tensors["out"]
        self._unused = [(index, low, high) for index, low, high in _unused(tensors) if low < high]
        self._groups = [
            (
                index,
                first,
                end,
                GemmReference(
                    gemm_of(problem, end - first, 1),
                    tensors["a"][index, first:end, :],
                    tensors["b"][group].mT,
                    full_elements=_REFERENCE_ELEMENTS // int(problem.g),
                ),
            )
            for group, index, first, end in _ranges(tensors)
            if first < end
        ]

    def compared(self, output: str) -> float:
        """Return the smallest fraction of a group that is compared."""
        return min((reference.compared(output) for *_, reference in self._groups), default=1.0)

    def chunks(self, output: str, got: torch.Tensor) -> Iterator[Chunk]:
        """Yield some rows of groups beside what they should be, then the rows of no group."""
        for index, first, end, reference in self._groups:
            for chunk in reference.chunks(output, got[index, first:end, :]):
                yield replace(chunk, place=_placed(index, first, chunk))
        for index, low, high in self._unused:
            want = self._before[index, low:high, :].double()
            chunk = Chunk(got[index, low:high, :].double(), want, want.new_zeros(want.shape), tuple)
            yield replace(chunk, place=_placed(index, low, chunk))


def _placed(index: Any, first: int, chunk: Chunk) -> Any:
    where = () if index is ... else (index,)
    inner = chunk.place

    def place(at: tuple[int, ...]) -> tuple[int, ...]:
        row, column = inner(at)
        return (*where, row + first, column)

    return place


class GroupedFamily(DeclaredFamily):
    """A grouped GEMM."""

    metric = "TFLOP/s"

    def kin(self, problem: DeclaredProblem) -> Hashable:
        """Return the signature without how tokens spread: an entry for one answers for the other."""
        signature = problem.signature
        return replace(signature, options=tuple(o for o in signature.options if o[0] != "tokens"))

    def is_plain(self, problem: DeclaredProblem) -> bool:
        """Return whether groups are about equal."""
        return str(problem.tokens) == SPREADS[0]

    def tails(self, problem: DeclaredProblem) -> Sequence[DeclaredProblem]:
        """Return small problems with empty groups and sizes that fit no tile."""
        odd = problem.unaligned and self.is_odd(problem)
        return [problem.with_sizes(m=m, n=n - 1 if odd else n, k=k, g=g) for m, n, k, g in _TAILS]

    def render_values(
        self, problem: DeclaredProblem, config: Config, derived: Mapping[str, Value], arch: Arch
    ) -> Mapping[str, Any]:
        """Return the signature of the GEMM whose template this one's extends."""
        return {"as_gemm": as_gemm(problem.with_sizes(g=2)).signature}

    def reference(self, problem: DeclaredProblem, inputs: Inputs) -> _GroupedReference:  # type: ignore[override]
        """Return the product of each group in fp64, with the error bound of a GEMM."""
        return _GroupedReference(problem, inputs)

    def stand_in(self, problem: DeclaredProblem) -> StandIn:
        """Return torch's products, of all rows with every group's matrix."""

        def compute(inputs: Inputs, outputs: Tensors) -> None:
            outputs["out"].copy_(_reference(**{**inputs.tensors, **outputs})["out"])

        return compute

    def baselines(self, problem: DeclaredProblem, inputs: Inputs, outputs: Tensors) -> Mapping[str, Baseline]:
        """Return torch's grouped product, and a product for each group, whose rows the host is told."""
        import torch

        known: list[tuple[int, Any, int, int]] = []

        def loop(inputs: Inputs, outputs: Tensors) -> None:
            a, b, out = inputs.tensors["a"], inputs.tensors["b"], outputs["out"]
            if not known:  # all inputs of a problem have the same; what is timed does not wait for them
                known.extend(group for group in _ranges(inputs.tensors) if group[2] < group[3])
            for group, index, first, end in known:
                torch.mm(a[index, first:end, :], b[group].mT, out=out[index, first:end, :])

        def grouped(inputs: Inputs, outputs: Tensors) -> Tensors:
            a, b, offs = (inputs.tensors[name] for name in ("a", "b", "offs"))
            return {"out": torch._grouped_mm(a, b.mT, offs=offs)}

        def padded(inputs: Inputs, outputs: Tensors) -> None:
            torch.bmm(inputs.tensors["a"], inputs.tensors["b"].mT, out=outputs["out"])

        if problem.family == MASKED:
            return {"torch.bmm of all rows": padded, "loop of torch.mm": loop}
        return {"torch._grouped_mm": grouped, "loop of torch.mm": loop}

    def strategy(self, arch: Arch, algorithm: str = "") -> Strategy | None:
        """Return the GEMM's model, asked about the GEMM of as many tiles."""
        from cutegen.families.grouped_gemm.strategy import GroupedStrategy

        return GroupedStrategy.of(arch)


def _flops(problem: DeclaredProblem) -> int:
    rows = mean_rows(problem) * problem.g if problem.family == MASKED else problem.m
    return int(2 * rows * problem.n * problem.k)


def _bytes(problem: DeclaredProblem) -> int:
    """Every row of a group once, and every matrix that some row needs."""
    rows = _flops(problem) // (2 * problem.n * problem.k)
    elements = rows * (problem.k + problem.n) + min(rows, problem.g) * problem.n * problem.k
    return int(elements * DTYPE_BYTES[str(problem.dtype)])


_KNOBS = (
    "tile_shape_mn",
    "tile_k",
    "cluster_shape_mn",
    "mma_warpgroups",
    "pingpong",
    "swap_ab",
    "use_tma_store",
    "use_pdl",
    "swizzle_size",
    "raster_along_m",
)
_DTYPE = Option("dtype", "of a, b and out", ("bf16", "fp16"), "bf16")
_TOKENS = Option(
    "tokens", "how rows spread over groups: each equally likely, or 1 / rank", SPREADS, "uniform"
)


def _family(
    name: str,
    meaning: str,
    rows: tuple[str, ...],
    extents: Declared,
    *more: Option,
    meaning_of_m: str,
    examples: Sequence[str],
) -> GroupedFamily:
    return GroupedFamily(
        name,
        meaning,
        sizes=(
            Size("m", meaning_of_m),
            Size("n", "columns of out"),
            Size("k", "columns of a"),
            Size("g", "groups"),
        ),
        options=(_DTYPE, _TOKENS, *more),
        arguments=(
            read("a", "dtype", (*rows, "k"), aligned=True),
            read("b", "dtype", ("g", "n", "k"), aligned=True),
            extents,
            update("out", "dtype", (*rows, "n")),
            integers(),
        ),
        reference=_reference,
        adjust=_adjust,
        flops=_flops,
        min_bytes=_bytes,
        repeat="idempotent",
        knobs={knob: KNOBS[knob] for knob in _KNOBS},
        examples=examples,
    )


GROUPED_GEMM = _family(
    RANGES,
    "products of ranges of rows with a matrix each",
    ("m",),
    read("offs", "int32", ("g",)),
    meaning_of_m="rows of all groups",
    examples=(
        "32768x6144x7168x4 bf16",
        "32768x4096x2048x8 bf16 tokens=zipf",
        "65536x1536x2048x128 bf16",
        "4096x1536x2048x128 fp16",
        "512x768x2048x128 bf16 tokens=zipf",
        "64x4096x4096x8 bf16",
        "300x1001x264x5 bf16",
    ),
)

GROUPED_GEMM_MASKED = _family(
    MASKED,
    "products of the first rows of matrices with a matrix each",
    ("g", "m"),
    read("counts", "int32", ("g",)),
    Option("mean", "rows of a group in the mean", (ALL, *map(str, MEANS)), ALL),
    meaning_of_m="rows that there is room for in each group",
    examples=(
        "4096x6144x7168x6 bf16 mean=1024",
        "4096x4096x4096x32 bf16 mean=192",
        "4096x7168x3072x32 fp16 mean=20 tokens=zipf",
        "4096x6144x7168x6 bf16 mean=20",
        "1024x2048x512x4 bf16",
        "64x999x512x4 bf16 mean=5",
    ),
)
