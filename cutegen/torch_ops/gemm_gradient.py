"""Gradients of a GEMM: one formula, recorded around eager calls and registered for the operators.

``D = relu(alpha * A @ B + beta * C + bias)``. The gradients of A and B are GEMMs of ours, in the layouts
``kn`` and ``mn`` for a linear layer. Other activations are no part of the formula: while autograd records,
they are calls of torch behind the kernel, and what torch needs for their gradient is kept once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import OperandError

if TYPE_CHECKING:
    import torch

    from cutegen.torch_ops.gemm_plan import Options

__all__ = [
    "activate",
    "autocast",
    "backward_of_operator",
    "fused_activation",
    "make_function",
    "refuse_gradients",
    "setup_operator",
]

#: ``a @ b`` times a factor, by cutegen.gemm or, for operands that no kernel takes, by torch.
Multiply = Callable[..., Any]
_ROW_BYTES = 16  # what TMA asks of a pitch
#: How torch calls the two forms of gelu.
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def refuse_gradients(a: Any, b: Any, out: Any, options: Options) -> None:
    """Raise if a call that autograd would have to record has no gradients.

    Raises:
        OperandError: It writes into a given tensor, or multiplies 8-bit operands.
    """
    c, _, _, bias, *_, more = options
    if out is not None:
        _refuse("a call with out= has no gradients", a=a, b=b, out=out, c=c, bias=bias)
    elif a.element_size() == 1 or (more is not None and more[0] is not None):
        _refuse("8-bit products have no gradients", a=a, b=b, c=c, bias=bias)


def _refuse(reason: str, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        if getattr(tensor, "requires_grad", False):
            raise OperandError(
                f"{name} requires grad, but {reason}; pass {name}.detach() or call under torch.no_grad()"
            )


def autocast(a: Any, b: Any, options: Options) -> tuple[Any, Any, Options] | None:
    """Return a call with its fp32 operands in the dtype of autocast; None if nothing is to be cast."""
    import torch

    kind = a.device.type
    if torch.float32 not in (a.dtype, b.dtype) or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    c, alpha, beta, bias, activation, out_dtype, config, more = options
    a, b, c, bias = (
        tensor.to(dtype) if tensor is not None and tensor.dtype == torch.float32 else tensor
        for tensor in (a, b, c, bias)
    )
    return a, b, (c, alpha, beta, bias, activation, out_dtype, config, more)


def fused_activation(activation: str) -> str:
    """Return what the kernel does of an activation while autograd records."""
    return activation if activation == "relu" else ""


def activate(value: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation of what the kernel wrote while autograd records, by torch."""
    import torch

    if activation == fused_activation(activation):
        return value
    if activation == "silu":
        return torch.nn.functional.silu(value)
    return torch.nn.functional.gelu(value, approximate=_APPROXIMATE[activation])


@cache
def make_function(gemm: Callable[..., Any]) -> Any:
    """Return the autograd function that runs ``gemm``: made once, as its base class is torch's.

    It takes ``(a, b, c, bias, transposed, fuse_wgrad, options)``. With ``transposed`` it is a linear layer:
    ``a`` may have any leading dimensions, and ``b`` is (n, k). With ``fuse_wgrad`` the gradient of ``b`` is
    added to ``b.main_grad`` in fp32 if there is one. ``options`` are keyword arguments of ``gemm``.
    """
    import torch

    class Gemm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, a: Any, b: Any, c: Any, bias: Any, transposed: bool, fuse_wgrad: bool, options: Any
        ) -> torch.Tensor:
            shape = a.shape
            if transposed and a.dim() != 2:
                a = a.reshape(-1, shape[-1])
            found = gemm(a, b.t() if transposed else b, c=c, bias=bias, **options)
            relu = options["activation"] == "relu"
            ctx.save_for_backward(a, b, bias, found if relu else None)
            ctx.options, ctx.transposed, ctx.shape, ctx.fuse_wgrad = options, transposed, shape, fuse_wgrad
            result: torch.Tensor = found if len(shape) == found.dim() else found.view(*shape[:-1], b.shape[0])
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
            a, b, bias, positive = ctx.saved_tensors
            for_a, for_b, for_c, for_bias = ctx.needs_input_grad[:4]
            if len(ctx.shape) != a.dim():
                grad = grad.reshape(-1, grad.shape[-1])
            grad = _of_relu(grad, positive)
            dense, alpha = _dense(grad, a.dtype), ctx.options["alpha"]
            d_a = d_b = None
            if for_a:
                d_a = _times(gemm, dense, b if ctx.transposed else b.mT, alpha).view(ctx.shape)
            if for_b:
                d_b = _weight_gradient(gemm, ctx, dense, a, b, alpha)
            d_c = grad * ctx.options["beta"] if for_c else None
            return d_a, d_b, d_c, grad.sum_to_size(bias.shape) if for_bias else None, None, None, None

    return Gemm


def _weight_gradient(gemm: Multiply, ctx: Any, dense: Any, a: Any, b: Any, alpha: float) -> Any:
    """Return the gradient of b, in the strides of b; None where it was added to ``b.main_grad``."""
    if not ctx.transposed:
        return _like_b(gemm, dense, a, b, alpha)
    total = getattr(b, "main_grad", None) if ctx.fuse_wgrad else None
    if total is None:
        return _times(gemm, dense.mT, a, alpha)
    if _fits(dense.mT) and _fits(a):
        gemm(dense.mT, a, out=total, c=total, alpha=alpha, out_dtype=total.dtype)
    else:
        total.add_(_times(gemm, dense.mT, a, alpha))
    b.grad_added_to_main_grad = True
    return None


def _like_b(gemm: Multiply, dense: Any, a: Any, b: Any, alpha: float) -> Any:
    """Return the gradient of b: contiguous along k if b is, so that the parameter behind a view of it gets
    its own strides."""
    if b.stride(-2) == 1 and b.stride(-1) != 1:
        return _times(gemm, dense.mT, a, alpha).mT
    return _times(gemm, a.mT, dense, alpha)


def _of_relu(grad: Any, positive: Any) -> Any:
    import torch

    return grad if positive is None else torch.ops.aten.threshold_backward.default(grad, positive, 0)


def _of_activation(grad: Any, before: Any, activation: str) -> Any:
    import torch

    if activation == "silu":
        return torch.ops.aten.silu_backward.default(grad, before)
    return torch.ops.aten.gelu_backward.default(grad, before, approximate=_APPROXIMATE[activation])


def _dense(grad: Any, dtype: torch.dtype) -> Any:
    """Return a gradient as an operand: expanded ones, such as those of ``sum()``, become contiguous."""
    return grad.to(dtype).contiguous()


def _times(gemm: Multiply, a: Any, b: Any, alpha: float) -> Any:
    if _fits(a) and _fits(b):
        try:
            return gemm(a, b, alpha=alpha)
        except OperandError:
            pass  # a gradient is never refused: what no kernel takes, torch does
    found = a @ b
    return found if alpha == 1 else found * alpha


def _fits(matrix: Any) -> bool:
    """Return whether kernels can read it: contiguous along an axis, and a pitch of a multiple of 16 bytes."""
    rows, columns = matrix.stride(-2), matrix.stride(-1)
    pitch = rows if columns == 1 else columns if rows == 1 else 0
    return bool(pitch and pitch * matrix.element_size() % _ROW_BYTES == 0)


# --- the same for the registered operators, whose arguments are in the order of their schema ---


def setup_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient of ``cutegen::gemm`` needs.

    Raises:
        OperandError: The product has no gradient.
    """
    a, b, *rest = inputs
    names = rest[4].split()
    if a.element_size() == 1 or "scale_a" in names:
        _refuse("8-bit products have no gradients", a=a, b=b, **dict(zip(names, rest[:4], strict=False)))
    ctx.save_for_backward(a, b, output, *rest[:4])
    ctx.rest = rest[4:]


def backward_of_operator(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments; a pre-activation is computed again."""
    import torch

    a, b, output, *tensors = ctx.saved_tensors
    names, alpha, beta, activation, *others = ctx.rest
    if activation in ("", "relu"):
        grad = _of_relu(grad, output if activation else None)
    else:
        again = torch.ops.cutegen.gemm.default(a, b, *tensors, names, alpha, beta, "", *others)
        grad = _of_activation(grad, again, activation)
    dense = _dense(grad, a.dtype)
    multiply = _multiply_by_operator
    found: list[Any] = [None] * len(ctx.needs_input_grad)
    if ctx.needs_input_grad[0]:
        found[0] = _times(multiply, dense, b.mT, alpha)
    if ctx.needs_input_grad[1]:
        found[1] = _like_b(multiply, dense, a, b, alpha)
    for at, name in enumerate(names.split(), start=2):
        if ctx.needs_input_grad[at]:
            found[at] = grad * beta if name == "c" else grad.sum_to_size(tensors[at - 2].shape)
    return tuple(found)


def _multiply_by_operator(a: Any, b: Any, *, alpha: float) -> Any:
    import torch

    none = (None, None, None, None)
    return torch.ops.cutegen.gemm.default(a, b, *none, "", alpha, 1.0, "", None, None, False, False)
