"""Judges one output of a kernel: fp64 reference, derived tolerance, unwritten and stray elements, repeats.

Everything that touches tensors works on any torch device, so the rules are tested without a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cutegen.canvas import Canvas
from cutegen.digest import Json
from cutegen.problem import BLOCK_SCALED, FP8_DTYPES, Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "Oracle",
    "Verdict",
    "accumulation_error",
    "judge",
    "sample_lines",
    "verify",
]

#: Half a unit in the last place, relative: what rounding the fp32 result to the output type may cost.
#: Source: significands of 8, 11 and 24 bits (bfloat16; IEEE 754 binary16 and binary32).
_ROUND_OFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "int32": 0.0}
#: Half of the smallest subnormal: the absolute floor of the same rounding. Integers must be exact.
_UNDERFLOW = {"bf16": 2.0**-126, "fp16": 2.0**-25, "fp32": 2.0**-126, "int32": 0.25}
#: Steepest slope of each activation: how much it can magnify an error of its argument.
_SLOPE = {"": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
#: Error of evaluating it, relative to its argument. Source: tanh.approx.f32 is good to 2**-11 (PTX ISA).
_EVALUATION = {"": 0.0, "relu": 0.0, "gelu": 2.0**-10, "gelu_tanh": 2.0**-10, "silu": 2.0**-10}

#: Outputs with more elements, or products with more operations, are compared on chosen rows and columns.
_FULL_ELEMENTS = 2**26
_FULL_FLOPS = 2.5e12
_CHUNK = 2**24  # elements handled at a time, so that temporaries stay near 128 MB
_OPERAND_CHUNK = 2**26  # fp64 elements of an operand converted at a time: 512 MB
#: Every tile edge of a kernel lies on a multiple of these, for rows and for columns.
_ROW_STEP, _COLUMN_STEP = 64, 16


@dataclass(frozen=True)
class Verdict:
    """What the comparison found; the numbers are those of the worst element.

    Attributes:
        ok: Whether the kernel may be trusted on this problem.
        max_error: |got - want| at the element that is worst relative to what is allowed there.
        tolerance: What was allowed there.
        where: Its index in the output.
        got: What the kernel wrote there.
        want: What fp64 says.
        deterministic: Whether repeated runs gave the same bits.
        reason: Why not ok, in words; empty when ok.
        problem: The problem it was judged on, as one line.
        compared: Fraction of the output that was compared with the reference; NaN is looked for everywhere.
    """

    ok: bool
    max_error: float = 0.0
    tolerance: float = 0.0
    where: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    deterministic: bool = True
    reason: str = ""
    problem: str = ""
    compared: float = 1.0

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; numbers that JSON lacks become the words ``nan``, ``inf``."""
        data: dict[str, Json] = {**asdict(self), "where": list(self.where)}
        for name in ("max_error", "tolerance", "got", "want"):
            value = getattr(self, name)
            data[name] = value if math.isfinite(value) else str(value)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Return the verdict that :meth:`to_json` described."""
        numbers = {name: float(data[name]) for name in ("max_error", "tolerance", "got", "want")}
        return cls(**{**data, **numbers, "where": tuple(data["where"])})


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

    Operands of tf32 are taken to be tf32 numbers, as those that are measured are: nothing is lost when
    the MMA reads them, and their products are exact in fp32.
    """
    root = math.sqrt(problem.k)
    fp32 = 2.0**-23 * max(4.0, root)
    if problem.ab_dtype == "int8":
        return 0.0 if problem.out_dtype == "int32" else 2.0**-21
    if problem.ab_dtype not in (*FP8_DTYPES, *BLOCK_SCALED):
        return fp32
    return fp32 + 2.0**-13 * (96 / root if problem.promote and root > 16 else max(4.0, 6 * root / 32))


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


class Oracle:
    """What fp64 says about one problem and its operands, with the error allowed for each element.

    Large outputs are represented by a seeded sample of rows and of columns that favours tile edges.

    Attributes:
        problem: The problem.
        compared: Fraction of the output that is represented.
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
        self.compared = min(1.0, sum(part.want.numel() for part in self._parts) / size)
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
        return _Part(at_rows, at_cols, want, before if _EVALUATION[activation] else None)

    def chunks(self, d: torch.Tensor) -> Iterator[_Chunk]:
        """Yield what ``d`` holds, what it should hold and how far they may differ, some rows at a time."""
        whole = d if d.dim() == 3 else d.unsqueeze(0)
        for part in self._parts:
            count = part.want.shape[1]
            step = max(1, _CHUNK * count // part.want.numel())
            for low in range(0, count, step):
                high = min(low + step, count)
                rows = slice(low, high) if part.rows is None else part.rows[low:high]
                got = _take(whole[:, rows], 2, part.cols).double()
                yield _Chunk(
                    got, part.want[:, low:high], self._allowed(part, rows, low, high), rows, part.cols
                )

    def _allowed(self, part: _Part, rows: slice | torch.Tensor, low: int, high: int) -> torch.Tensor:
        epilogue, out = self.problem.epilogue, self.problem.out_dtype
        row = self._row_norm[:, rows] * (abs(self._alpha) * accumulation_error(self.problem))
        error: torch.Tensor = row.unsqueeze(2) * _take(self._col_norm, 1, part.cols).unsqueeze(1)
        error += self._extra
        error *= _SLOPE[epilogue.activation]
        if part.before is not None:
            error += part.before[:, low:high].abs().mul_(_EVALUATION[epilogue.activation])
        rounding = part.want[:, low:high].abs().add_(error).mul_(_ROUND_OFF[out])
        return error.add_(rounding).add_(_UNDERFLOW[out])


@dataclass(frozen=True)
class _Chunk:
    got: torch.Tensor
    want: torch.Tensor
    allowed: torch.Tensor
    rows: slice | torch.Tensor
    cols: torch.Tensor | None

    def index(self, flat: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where element ``flat`` is in the chunk and in the output."""
        _, height, width = self.want.shape
        i, r, c = flat // (height * width), flat // width % height, flat % width
        row = self.rows.start + r if isinstance(self.rows, slice) else int(self.rows[r])
        return (i, r, c), (i, row, c if self.cols is None else int(self.cols[c]))


def _norm(x: torch.Tensor, dim: int) -> torch.Tensor:
    import torch

    wide = x.float() if x.element_size() == 1 else x  # there are no norms of 8-bit types
    norm: torch.Tensor = torch.linalg.vector_norm(wide, dim=dim, dtype=torch.float32)
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


def judge(canvas: Canvas, oracle: Oracle) -> Verdict:
    """Compare what one run left on ``canvas`` with the reference.

    Looks for unwritten, infinite and stray elements everywhere, then compares what the oracle represents.
    """
    line = str(oracle.problem)
    count, first = canvas.unwritten()
    if count:
        got = float(canvas.d[first])
        reason = (
            f"{count} of {canvas.d.numel()} elements are not finite or were never written, first at {first}"
        )
        return Verdict(False, math.nan, 0.0, first, got, math.nan, True, reason, line, oracle.compared)
    stray = canvas.stray()
    worst = _worst(canvas.d, oracle)
    if stray:
        return replace(worst, ok=False, reason=f"{stray} elements outside of the output were written")
    return worst


def _worst(d: torch.Tensor, oracle: Oracle) -> Verdict:
    worst = Verdict(True, problem=str(oracle.problem), compared=oracle.compared)
    ratio_so_far = -1.0
    for chunk in oracle.chunks(d):
        value, flat = (chunk.got - chunk.want).abs_().div_(chunk.allowed).flatten().max(0)
        ratio = float(value)
        if ratio <= ratio_so_far:
            continue
        ratio_so_far = ratio
        here, where = chunk.index(int(flat))
        got, want, allowed = (float(x[here]) for x in (chunk.got, chunk.want, chunk.allowed))
        where = where if d.dim() == 3 else where[1:]
        ok = ratio <= 1
        reason = "" if ok else f"element {where} is {got:.6g}, should be {want:.6g} within {allowed:.2g}"
        worst = replace(
            worst,
            ok=ok,
            max_error=abs(got - want),
            tolerance=allowed,
            where=where,
            got=got,
            want=want,
            reason=reason,
        )
    return worst


def verify(
    run: Callable[[torch.Tensor], None], canvases: tuple[Canvas, Canvas], oracle: Oracle, repeats: int = 1
) -> Verdict:
    """Run a kernel on poisoned outputs, compare it with the reference, then repeat it for equal bits.

    Args:
        run: Launches the kernel on an output and waits for it.
        canvases: Two outputs of the same shape.
        oracle: What the output should hold.
        repeats: Further runs, each compared bit for bit with the first; where the problem allows any order of
            summation, runs that differ are compared with the reference instead.

    Raises:
        LaunchError: As raised by ``run``.
    """
    first, again = canvases
    first.poison()
    run(first.d)
    verdict = judge(first, oracle)
    for _ in range(repeats):
        if not verdict.ok:
            break
        again.poison()
        run(again.d)
        if first.same_bits(again):
            continue
        if oracle.problem.any_order:
            verdict = replace(judge(again, oracle), deterministic=False)
        else:
            reason = "repeated runs on the same operands gave different bits"
            verdict = replace(verdict, ok=False, deterministic=False, reason=reason)
    return verdict
