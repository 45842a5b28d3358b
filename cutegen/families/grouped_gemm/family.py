"""Grouped GEMM as declared families: ``out[rows of group i] = a[rows of group i] @ b[i].T``.

How many rows each group has is known on the device only. In ``grouped_gemm`` the groups' rows follow one
another in one matrix, and ``offs`` says where each ends, as in ``torch._grouped_mm``; in
``grouped_gemm_masked`` every group has a matrix, whose first ``counts`` rows are its own. Rows of no group
are neither read nor written, so the output counts as updated in place.

Which config is fast depends on how rows spread over the groups, so a problem declares it: ``tokens`` and,
where no size says it, ``mean``. Kernels are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.compiled import compile_for_one_problem
from cutegen.families.declared import Declared, DeclaredFamily, DeclaredProblem, integers, read, update
from cutegen.families.gated_gemm.family import HALF_IS_GATES
from cutegen.families.gemm.knobs import KNOBS
from cutegen.families.grouped_gemm.batched_gemm import activation_of, gemm_of
from cutegen.families.grouped_gemm.group_rows import ALL, is_masked, total_rows
from cutegen.families.grouped_gemm.groups import (
    GroupedReference,
    KnownRanges,
    gate_of,
    grouped_products,
    spread,
)
from cutegen.family import Baseline, Inputs, Option, Size, StandIn, Tensors
from cutegen.space import Config, Value
from cutegen.strategy import Strategy

__all__ = [
    "GROUPED_GEMM",
    "GROUPED_GEMM_MASKED",
    "MEANS",
    "SPREADS",
    "TOKENS",
    "GroupedFamily",
    "count_bytes",
    "count_flops",
    "first_rows",
    "ranges_of_rows",
]

#: How tokens choose their group: at random, each equally likely; or with a probability of 1 / rank.
SPREADS = ("uniform", "zipf")
#: Mean rows of a group, in steps of at most a quarter from 4 on.
MEANS = (1, 2, 3, *(part << step for step in range(12) for part in (4, 5, 6, 7)))
#: Sizes of the problems on which candidates are checked besides their own: rows, or rows of each group in the
#: masked form, then n, k and groups. Larger ones are for larger clusters.
_TAILS = ((333, 392, 200, 5), (1000, 1192, 264, 3), (4001, 2232, 136, 4), (9001, 2232, 136, 2))


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
        return {"gemm": gemm_of(problem, int(problem.m), 2).signature}

    def reference(self, problem: DeclaredProblem, inputs: Inputs) -> GroupedReference:  # type: ignore[override]
        """Return the GEMM of each group in fp64, with the error bound of a GEMM."""
        return GroupedReference(problem, inputs)

    def stand_in(self, problem: DeclaredProblem) -> StandIn:
        """Return torch's GEMMs, of all rows with every group's matrix."""

        def compute(inputs: Inputs, outputs: Tensors) -> None:
            values: dict[str, Any] = {**inputs.tensors, **outputs, **self._named(problem)}
            if activation_of(problem):  # accumulators are not rounded before the gate
                values.update({name: values[name].float() for name in ("a", "b")})
            outputs["out"].copy_(grouped_products(**values)["out"])

        return compute

    def baselines(self, problem: DeclaredProblem, inputs: Inputs, outputs: Tensors) -> Mapping[str, Baseline]:
        """Return torch's grouped GEMM, and a GEMM for each group, whose rows the host is told.

        Those of gated GEMMs are followed by a compiled gate.
        """
        import torch

        def grouped(inputs: Inputs, both: Any) -> Any:
            a, b, offs = (inputs.tensors[name] for name in ("a", "b", "offs"))
            return torch._grouped_mm(a, b.mT, offs=offs)

        def padded(inputs: Inputs, both: Any) -> Any:
            return torch.bmm(inputs.tensors["a"], inputs.tensors["b"].mT, out=both)

        first = ("torch.bmm of all rows", padded) if is_masked(problem) else ("torch._grouped_mm", grouped)
        return dict(_completed(problem, *way) for way in (first, ("loop of torch.mm", _loop())))

    def strategy(self, arch: Arch, algorithm: str = "") -> Strategy | None:
        """Return the GEMM's model, asked about the GEMM of as many tiles."""
        from cutegen.families.grouped_gemm.strategy import GatedGroupedStrategy, GroupedStrategy

        gated = any(option.name == "activation" for option in self.options)
        return (GatedGroupedStrategy if gated else GroupedStrategy).of(arch)


#: Writes the GEMMs of all groups into a tensor, or returns them.
_Products = Callable[[Inputs, Any], Any]


def _loop() -> _Products:
    """Return a loop of GEMMs, whose host knows the rows of each group."""
    known = KnownRanges()

    def loop(inputs: Inputs, both: Any) -> Any:
        import torch

        a, b = inputs.tensors["a"], inputs.tensors["b"]
        for group, index, first, end in known.of(inputs.tensors):
            torch.mm(a[index, first:end, :], b[group].mT, out=both[index, first:end, :])
        return both

    return loop


def _completed(problem: DeclaredProblem, name: str, products: _Products) -> tuple[str, Baseline]:
    """Return a way to compute the GEMMs as a baseline; a compiled gate follows those that are gated."""
    if not activation_of(problem):

        def plain(inputs: Inputs, outputs: Tensors) -> Tensors | None:
            found = products(inputs, outputs["out"])
            return None if found is outputs["out"] else {"out": found}

        return name, plain
    gate = compile_for_one_problem(gate_of(activation_of(problem), str(problem.layout)))
    rooms: dict[int, Any] = {}  # for what gates are applied to, by the result

    def gated(inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        if out.data_ptr() not in rooms:
            rooms[out.data_ptr()] = out.new_zeros((*out.shape[:-1], 2 * out.shape[-1]))
        return {"out": gate(products(inputs, rooms[out.data_ptr()]))}

    return f"{name}, torch.compile", gated


def _columns(problem: DeclaredProblem) -> int:
    """Return the columns of a matrix, of which gated GEMMs have two for each of the result."""
    return int(2 * problem.n if activation_of(problem) else problem.n)


def count_flops(problem: DeclaredProblem) -> int:
    """Return the operations of all groups' GEMMs."""
    return int(2 * total_rows(problem) * _columns(problem) * problem.k)


def count_bytes(problem: DeclaredProblem, of_row: int, of_matrix: int) -> int:
    """Return the bytes of every row of a group, once, and of every matrix that some row needs.

    Args:
        problem: The problem.
        of_row: Bytes of a row, of ``a`` and of ``out`` together.
        of_matrix: Bytes of one matrix of ``b``.
    """
    rows = total_rows(problem)
    return int(rows * of_row + min(rows, problem.g) * of_matrix)


def _bytes(problem: DeclaredProblem) -> int:
    width = DTYPE_BYTES[str(problem.dtype)]
    of_matrix = _columns(problem) * problem.k * width
    return count_bytes(problem, (problem.k + problem.n) * width, of_matrix)


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
#: How rows spread, which a problem declares.
TOKENS = Option("tokens", "how rows spread over groups: each equally likely, or 1 / rank", SPREADS, "uniform")
_MEAN = Option("mean", "mean rows of a group", (ALL, *map(str, MEANS)), ALL)


def ranges_of_rows(name: str, meaning: str, examples: Sequence[str], *more: Option) -> GroupedFamily:
    """Return a family of which groups have ranges of the rows of one matrix.

    Args:
        name: Its name.
        meaning: In a few words.
        examples: Problems that between them reach every knob value.
        more: Options that its problems have beside those of all; with an activation GEMMs are gated.
    """
    extents = read("offs", "int32", ("g",))
    return _family(name, meaning, ("m",), extents, *more, of_m="rows of all groups", examples=examples)


def first_rows(name: str, meaning: str, examples: Sequence[str], *more: Option) -> GroupedFamily:
    """Return a family of which groups have the first rows of a matrix each; arguments likewise."""
    extents, of_m = read("counts", "int32", ("g",)), "rows that there is room for in each group"
    return _family(name, meaning, ("g", "m"), extents, _MEAN, *more, of_m=of_m, examples=examples)


def _family(
    name: str,
    meaning: str,
    rows: tuple[str, ...],
    extents: Declared,
    *more: Option,
    of_m: str,
    examples: Sequence[str],
) -> GroupedFamily:
    gated = any(option.name == "activation" for option in more)
    knobs = {knob: KNOBS[knob] for knob in _KNOBS}
    if gated:
        knobs["tile_shape_mn"] += HALF_IS_GATES
    return GroupedFamily(
        name,
        meaning,
        sizes=(
            Size("m", of_m),
            Size("n", "columns of out"),
            Size("k", "columns of a"),
            Size("g", "groups"),
        ),
        options=(_DTYPE, TOKENS, *more),
        arguments=(
            read("a", "dtype", (*rows, "k"), aligned=True),
            read("b", "dtype", ("g", "2n" if gated else "n", "k"), aligned=True),
            extents,
            update("out", "dtype", (*rows, "n")),
            integers(),
        ),
        reference=grouped_products,
        adjust=spread,
        flops=count_flops,
        min_bytes=_bytes,
        repeat="idempotent",
        knobs=knobs,
        examples=examples,
    )


GROUPED_GEMM = ranges_of_rows(
    "grouped_gemm",
    "one GEMM for each group, rows sorted by group",
    (
        "32768x6144x7168x4 bf16",
        "32768x4096x2048x8 bf16 tokens=zipf",
        "65536x1536x2048x128 bf16",
        "4096x1536x2048x128 fp16",
        "512x768x2048x128 bf16 tokens=zipf",
        "64x4096x4096x8 bf16",
        "300x1001x264x5 bf16",
    ),
)

GROUPED_GEMM_MASKED = first_rows(
    "grouped_gemm_masked",
    "one GEMM for each group, of the first rows of its own matrix",
    (
        "4096x6144x7168x6 bf16 mean=1024",
        "4096x4096x4096x32 bf16 mean=192",
        "4096x7168x3072x32 fp16 mean=20 tokens=zipf",
        "4096x6144x7168x6 bf16 mean=20",
        "1024x2048x512x4 bf16",
        "64x999x512x4 bf16 mean=5",
    ),
)
