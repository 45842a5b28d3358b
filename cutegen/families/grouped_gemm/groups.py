"""Rows of groups: how inputs spread them, what the GEMM of each group is, and rows of no group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.families.declared import DeclaredProblem
from cutegen.families.gated_gemm.family import GATED_GEMM
from cutegen.families.grouped_gemm.batched_gemm import activation_of, gemm_of, has_factors
from cutegen.families.grouped_gemm.group_rows import is_masked, mean_rows
from cutegen.family import Chunk, Inputs, Reference

if TYPE_CHECKING:
    import torch

__all__ = ["GroupedReference", "KnownRanges", "Range", "gate_of", "grouped_products", "ranges", "spread"]

#: Elements of the reference of all groups together; more are sampled.
_REFERENCE_ELEMENTS = 2**26


def _spread_rows(problem: DeclaredProblem, awkward: bool) -> list[int]:
    """Return the rows of each group in inputs of ``problem``, the same ones every time.

    Awkward ones leave the first group empty and some rows to none, and one group has half of them.
    """
    import torch

    groups, most = int(problem.g), int(problem.m)
    masked = is_masked(problem)
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


def spread(problem: DeclaredProblem, tensors: Mapping[str, Any], awkward: bool) -> None:
    """Spread rows over the groups; where inputs are to be awkward, rows of no group are NaN.

    Factors of blocks are between 1/2 and 2.
    """
    import torch

    counts, a = torch.tensor(_spread_rows(problem, awkward), dtype=torch.int32), tensors["a"]
    if "counts" in tensors:
        tensors["counts"].copy_(counts)
    else:
        tensors["offs"].copy_(counts.cumsum(0))
    for name in tensors.keys() & {"scale_a", "scale_b"}:
        tensors[name].abs_().mul_(0.5).clamp_(max=1.5).add_(0.5)
    if awkward:
        for index, first, end in _unused(tensors):
            a[index, first:end, :] = math.nan
            if "scale_a" in tensors:
                tensors["scale_a"][:, first:end] = math.nan


class Range(NamedTuple):
    """A group's number, the index of its rows' matrix in ``a``, its first row and the one behind its last."""

    group: int
    index: Any
    first: int
    end: int


def ranges(tensors: Mapping[str, Any]) -> Iterator[Range]:
    """Yield the rows of each group."""
    if "counts" in tensors:
        for group, count in enumerate(tensors["counts"].tolist()):
            yield Range(group, group, 0, count)
    else:
        first = 0
        for group, end in enumerate(tensors["offs"].tolist()):
            yield Range(group, ..., first, end)
            first = end


class KnownRanges:
    """The rows of groups that have some, for baselines whose host knows them.

    They are read once: all inputs of a problem have the same, and what is timed does not wait for them.
    """

    def __init__(self) -> None:
        self._known: list[Range] = []

    def of(self, tensors: Mapping[str, Any]) -> Sequence[Range]:
        """Return the rows of each group with some, of any inputs of the problem."""
        if not self._known:
            self._known.extend(each for each in ranges(tensors) if each.first < each.end)
        return self._known


def _unused(tensors: Mapping[str, Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield index, first and last of the rows of no group."""
    a, end = tensors["a"], 0
    for _, index, _, end in ranges(tensors):
        if index is not ...:
            yield index, end, a.shape[1]
    if a.dim() == 2:
        yield ..., end, a.shape[0]


def gate_of(activation: str, layout: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what multiplies activated gates, some of the last columns of a tensor, with the others."""
    from cutegen.families.gemm.stand_in import activation as function_of

    act = function_of(activation)

    def gated(both: torch.Tensor) -> torch.Tensor:
        interleaved = layout == "interleaved"
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        return act(gate) * up

    return gated


def grouped_products(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    offs: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    activation: str = "",
    layout: str = "",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the output without reading counts on the host: slow, as each matrix multiplies all rows."""
    import torch

    gate = gate_of(activation, layout) if activation else lambda product: product
    if scale_a is not None and scale_b is not None:
        from cutegen.families.gemm.inputs import times_factors

        a, b = times_factors(a, scale_a.mT).float(), times_factors(b, scale_b).float()
    rows = torch.arange(a.shape[-2], device=a.device)
    found = out
    for group, matrix in enumerate(b):
        if counts is not None:
            found = found.clone() if found is out else found
            product = gate(a[group] @ matrix.mT)
            found[group] = torch.where((rows < counts[group])[:, None], product, out[group])
        elif offs is not None:
            inside = rows < offs[group]
            if group:
                inside &= rows >= offs[group - 1]
            found = torch.where(inside[:, None], gate(a @ matrix.mT), found)
    return {"out": found}


class GroupedReference:
    """Each group as a GEMM of its own, and the rows of no group, which stay what they were."""

    def __init__(self, problem: DeclaredProblem, inputs: Inputs) -> None:
        tensors = inputs.tensors
        self._before = tensors["out"]
        self._unused = [(index, low, high) for index, low, high in _unused(tensors) if low < high]
        self._groups = [
            (
                index,
                first,
                end,
                _of_group(problem, tensors, group, (index, slice(first, end))),
            )
            for group, index, first, end in ranges(tensors)
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


def _of_group(
    problem: DeclaredProblem, tensors: Mapping[str, Any], group: int, place: tuple[Any, slice]
) -> Reference:
    """Return the reference of one group, that of its plain or gated GEMM."""
    from cutegen.families.gemm.inputs import times_factors
    from cutegen.families.gemm.reference import GemmReference

    index, where = place
    rows, matrix = tensors["a"][index, where, :], tensors["b"][group]
    if activation_of(problem):
        names = ("dtype", "activation", "layout")
        sizes = {"m": len(rows), "n": problem.n, "k": problem.k}
        one = GATED_GEMM.problem(sizes, {name: getattr(problem, name) for name in names})
        return GATED_GEMM.reference(one, Inputs({"x": rows, "w": matrix}))
    most = _REFERENCE_ELEMENTS // int(problem.g)
    if has_factors(problem):
        rows = times_factors(rows, tensors["scale_a"][:, where].mT)
        matrix = times_factors(matrix, tensors["scale_b"][group])
    return GemmReference(gemm_of(problem, len(rows), 1), rows, matrix.mT, full_elements=most)


def _placed(index: Any, first: int, chunk: Chunk) -> Any:
    where = () if index is ... else (index,)
    inner = chunk.place

    def place(at: tuple[int, ...]) -> tuple[int, ...]:
        row, column = inner(at)
        return (*where, row + first, column)

    return place
