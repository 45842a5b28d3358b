"""``gated_gemm`` on torch tensors, eager and under ``torch.compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutegen.errors import OperandError
from cutegen.families.gated.family import ACTIVATIONS
from cutegen.families.gated_gemm.family import GATED_GEMM, WEIGHT_LAYOUTS
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import MAKE, DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.rows import as_rows, require_rows

if TYPE_CHECKING:
    import torch

__all__ = ["gated_gemm", "prepare"]

_operator = DeclaredOperator(GATED_GEMM, state.default_dispatcher, state.workspaces)


def gated_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    activation: str = "silu",
    *,
    layout: str = "halves",
    out: torch.Tensor | None = None,
    return_pre: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``act(x @ w_gate.T) * (x @ w_up.T)`` from one kernel, of Hopper.

    Sums and the epilogue are in fp32 and every output is rounded once. There are no gradients; what they need
    beside ``x`` and ``w`` is what ``return_pre`` returns.

    Args:
        x: (..., k) in bf16 or fp16 on a GPU; k is a multiple of 8 and rows start at multiples of 16 bytes.
        w: The rows of both weights, (2 * n, k), as ``x``.
        activation: ``silu``, ``gelu`` (exact), ``gelu_tanh`` or ``relu``.
        layout: Of ``w``: ``halves``, the gate's rows first, or ``interleaved``, with them in even rows.
        out: Where the result goes, (..., n) in the dtype of ``x``.
        return_pre: Also return ``x @ w.T``, (..., 2 * n) with columns as the rows of ``w``.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Returns:
        The result; with ``return_pre`` a tuple of it and ``x @ w.T``.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    require_rows(x)
    if activation not in ACTIVATIONS:
        raise OperandError(f"activation={activation!r} is not valid; valid: {', '.join(ACTIVATIONS)}")
    if layout not in WEIGHT_LAYOUTS:
        raise OperandError(f"layout={layout!r} is not valid; valid: {', '.join(WEIGHT_LAYOUTS)}")
    if getattr(w, "dim", lambda: 0)() != 2 or w.shape[0] % 2:
        raise OperandError(f"w has shape {tuple(getattr(w, 'shape', ()))}; it must be (2 * n, k)")
    leading, columns = x.shape[:-1], w.shape[0] // 2
    values: list[Any] = [
        as_rows("x", x),
        w,
        MAKE if out is None else as_rows("out", out),
        MAKE if return_pre else None,
    ]
    options, chosen = (activation, layout), None if config is None else as_config(config)
    if x.numel() == 0 and w.numel() != 0 and x.shape[-1] == w.shape[1]:
        *_, y, pre = _operator.of_nothing(values)
    else:
        run = _operator.traced if state.must_trace(x) else _operator
        *_, y, pre = run(values, (), chosen, options)
    y = out if out is not None else y.view((*leading, columns))
    return (y, pre.view((*leading, 2 * columns))) if return_pre else y


def prepare() -> None:
    """Import torch and register the operator with it; again does nothing."""
    state.prepare()
    _operator.register()
