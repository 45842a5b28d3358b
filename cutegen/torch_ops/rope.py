"""``rope`` and ``rope_`` on torch tensors, eager and under ``torch.compile``; ``rope`` with gradients."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.errors import OperandError
from cutegen.families.calls import require_number, require_tensor
from cutegen.families.rope.family import ROPE, STYLES
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.autograd import autograd_records
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, refuse_transforms
from cutegen.torch_ops.stacked_gradients import or_stacked

if TYPE_CHECKING:
    import torch

    from cutegen.space import Config

__all__ = ["prepare", "rope", "rope_"]

_operator = DeclaredOperator(ROPE, state.default_dispatcher, state.workspaces)


class _Call(NamedTuple):
    """What a call says beside q and k.

    Attributes:
        tables: Cosines and sines by token, then by position, and positions; None for what is not given.
        weights: Of the norms; empty for none.
        eps: Of the norms.
        style: How pairs lie.
        config: Which kernel; None leaves the choice.
    """

    tables: tuple[Any, ...]
    weights: tuple[Any, ...]
    eps: float
    style: str
    config: Config | None

    def arguments(self, q: Any, k: Any, q_out: Any, k_out: Any, inverse: bool) -> tuple[Any, ...]:
        """Return values, scalars, config and options of the operator."""
        values = [q, k, *self.tables, *(self.weights or (None, None)), q_out, k_out]
        table = "tokens" if self.tables[0] is not None else "positions"
        return values, (self.eps,), self.config, (self.style, table, inverse)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    style: str = "half",
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    config: AnyConfig = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys with rotary position embedding, in one launch.

    The first ``2 * pairs`` elements of every head are rotated in pairs, the others are copied. Arithmetic is
    in fp32 and results are rounded once. Differentiable once in ``q`` and ``k``, unless norms are taken.

    Args:
        q: (..., heads, d) in bf16, fp16 or fp32 on a GPU; heads are contiguous, and may be part of a wider
            tensor. Every place before the last two axes is a token.
        k: The same with heads of its own.
        cos: A cosine for each pair, in fp32 or in the dtype of ``q``: (..., pairs) with a row for each token,
            or, as (tokens of a sequence, pairs), for each token of every sequence; with ``positions``, a
            table of (rows, pairs).
        sin: The sines, in the shape and dtype of ``cos``.
        positions: The row of the tables for each token, int32 or int64, in a shape that expands to that of
            the tokens. Rows beyond the tables are taken from their ends.
        style: ``half``: element i goes with element i + pairs, as in Llama; ``interleaved``: 2 * i with
            2 * i + 1, as in GPT-J.
        q_weight: (d,) in the dtype of ``q``: each head of ``q`` is first divided by its root mean square and
            multiplied by this. With ``k_weight`` or not at all.
        k_weight: The same for ``k``.
        eps: Added to the mean of the squares.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    call = _call(q, k, (cos, sin, positions), (q_weight, k_weight), style, eps, config)
    if _no_tokens(q):
        _check_of_nothing(q, k, call, MAKE)
        return q.clone(), k.clone()
    if not state.must_trace(q) and autograd_records(q, k, *call.tables, *call.weights):
        _refuse_gradients(call)
        q_out, k_out = _function().apply(_heads("q", q), _heads("k", k), call)
    else:
        q_out, k_out = _run(_heads("q", q), _heads("k", k), MAKE, MAKE, call)
    return q_out.view(q.shape), k_out.view(k.shape)


def rope_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    style: str = "half",
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    config: AnyConfig = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`rope`, in place: ``q`` and ``k`` hold the results and are returned.

    They may be parts of one tensor, such as a packed projection, of which the rest stays what it is. What is
    not rotated is not read either, unless norms are taken. There are no gradients.
    """
    call = _call(q, k, (cos, sin, positions), (q_weight, k_weight), style, eps, config)
    if _no_tokens(q):
        _check_of_nothing(q, k, call, None)
        return q, k
    if autograd_records(q, k):
        raise OperandError("q or k requires grad, but rope_ works in place and has no gradients; use rope")
    heads_q, heads_k = _heads("q", q), _heads("k", k)
    _run(heads_q, heads_k, heads_q, heads_k, call)
    return q, k


def _run(q: Any, k: Any, q_out: Any, k_out: Any, call: _Call, inverse: bool = False) -> tuple[Any, Any]:
    run = _operator.traced if state.must_trace(q) else _operator
    values, scalars, config, options = call.arguments(q, k, q_out, k_out, inverse)
    *_, q_found, k_found = run(values, scalars, config, options)
    return q_found, k_found


def _call(
    q: Any,
    k: Any,
    angles: tuple[Any, Any, Any],
    weights: tuple[Any, Any],
    style: str,
    eps: float,
    config: AnyConfig,
) -> _Call:
    """Return what a call says beside q and k; ``angles`` are cosines, sines and positions, as it gives them.

    Raises:
        OperandError: It says what no kernel computes.
    """
    cos, sin, positions = angles
    optional = {"positions": positions, "q_weight": weights[0], "k_weight": weights[1]}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in {"q": q, "k": k, "cos": cos, "sin": sin, **given}.items():
        require_tensor(name, tensor)
    refuse_transforms("q")
    if style not in STYLES:
        raise OperandError(f"style={style!r} is not valid; valid: {', '.join(STYLES)}")
    if q.dim() < 3 or k.dim() < 3 or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise OperandError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they must be (..., heads, d) with the "
            "same tokens and the same d"
        )
    if cos.shape != sin.shape or cos.dim() < 2:
        raise OperandError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; both must be (..., pairs)"
        )
    if 2 * cos.shape[-1] > q.shape[-1]:
        raise OperandError(
            f"cos has {cos.shape[-1]} columns, one for each pair, but heads have {q.shape[-1]} elements; at "
            f"most {q.shape[-1] // 2} pairs fit. Of a table that holds every column twice pass one half"
        )
    if (weights[0] is None) != (weights[1] is None):
        raise OperandError("only one of q_weight and k_weight is given; pass both or none")
    tables = _tables(q, cos, sin, positions)
    norms = () if weights[0] is None else weights
    return _Call(tables, norms, require_number("eps", eps), style, as_config(config))


def _no_tokens(q: Any) -> bool:
    return 0 in q.shape[:-2]


def _check_of_nothing(q: Any, k: Any, call: _Call, out: Any) -> None:
    """Raise if a call without tokens could not be one with them; ``out`` is None in place."""
    q, k = (heads.reshape(0, *heads.shape[-2:]) for heads in (q, k))
    values, _, _, options = call.arguments(q, k, *((q, k) if out is None else (out, out)), False)
    _operator.of_nothing(values, options)


def _tables(q: Any, cos: Any, sin: Any, positions: Any) -> tuple[Any, ...]:
    """Return cosines and sines by token, the same by position, and positions; what is not needed is None."""
    import torch

    places = q.shape[:-2]
    tokens = places.numel()
    cos, sin = as_rows("cos", cos), as_rows("sin", sin)
    if positions is not None:
        try:
            positions = positions.expand(places).reshape(-1).contiguous()  # one may be for all tokens
        except RuntimeError as error:
            raise OperandError(
                f"positions has shape {tuple(positions.shape)}; it must expand to that of the tokens, "
                f"{tuple(places)}"
            ) from error
    elif cos.shape[0] == tokens:
        return cos, sin, None, None, None
    elif cos.shape[0] == places[-1]:
        positions = torch.arange(places[-1], device=q.device).repeat(tokens // max(1, places[-1]))
    else:
        raise OperandError(
            f"cos has {cos.shape[0]} rows but q has {tokens} tokens; pass a row for each, or for each of a "
            "sequence, or positions"
        )
    return None, None, cos, sin, positions


def _heads(name: str, tensor: Any) -> Any:
    """Return heads as (tokens, heads, d), without a copy."""
    if tensor.dim() == 3:
        return tensor
    try:
        return tensor.view(-1, *tensor.shape[-2:])
    except RuntimeError as error:
        raise OperandError(
            f"{name} has strides {tuple(tensor.stride())}, under which its tokens are not evenly spaced; "
            f"pass {name}.contiguous()"
        ) from error


def _refuse_gradients(call: _Call) -> None:
    """Raise if a call that autograd would have to record has no gradients."""
    if call.weights:
        raise OperandError("a norm in rope has no gradients; call it under torch.no_grad()")
    if any(t is not None and t.requires_grad for t in call.tables):
        raise OperandError("cos or sin requires grad, but rope has gradients of q and k only; detach them")


@cache
def _function() -> Any:
    """Return the autograd function: made once, as its base class is torch's."""
    import torch

    class Rope(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.save_for_backward(*call.tables)
            ctx.call = call._replace(tables=())
            return _run(q, k, MAKE, MAKE, call)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dq: Any, dk: Any) -> tuple[Any, ...]:
            call = ctx.call._replace(tables=ctx.saved_tensors, config=None)
            found = or_stacked(
                lambda: _run(dq.contiguous(), dk.contiguous(), MAKE, MAKE, call, inverse=True),
                lambda: (_turned(dq, call, inverse=True), _turned(dk, call, inverse=True)),
                *(dq, dk),
            )
            return (*found, None)

    return Rope


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient of the registered operator needs.

    Raises:
        OperandError: It has none.
    """
    _, _, *tables, q_weight, k_weight, eps, style, _, inverse, _, _ = inputs
    ctx.save_for_backward(*tables)
    ctx.call = _Call((), () if q_weight is None else (q_weight, k_weight), eps, style, None)
    ctx.inverse, ctx.count = inverse, len(inputs)
    if any(ctx.needs_input_grad):
        _refuse_gradients(ctx.call._replace(tables=tuple(tables)))


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments."""
    call = ctx.call._replace(tables=tuple(ctx.saved_tensors))
    inverse = not ctx.inverse

    def single() -> tuple[Any, ...]:
        dq, dk = (grad.contiguous() for grad in grads)
        values, scalars, config, options = call.arguments(dq, dk, MAKE, MAKE, inverse)
        return tuple(_operator.traced(values, scalars, config, options)[-2:])

    found = or_stacked(single, lambda: tuple(_turned(grad, call, inverse) for grad in grads), *grads)
    return (*found, *[None] * (ctx.count - 2))


def _turned(heads: Any, call: _Call, inverse: bool) -> Any:
    """Return heads (tokens, heads, d) rotated by torch's operators, in fp32 and rounded once."""
    import torch

    cos, sin, *_ = call.tables
    if cos is None:
        *_, cos, sin, positions = call.tables
        rows = positions.clamp(0, cos.shape[0] - 1)  # as the kernel takes those beyond the tables
        cos, sin = cos[rows], sin[rows]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1) * (-1 if inverse else 1)
    pairs, width = cos.shape[-1], heads.shape[-1]
    rotated, rest = heads.split((2 * pairs, width - 2 * pairs), -1)
    interleaved = call.style == "interleaved"
    shape = (*rotated.shape[:-1], *((pairs, 2) if interleaved else (2, pairs)))
    one, other = rotated.float().reshape(shape).unbind(-1 if interleaved else -2)
    parts = one * cos - other * sin, other * cos + one * sin
    found = torch.stack(parts, -1 if interleaved else -2).view(rotated.shape)
    return torch.cat((found.to(heads.dtype), rest), -1)


def prepare() -> None:
    """Import torch and register the operator with it; again does nothing."""
    state.prepare()
    _operator.register(_backward, _setup)
