"""``grouped_gemm`` and ``scaled_grouped_gemm`` on torch tensors, eager and under ``torch.compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutegen.errors import OperandError
from cutegen.families.calls import require_tensor
from cutegen.families.gated.family import ACTIVATIONS
from cutegen.families.gated_gemm.family import WEIGHT_LAYOUTS
from cutegen.families.grouped_gated_gemm.family import GROUPED_GATED_GEMM, GROUPED_GATED_GEMM_MASKED
from cutegen.families.grouped_gemm.family import GROUPED_GEMM, GROUPED_GEMM_MASKED, MEANS, SPREADS
from cutegen.families.grouped_gemm.group_rows import ALL
from cutegen.families.grouped_gemm_blocks.family import GROUPED_GEMM_BLOCKS
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.rows import refuse_transforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["expected_mean", "grouped_gemm", "prepare", "scaled_grouped_gemm"]

#: Elements along an axis that share a factor.
_BLOCK = 128
#: Operators by whether groups have a matrix each, then by whether GEMMs are gated.
_operators = {
    (masked, gated): DeclaredOperator(family, state.default_dispatcher, state.workspaces)
    for masked, gated, family in (
        (False, False, GROUPED_GEMM),
        (True, False, GROUPED_GEMM_MASKED),
        (False, True, GROUPED_GATED_GEMM),
        (True, True, GROUPED_GATED_GEMM_MASKED),
    )
}
_of_blocks = DeclaredOperator(GROUPED_GEMM_BLOCKS, state.default_dispatcher, state.workspaces)


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | Sequence[int] | None = None,
    *,
    counts: torch.Tensor | Sequence[int] | None = None,
    activation: str = "",
    layout: str = "halves",
    out: torch.Tensor | None = None,
    tokens: str = "uniform",
    expected_rows: int | None = None,
    config: AnyConfig = None,
) -> torch.Tensor:
    """Return the GEMM of each group's rows of ``a`` with the group's matrix, in one launch.

    Experimental, on Hopper: its kernels were right in all checks on an H200; those with an activation were
    not timed yet.

    For group ``i`` and its rows ``r`` it is ``out[r] = a[r] @ b[i].T``. How many rows each group has is read
    on the device only, so that a call needs no synchronisation and goes into CUDA graphs. Accumulation is in
    fp32 and results are rounded once. Rows of no group are neither read nor written: those of a new result
    are not initialised, as with ``torch._grouped_mm(a, b.mT, offs=offs)``, which computes the same. There are
    no gradients. With an activation it is the first half of a gated MLP of each group, as ``gated_gemm``.

    Args:
        a: (m, k) with ``offs``: the rows of all groups, one group after the other. (groups, m, k) with
            ``counts``: a matrix for each group, whose first rows are its own. bf16 or fp16 on a GPU; rows
            start at multiples of 16 bytes.
        b: (groups, n, k) in the dtype of ``a``, as the weights of linear layers lie; at most 512 groups. With
            an activation (groups, 2 * n, k): the rows of both weights of each group.
        offs: (groups,) int32: where the rows of each group end, growing, at most m.
        counts: (groups,) int32: how many rows each group has, at most m. Instead of ``offs``. On the device,
            values outside of these bounds are taken as the nearest bound, and rows of two groups get the
            result of either; those that are given on the host are checked.
        activation: Of gates, which what stands beside them is multiplied with: ``silu``, ``gelu``,
            ``gelu_tanh`` or ``relu``; empty for plain GEMMs.
        layout: Of each matrix of ``b`` with an activation: ``halves``, the gate's rows first, or
            ``interleaved``, with them in even rows.
        out: Where the result goes, (m, n) or (groups, m, n) in the dtype of ``a``; no memory of another
            argument.
        tokens: How rows spread over the groups, by which a tuned kernel is chosen: ``uniform`` or ``zipf``.
        expected_rows: With ``counts``, about how many rows a group has on average, by which a kernel is
            chosen; all of m if it is not given.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Raises:
        OperandError: A tensor cannot be an operand, or counts on the host cannot be; the message names it and
            what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    name, given = _form(a, b, offs, counts)
    _require_gate(b, activation, layout)
    operator = _operators[name == "counts", bool(activation)]
    _require_spread(tokens)
    extents = _on_device(name, given, a, b)
    if out is None:
        out = a.new_empty((*a.shape[:-1], b.shape[1] // (2 if activation else 1)))
    values = [a, b, extents, out]
    mean = () if name == "offs" else (expected_mean(expected_rows),)
    options = (tokens, *mean, *((activation, layout) if activation else ()))
    if a.numel() == 0 and a.shape[-1]:
        operator.of_nothing(values, options)
        return out
    _run(operator, values, config, options)
    return out


def scaled_grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | Sequence[int],
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    tokens: str = "uniform",
    config: AnyConfig = None,
) -> torch.Tensor:
    """Return fp8 GEMMs of each group's rows with the group's matrix, whose blocks of 128 have factors.

    Experimental, on Hopper. For group ``i`` and its rows ``r`` it is
    ``(scale_a * a)[r] @ (scale_b * b)[i].T``, each factor for a block of elements, in one launch as
    :func:`grouped_gemm`: row counts are read on the device only, rows of no group are neither read nor
    written, and there are no gradients. Sums of 128 terms are multiplied by their factors and added up in
    fp32.

    Args:
        a: (m, k) in ``torch.float8_e4m3fn``: the rows of all groups, one group after the other; k is a
            multiple of 128.
        b: (groups, n, k) likewise, as the weights of linear layers lie; n is a multiple of 128, and there are
            at most 512 groups.
        scale_a: (m, k / 128) in fp32, the factor of every 128 elements of a row, with contiguous columns, as
            ``torch._scaled_mm`` takes them.
        scale_b: (groups, n / 128, k / 128) in fp32, of every 128 x 128 elements of a matrix.
        offs: (groups,) int32: where the rows of each group end, growing, at most m.
        out_dtype: Of a new result: bf16 (default), fp16 or fp32.
        out: Where the result goes, (m, n); no memory of another argument.
        tokens: How rows spread over the groups, by which a tuned kernel is chosen: ``uniform`` or ``zipf``.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    _form(a, b, offs, None)
    if a.shape[1] % _BLOCK or b.shape[1] % _BLOCK:
        raise OperandError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; k and n must be multiples of {_BLOCK}"
        )
    _require_spread(tokens)
    if not hasattr(scale_a, "stride") or scale_a.dim() != 2:
        raise OperandError(
            "scale_a must be a matrix, (m, k / 128): a factor for every 128 elements of a row of a"
        )
    if scale_a.shape[0] > 1 and scale_a.stride(0) != 1:
        raise OperandError(
            f"scale_a has shape {tuple(scale_a.shape)} and strides {scale_a.stride()}; its columns must be "
            "contiguous: pass scale_a.t().contiguous().t()"
        )
    extents = _on_device("offs", offs, a, b)
    if out is None:
        import torch

        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or torch.bfloat16)
    elif out_dtype not in (None, out.dtype):
        raise OperandError(f"out has dtype {out.dtype}, but out_dtype is {out_dtype}; leave one of them out")
    values = [a, b, scale_a.t(), scale_b, extents, out]
    if a.shape[0] == 0:
        _of_blocks.of_nothing(values, (tokens,))
        return out
    _run(_of_blocks, values, config, (tokens,))
    return out


def _require_spread(tokens: str) -> None:
    if tokens not in SPREADS:
        raise OperandError(f"tokens={tokens!r} is not valid; valid: {', '.join(SPREADS)}")


def _run(
    operator: DeclaredOperator,
    values: Sequence[Any],
    config: AnyConfig,
    options: tuple[str | bool, ...],
) -> None:
    """Launch the kernel, or trace the call."""
    run = operator.traced if state.must_trace(values[0]) else operator
    run(values, (), as_config(config), options)


def _form(a: Any, b: Any, offs: Any, counts: Any) -> tuple[str, Any]:
    """Return the name and value of what says where rows are."""
    require_tensor("a", a)
    require_tensor("b", b)
    refuse_transforms("a")
    if (offs is None) == (counts is None):
        raise OperandError("give either offs, with a of (m, k), or counts, with a of (groups, m, k)")
    if b.dim() != 3:
        raise OperandError(f"b has shape {tuple(b.shape)}; it must be (groups, n, k)")
    wanted, form = (2, "(m, k) with offs") if counts is None else (3, "(groups, m, k) with counts")
    if a.dim() != wanted:
        raise OperandError(f"a has shape {tuple(a.shape)}; it must be {form}")
    return ("offs", offs) if counts is None else ("counts", counts)


def _require_gate(b: Any, activation: str, layout: str) -> None:
    if activation not in ("", *ACTIVATIONS):
        raise OperandError(f"activation={activation!r} is not valid; valid: {', '.join(ACTIVATIONS)}")
    if layout not in WEIGHT_LAYOUTS:
        raise OperandError(f"layout={layout!r} is not valid; valid: {', '.join(WEIGHT_LAYOUTS)}")
    if activation and b.shape[1] % 2:
        raise OperandError(f"b has shape {tuple(b.shape)}; with an activation it must be (groups, 2 * n, k)")


def _on_device(name: str, given: Any, a: Any, b: Any) -> Any:
    """Return group ends or row counts as a tensor on the device of ``a``; those on the host are checked."""
    if hasattr(given, "stride") and given.device == a.device and given.device.type != "cpu":
        return given
    import torch

    groups, most = b.shape[0], a.shape[-2]
    try:
        values = given.tolist() if hasattr(given, "tolist") else list(given)
        fits = len(values) == groups
    except TypeError:
        values, fits = given, False
    if not fits or not all(type(value) is int for value in values):
        raise OperandError(f"{name} is {values}; it must be {groups} integers, one for each group of b")
    before = 0
    for at, value in enumerate(values):
        if not before <= value <= most:
            grow = "not below the one before it, " if name == "offs" else "at least 0 "
            raise OperandError(f"{name}[{at}] is {value}; it must be {grow}and at most {most}, the rows of a")
        before = value if name == "offs" else 0
    return torch.tensor(values, dtype=torch.int32, device=a.device)


def expected_mean(expected_rows: int | None) -> str:
    """Return the listed number of rows that is nearest, as problems have it."""
    if expected_rows is None:
        return ALL
    if type(expected_rows) is not int or expected_rows < 1:
        raise OperandError(f"expected_rows={expected_rows!r} must be an integer of at least 1")
    return str(min(MEANS, key=lambda value: abs(value - expected_rows)))


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
    for operator in (*_operators.values(), _of_blocks):
        operator.register()
