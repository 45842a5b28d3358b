"""What fp64 says about a GEMM, and the error that each element of its output is allowed.

Everything that touches tensors works on any torch device, so the rules are tested without a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutegen.families.gemm.inputs import SCALE_A, SCALE_B, Workload
from cutegen.families.gemm.problem import BLOCK_SCALED, FP8_DTYPES, Problem
from cutegen.family import Chunk, Inputs

if TYPE_CHECKING:
    import torch

__all__ = [
    "EVALUATION",
    "SLOPE",
    "GemmReference",
    "accumulation_error",
    "make_reference",
    "sample_lines",
    "sum_error",
]

#: Half a unit in the last place, relative: what rounding the fp32 result to the output type may cost.
#: Source: significands of 8, 11 and 24 bits (bfloat16; IEEE 754 binary16 and binary32).
_ROUND_OFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "int32": 0.0}
#: Half of the smallest subnormal: the absolute floor of the same rounding. Integers must be exact.
_UNDERFLOW = {"bf16": 2.0**-126, "fp16": 2.0**-25, "fp32": 2.0**-126, "int32": 0.25}
#: Steepest slope of each activation: how much it can magnify an error of its argument.
SLOPE = {"": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
#: Error of evaluating it, relative to its argument. Source: tanh.approx.f32 is good to 2**-11 (PTX ISA).
EVALUATION = {"": 0.0, "relu": 0.0, "gelu": 2.0**-10, "gelu_tanh": 2.0**-10, "silu": 2.0**-10}

#: Outputs with more elements, or GEMMs with more operations, are compared on chosen rows and columns.
_FULL_ELEMENTS = 2**26
_FULL_FLOPS = 2.5e12
_CHUNK = 2**24  # elements handled at a time, so that temporaries stay near 128 MB
_OPERAND_CHUNK = 2**26  # fp64 elements of an operand converted at a time: 512 MB
#: Every tile edge of a kernel lies on a multiple of these, for rows and for columns.
_ROW_STEP, _COLUMN_STEP = 64, 16


def accumulation_error(problem: Problem) -> float:
    """Return the error of the sum over k, relative to |row of A| * |column of B| (2-norms).

    Each addition errs by up to one unit of the running sum: 2**-23 in fp32 (tensor cores truncate). For data
    of random sign the sum stays near |row||column|/sqrt(k), tensor cores add k/16 times, and errors of one
    sign add up: (k/16)(1/sqrt(k)) = sqrt(k)/16 units. The factor 16 is left as slack: it covers six standard
    deviations of the sum and any order of summation. Four units are the floor, for the epilogue itself.

    For fp8 the running sum keeps about 14 bits and grows k/32 times, and the slack is only six deviations.
    With promotion that holds for sums of up to 256 terms, whose errors have random signs. Integers add
    exactly.

    How many bits of a running sum Blackwell keeps we have not measured, so block-scaled operands are allowed
    what fp8 is without promotion: kind mxf8f6f4 adds k/32 times, mxf4nvf4 k/64 times and before that once for
    each block. Scale factors count in the norms; independent of each other and of the elements, they leave
    the sum near |row||column|/sqrt(k). One block of one row in error by a factor of two moves that row by
    |row||column| sqrt(block)/k, several times as much in some column: more than is allowed up to k of 1024,
    so on most odd tails, for any row and factor. Whoever has measured may tighten this.

    Where blocks have factors, every 128 terms leave the tensor cores, which halves what errors may come to;
    factors between 1/2 and 2 make them 1.4 times what equal ones do, in the root of the mean square. A factor
    that is wrong by half, of one block of one row, shows for k of up to a hundred thousand.

    Operands of tf32 are taken to be tf32 numbers, as those that are measured are: nothing is lost when
    the MMA reads them, and their products are exact in fp32.
    """
    root, fp32 = math.sqrt(problem.k), sum_error(problem.k)
    if problem.ab_dtype == "int8":
        return 0.0 if problem.out_dtype == "int32" else 2.0**-21
    if problem.ab_dtype not in (*FP8_DTYPES, *BLOCK_SCALED):
        return fp32
    return fp32 + 2.0**-13 * (96 / root if problem.promote and root > 16 else max(4.0, 6 * root / 32))


def sum_error(k: int) -> float:
    """Return the error of a sum of ``k`` products in fp32, as :func:`accumulation_error` derives it."""
    return 2.0**-23 * max(4.0, math.sqrt(k))


def sample_lines(extent: int, step: int, limit: int, seed: int) -> tuple[int, ...] | None:
    """Return the rows (or columns) to compare, sorted; None means all of them.

    Lines on both sides of each multiple of ``step`` come first, because that is where tiles meet; the first
    and last lines always, random ones up to ``limit``.
    """
    if extent <= limit:
        return None
    chosen = {0, extent - 1, (extent - 1) // step * step, max((extent - 1) // step * step - 1, 0)}
    rng = random.Random(seed)
    edges = [i for i in range(extent) if i % step in (0, step - 1) and i not in chosen]
    chosen.update(rng.sample(edges, max(0, min(len(edges), limit // 2 - len(chosen)))))
    while len(chosen) < limit:
        chosen.add(rng.randrange(extent))
    return tuple(sorted(chosen))


@dataclass(frozen=True)
class _Part:
    """Rows and columns (None: all) of the reference, and before the activation where that matters."""

    rows: torch.Tensor | None
    cols: torch.Tensor | None
    want: torch.Tensor
    before: torch.Tensor | None


class GemmReference:
    """What fp64 says about one problem and its operands, with the error allowed for each element.

    Large outputs are represented by a seeded sample of rows and of columns that favours tile edges.

    Attributes:
        problem: The problem.
    """

    def __init__(
        self,
        problem: Problem,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        full_elements: int = _FULL_ELEMENTS,
        seed: int = 0,
    ) -> None:
        self.problem = problem
        self._alpha, self._beta = alpha, beta
        self._a, self._b = (x if x.dim() == 3 else x.unsqueeze(0) for x in (a, b))
        self._c = None if c is None else c if c.dim() == 3 else c.unsqueeze(0)
        self._bias = bias
        self._row_norm, self._col_norm = _norm(self._a, 2), _norm(self._b, 1)
        self._extra = 2.0**-21 * (abs(beta) * _largest(c) + _largest(bias))
        self._parts = [self._part(rows, cols) for rows, cols in self._selection(full_elements, seed)]
        size = problem.batch * problem.m * problem.n
        self._compared = min(1.0, sum(part.want.numel() for part in self._parts) / size)
        del self._a, self._b, self._c, self._bias

    def _selection(
        self, full_elements: int, seed: int
    ) -> list[tuple[Sequence[int] | None, Sequence[int] | None]]:
        p = self.problem
        if p.batch * p.m * p.n <= full_elements and p.flops <= _FULL_FLOPS:
            return [(None, None)]
        rows = sample_lines(p.m, _ROW_STEP, max(32, full_elements // 4 // (p.batch * p.n)), seed)
        cols = sample_lines(p.n, _COLUMN_STEP, max(32, full_elements // 4 // (p.batch * p.m)), seed + 1)
        return [(rows, None)] if rows is None or cols is None else [(rows, None), (None, cols)]

    def _part(self, rows: Sequence[int] | None, cols: Sequence[int] | None) -> _Part:
        import torch

        device = self._a.device
        at_rows = None if rows is None else torch.tensor(rows, device=device)
        at_cols = None if cols is None else torch.tensor(cols, device=device)
        before = _product(_take(self._a, 1, at_rows), _take(self._b, 2, at_cols)).mul_(self._alpha)
        if self._c is not None:
            before.add_(_take(_take(self._c, 1, at_rows), 2, at_cols).double(), alpha=self._beta)
        if self._bias is not None:
            along_n = self.problem.epilogue.bias == "n"
            bias = _take(self._bias.double(), 0, at_cols if along_n else at_rows)
            before.add_(bias if along_n else bias[:, None])
        activation = self.problem.epilogue.activation
        want = _activate(before, activation)
        return _Part(at_rows, at_cols, want, before if EVALUATION[activation] else None)

    def compared(self, output: str) -> float:
        """Return the fraction of the output that is compared."""
        return self._compared

    def chunks(self, output: str, got: torch.Tensor) -> Iterator[Chunk]:
        """Yield what ``got`` holds, what it should hold and how far they may differ, some rows at a time."""
        whole = got if got.dim() == 3 else got.unsqueeze(0)
        for part in self._parts:
            count = part.want.shape[1]
            step = max(1, _CHUNK * count // part.want.numel())
            for low in range(0, count, step):
                high = min(low + step, count)
                rows = slice(low, high) if part.rows is None else part.rows[low:high]
                yield Chunk(
                    got=_take(whole[:, rows], 2, part.cols).double(),
                    want=part.want[:, low:high],
                    allowed=self._allowed(part, rows, low, high),
                    place=_place(rows, part.cols, got.dim() == 3),
                )

    def _allowed(self, part: _Part, rows: slice | torch.Tensor, low: int, high: int) -> torch.Tensor:
        epilogue, out = self.problem.epilogue, self.problem.out_dtype
        row = self._row_norm[:, rows] * (abs(self._alpha) * accumulation_error(self.problem))
        error: torch.Tensor = row.unsqueeze(2) * _take(self._col_norm, 1, part.cols).unsqueeze(1)
        error += self._extra
        error *= SLOPE[epilogue.activation]
        if part.before is not None:
            error += part.before[:, low:high].abs().mul_(EVALUATION[epilogue.activation])
        rounding = part.want[:, low:high].abs().add_(error).mul_(_ROUND_OFF[out])
        return error.add_(rounding).add_(_UNDERFLOW[out])


def _place(
    rows: slice | torch.Tensor, cols: torch.Tensor | None, batched: bool
) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Return what turns an index into a chunk into the index in the output."""

    def place(index: tuple[int, ...]) -> tuple[int, ...]:
        i, r, c = index
        row = rows.start + r if isinstance(rows, slice) else int(rows[r])
        where = (i, row, c if cols is None else int(cols[c]))
        return where if batched else where[1:]

    return place


def _norm(x: torch.Tensor, dim: int) -> torch.Tensor:
    import torch

    wide = x.float() if x.element_size() == 1 else x  # there are no norms of 8-bit types
    dtype = torch.float64 if wide.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(wide, dim=dim, dtype=dtype)
    return norm.double()


def _largest(x: torch.Tensor | None) -> float:
    return 0.0 if x is None else float(x.abs().max())


def _take(x: torch.Tensor, dim: int, index: torch.Tensor | None) -> torch.Tensor:
    import torch

    if index is None:
        return x
    plain = x.view(torch.uint8) if x.element_size() == 1 else x  # fp8 cannot be indexed everywhere
    taken: torch.Tensor = torch.index_select(plain, dim, index).view(x.dtype)
    return taken


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b in fp64, converting no more than ``_OPERAND_CHUNK`` elements of each at a time."""
    import torch

    batch, m, k = a.shape
    n = b.shape[2]
    out = torch.empty((batch, m, n), dtype=torch.float64, device=a.device)
    step = max(1, _OPERAND_CHUNK // k)
    for i in range(batch):
        for left in range(0, n, step):
            columns = b[i, :, left : left + step].double()
            for top in range(0, m, step):
                out[i, top : top + step, left : left + step] = a[i, top : top + step].double() @ columns
    return out


def _activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    import torch

    if activation == "relu":
        return x.clamp_min(0)
    if activation == "silu":
        return torch.mul(x, torch.sigmoid(x))
    if activation == "gelu":
        return torch.mul(x, torch.special.ndtr(x))
    if activation == "gelu_tanh":
        return torch.mul(x, torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)) * 0.5 + 0.5)
    return x


def make_reference(problem: Problem, inputs: Inputs) -> GemmReference:
    """Return the reference of ``problem`` on ``inputs``."""
    load = Workload.of(problem, inputs)
    alpha, beta = inputs.scalars.get("alpha", 1.0), inputs.scalars.get("beta", 0.0)
    if problem.epilogue.scale:
        alpha *= SCALE_A * SCALE_B
    return GemmReference(problem, *load.numbers(), load.c, load.bias, alpha=alpha, beta=beta)
