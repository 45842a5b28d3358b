"""Gradients of a GEMM: one formula, recorded around eager calls and registered for the operators.

``D = relu(alpha * A @ B + beta * C + bias)``. The gradients of A and B are GEMMs of ours, in the layouts
``kn`` and ``mn`` for a linear layer. Other activations are no part of the formula: while autograd records,
they are calls of torch behind the kernel, and what torch needs for their gradient is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import CutegenError, OperandError
from cutegen.families.gemm.operands import require_activation
from cutegen.torch_ops.stacked_gradients import are_stacked

if TYPE_CHECKING:
    import torch

    from cutegen.torch_ops.gemm_plan import Options

__all__ = [
    "activate",
    "autocast",
    "backward_of",
    "backward_of_operator",
    "fused_activation",
    "linear_gradients",
    "plain_linear",
    "record_gemm",
    "record_linear",
    "refuse_gradients",
    "require_columns",
    "setup_operator",
]

#: ``a @ b`` times a factor, by cutegen.gemm or, for operands that no kernel takes, by torch.
Multiply = Callable[..., Any]
#: ``a @ b`` of matrices if that was called before, and autograd is not to record it; else None.
Known = Callable[[Any, Any], Any]
_ROW_BYTES = 16  # what TMA asks of a pitch
#: How torch calls the two forms of gelu.
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def refuse_gradients(a: Any, b: Any, out: Any, options: Options, names: tuple[str, str] = ("a", "b")) -> None:
    """Raise if a call that autograd would have to record has no gradients.

    Args:
        a: The left operand, of which there may be gradients.
        b: The right one.
        out: What is written into, None for a new tensor.
        options: Of the GEMM.
        names: What the caller calls a and b.

    Raises:
        OperandError: It writes into a given tensor, or multiplies 8-bit operands.
    """
    c, _, _, bias, *_, more = options
    tensors = {names[0]: a, names[1]: b, "out": out, "c": c, "bias": bias}
    if out is not None:
        _refuse("a call with out= has no gradients", tensors)
    elif a.element_size() == 1 or (more is not None and more[0] is not None):
        _refuse("8-bit products have no gradients", tensors)


def _refuse(reason: str, tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if getattr(tensor, "requires_grad", False):
            raise OperandError(
                f"{name} requires grad, but {reason}; pass {name}.detach() or call under torch.no_grad()"
            )


def autocast(a: Any, b: Any, options: Options) -> tuple[Any, Any, Options] | None:
    """Return a call with its fp32 operands in the dtype of autocast; None if nothing is to be cast."""
    import torch

    kind = a.device.type
    if torch.float32 not in (a.dtype, b.dtype) or kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    c, alpha, beta, bias, activation, out_dtype, config, more = options
    a, b, c, bias = (
        tensor.to(dtype) if tensor is not None and tensor.dtype == torch.float32 else tensor
        for tensor in (a, b, c, bias)
    )
    return a, b, (c, alpha, beta, bias, activation, out_dtype, config, more)


def fused_activation(activation: str) -> str:
    """Return what the kernel does of an activation while autograd records.

    Raises:
        OperandError: There is no such activation.
    """
    require_activation(activation)
    return activation if activation == "relu" else ""


def activate(value: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation of what the kernel wrote while autograd records, by torch."""
    import torch

    if activation == fused_activation(activation):
        return value
    if activation == "silu":
        return torch.nn.functional.silu(value)
    return torch.nn.functional.gelu(value, approximate=_APPROXIMATE[activation])


def require_columns(x: Any, w: Any) -> None:
    """Compare the sizes of a linear layer.

    Raises:
        OperandError: Rows of x and of w have different lengths.
    """
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise OperandError(f"x has shape {tuple(x.shape)}; the last must be the {w.shape[1]} columns of w")


def record_gemm(gemm: Callable[..., Any], a: Any, b: Any, c: Any, bias: Any, options: Any) -> torch.Tensor:
    """Return ``gemm(a, b, c=c, bias=bias, **options)`` with its formula on record."""
    found: torch.Tensor = _gemm_function(gemm)(a, b, c, bias, options)
    return found


def record_linear(
    known: Known, gemm: Callable[..., Any], x: Any, w: Any, bias: Any, relu: bool, owners: tuple[Any, ...]
) -> torch.Tensor:
    """Return ``relu(x @ w.T + bias)`` by ``gemm`` with its formula on record; x has any leading dimensions.

    ``owners`` has at most one element: ``w``, or the parameter of which ``w`` is a cast. If it has a
    ``main_grad``, the gradient is added to that, in fp32.
    """
    found: torch.Tensor = _linear_function(known, gemm)(x, w, bias, relu, owners)
    return found


def _apply_of(function: Any) -> Callable[..., Any]:
    """Return ``apply`` without the part in Python, which serves torch.func and takes a microsecond."""
    import torch

    found: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return found


@cache
def _gemm_function(gemm: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs and records ``gemm``: made once, as the base class is torch's."""
    import torch

    class Gemm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any, c: Any, bias: Any, options: Any) -> torch.Tensor:
            found: torch.Tensor = gemm(a, b, c=c, bias=bias, **options)
            ctx.save_for_backward(a, b, bias, found if options["activation"] == "relu" else None)
            ctx.options = options
            return found

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
            a, b, bias, positive = ctx.saved_tensors
            for_a, for_b, for_c, for_bias, _ = ctx.needs_input_grad
            grad = _of_relu(grad, positive)
            dense, alpha = _dense(grad, a.dtype), ctx.options["alpha"]
            d_a = _times(gemm, dense, b.mT, alpha) if for_a else None
            d_b = _like_b(gemm, dense, a, b, alpha) if for_b else None
            d_c = grad * ctx.options["beta"] if for_c else None
            return d_a, d_b, d_c, grad.sum_to_size(bias.shape) if for_bias else None, None

    return _apply_of(Gemm)


def plain_linear(known: Known, gemm: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs and records ``x @ w.T`` and nothing else; x has any leading dimensions.

    Models call it most, and each argument of ``apply`` takes time.
    """
    import torch

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> torch.Tensor:
            ctx.save_for_backward(x, w)  # x itself: of a view, autograd loses track
            flat, b = _rows(x), w.mT
            found: torch.Tensor | None = known(flat, b)
            if found is None:  # the first time, or something is wrong
                require_columns(x, w)
                found = gemm(flat, b)
            if flat is x:
                return found
            if len(shape := x.shape) == 3:  # torch takes integers in less time than a tuple
                return found.view(shape[0], shape[1], w.shape[0])
            return found.view(*shape[:-1], w.shape[0])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
            x, w = ctx.saved_tensors
            for_x, for_w = ctx.needs_input_grad
            dense = _dense(_rows(grad), x.dtype)
            d_x = _product(known, gemm, dense, w) if for_x else None
            if d_x is not None and grad.dim() != 2:
                d_x = d_x.view_as(x)
            return d_x, _product(known, gemm, dense.mT, _rows(x)) if for_w else None

    return _apply_of(Plain)


def _rows(tensor: Any) -> Any:
    """Return a tensor as a matrix of its rows; one without dimensions is nobody's, and left as it is."""
    return tensor if tensor.dim() in (0, 2) else tensor.reshape(-1, tensor.shape[-1])


def _product(known: Known, gemm: Multiply, a: Any, b: Any) -> Any:
    found = known(a, b)
    return _times(gemm, a, b, 1.0) if found is None else found


@cache
def _linear_function(known: Known, gemm: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs and records a linear layer with a bias, relu or a buffer for its weight's gradient."""
    import torch

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, bias: Any, relu: bool, owners: Any) -> torch.Tensor:
            flat = _rows(x)
            found: torch.Tensor = gemm(flat, w.t(), bias=bias, activation="relu" if relu else "")
            ctx.owners = owners  # not saved: that may come back as a copy, without main_grad
            ctx.save_for_backward(x, w, found if relu else None)  # x itself: of a view, autograd loses track
            return found if flat is x else found.view(*x.shape[:-1], w.shape[0])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
            x, w, positive = ctx.saved_tensors
            for_x, for_w, for_bias, *_ = ctx.needs_input_grad
            grad = _of_relu(_rows(grad), positive)
            dense = _dense(grad, x.dtype)
            d_x = _product(known, gemm, dense, w) if for_x else None
            if d_x is not None and x.dim() != 2:
                d_x = d_x.view_as(x)
            d_w = _weight_gradient(known, gemm, dense, _rows(x), ctx.owners) if for_w else None
            return d_x, d_w, grad.sum(0) if for_bias else None, None, None

    return _apply_of(Linear)


def linear_gradients(gemm: Multiply, grad: Any, x: Any, w: Any, wanted: tuple[bool, bool]) -> tuple[Any, Any]:
    """Return the gradients of the matrices of ``x @ w.T`` by ``gemm``, None for those that are not wanted."""
    dense = _dense(grad, x.dtype)
    d_x = _times(gemm, dense, w, 1.0) if wanted[0] else None
    return d_x, _times(gemm, dense.mT, x, 1.0) if wanted[1] else None


def _weight_gradient(known: Known, gemm: Multiply, dense: Any, x: Any, owners: Any) -> Any:
    """Return the gradient of a weight; None where it was added to the ``main_grad`` of its owner."""
    owner: Any = owners[0] if owners else None
    total = getattr(owner, "main_grad", None)
    if total is None:
        return _product(known, gemm, dense.mT, x)
    if _fits(dense.mT) and _fits(x):
        gemm(dense.mT, x, out=total, c=total, out_dtype=total.dtype)
    else:
        total.add_(_times(gemm, dense.mT, x, 1.0))
    owner.grad_added_to_main_grad = True
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
    if grad.dtype is dtype and grad.is_contiguous():
        return grad
    return grad.to(dtype).contiguous()


def _times(gemm: Multiply, a: Any, b: Any, alpha: float) -> Any:
    if _fits(a) and _fits(b):
        try:
            return gemm(a, b, alpha=alpha)
        except OperandError:
            pass  # a gradient is never refused: what no kernel takes, torch does
        except (CutegenError, RuntimeError):
            if not are_stacked(a, b):
                raise
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
        named = zip(names, rest[:4], strict=False)
        _refuse("8-bit products have no gradients", {"a": a, "b": b, **dict(named)})
    ctx.save_for_backward(a, b, output, *rest[:4])
    ctx.rest = rest[4:]


def backward_of(gemm: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Return the gradients of the operator's arguments, as a function of what torch gives.

    Args:
        gemm: What computes products, called as the operator. A pre-activation is computed again.
    """

    def multiply(a: Any, b: Any, *, alpha: float) -> Any:
        return gemm(a, b, None, None, None, None, "", alpha, 1.0, "", None, None, False, False)

    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        a, b, output, *tensors = ctx.saved_tensors
        names, alpha, beta, activation, *others = ctx.rest
        if activation in ("", "relu"):
            grad = _of_relu(grad, output if activation else None)
        else:
            again = gemm(a, b, *tensors, names, alpha, beta, "", *others)
            grad = _of_activation(grad, again, activation)
        dense = _dense(grad, a.dtype)
        found: list[Any] = [None] * len(ctx.needs_input_grad)
        if ctx.needs_input_grad[0]:
            found[0] = _times(multiply, dense, b.mT, alpha)
        if ctx.needs_input_grad[1]:
            found[1] = _like_b(multiply, dense, a, b, alpha)
        for at, name in enumerate(names.split(), start=2):
            if ctx.needs_input_grad[at]:
                found[at] = grad * beta if name == "c" else grad.sum_to_size(tensors[at - 2].shape)
        return tuple(found)

    return backward


def backward_of_operator(ctx: Any, grad: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments, by itself."""
    import torch

    return backward_of(torch.ops.cutegen.gemm.default)(ctx, grad)
