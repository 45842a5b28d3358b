"""What a call of a deployment asks for, read off its tensors; part of the loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cutegen.deploy.launch import DTYPES, PinnedError

__all__ = [
    "SCALES",
    "GemmOperands",
    "call_key",
    "check_apart",
    "check_grad",
    "check_kinds",
    "check_layer",
    "check_options",
    "dtype_of",
    "overlap",
    "span_bytes",
    "write_counter",
]

SCALES = ("scale_a", "scale_b")
#: How many operands are matrices: a, b, out, c.
_MATRICES = 4
_LAYOUTS = {("k", "k"): "tn", ("k", "n"): "nn", ("m", "n"): "nt", ("m", "k"): "tt"}


class GemmOperands(NamedTuple):
    """The tensors of a call of a GEMM, None for what is not there, and its scales, none or two."""

    a: Any
    b: Any
    out: Any
    c: Any
    bias: Any
    scales: Any

    @property
    def matrices(self) -> list[Any]:
        """Those of a, b, out and c that are there."""
        return [tensor for tensor in self[:_MATRICES] if tensor is not None]

    @property
    def vectors(self) -> list[Any]:
        """The bias if it is there, and the scales."""
        return [*(() if self.bias is None else (self.bias,)), *self.scales]


def dtype_of(tensor: Any) -> tuple[str, int, int, str]:
    try:
        return DTYPES[str(tensor.dtype)]
    except KeyError:
        raise PinnedError(f"an operand has dtype {tensor.dtype}, which no kernel takes") from None


def _check_tensor(name: str, value: Any) -> None:
    if not hasattr(value, "requires_grad"):
        raise PinnedError(f"{name} is {value!r:.40}; it must be a torch.Tensor")


def _check_matrix(name: str, value: Any) -> None:
    _check_tensor(name, value)
    if len(value.shape) not in (2, 3):
        raise PinnedError(
            f"{name} has shape {tuple(value.shape)}; it must be a matrix or a batch of matrices"
        )


def check_kinds(operands: dict[str, Any], scales: Any) -> None:
    """Refuse operands that are no tensors; a and b must be there, and be matrices."""
    _check_matrix("a", operands["a"])
    _check_matrix("b", operands["b"])
    if not isinstance(scales, (tuple, list)) or len(scales) not in (0, 2):
        raise PinnedError(f"scales is {scales!r:.40}; it must be (scale_a, scale_b)")
    for name, value in {**operands, **dict(zip(SCALES, scales, strict=False))}.items():
        if value is not None or name in SCALES:
            _check_tensor(name, value)


def check_options(activation: Any, out_dtype: Any, **numbers: Any) -> None:
    """Refuse options of a GEMM that are nothing of their kind."""
    if not isinstance(activation, str):
        raise PinnedError(f"activation is {activation!r:.40}; it must be text")
    if out_dtype is not None and not str(out_dtype).startswith("torch."):
        raise PinnedError(f"out_dtype is {out_dtype!r:.40}; it must be a torch.dtype")
    for name, value in numbers.items():
        try:
            float(value)
        except (TypeError, ValueError):
            raise PinnedError(f"{name} is {value!r:.40}; it must be a number") from None


def check_layer(x: Any, w: Any) -> None:
    """Refuse operands of a linear layer that are no tensors, or have too few dimensions."""
    _check_tensor("x", x)
    _check_tensor("w", w)
    if len(x.shape) == 0 or len(w.shape) != 2:
        raise PinnedError(
            f"x has shape {tuple(x.shape)} and w {tuple(w.shape)}; they must be (..., k) and (n, k)"
        )


def call_key(operands: GemmOperands, options: Any) -> tuple[Any, ...]:
    """Describe a call in the order of FIELDS."""
    a, b, out, c, bias, scales = operands
    alpha, beta, _, activation, fast_accum, any_order = options
    _check_matrix("a", a)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.shape != (*a.shape[:-2], k, n):
        raise PinnedError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; they do not multiply")
    for name, tensor in (("out", out), ("c", c)):
        if tensor is not None and tensor.shape != (*a.shape[:-1], n):
            raise PinnedError(f"{name} has shape {tuple(tensor.shape)}; it must be {(*a.shape[:-1], n)}")
    if b.dtype != a.dtype or any(t is not None and t.dtype != out.dtype for t in (c, bias)):
        raise PinnedError("a and b must have one dtype, and so must out, c and bias")
    along = ""
    if bias is not None:
        along = "n" if bias.shape == (n,) else "m"
        if bias.shape not in ((n,), (m, 1)) or (bias.numel() > 1 and bias.stride(0) != 1):
            raise PinnedError(
                f"bias has shape {tuple(bias.shape)}; it must be ({n},) or ({m}, 1), contiguous"
            )
    ab_dtype = dtype_of(a)[0]
    unaligned = any(not _is_aligned(t) for t in (out, c) if t is not None)
    return (
        *(m, n, k, a.shape[0] if a.dim() == 3 else 1, ab_dtype, dtype_of(out)[0]),
        *(_LAYOUTS[_axis(a, "mk"), _axis(b, "kn")], unaligned, alpha, beta, along, activation),
        *(bool(scales), ab_dtype in ("e4m3", "e5m2") and not fast_accum, any_order),
    )


def _axis(tensor: Any, axes: str) -> str:
    """Return the axis along which an operand is contiguous."""
    ones = [at for at in (-1, -2) if tensor.stride(at) == 1]
    if not ones:
        raise PinnedError(f"an operand has strides {tensor.stride()}; its rows or columns must be contiguous")
    return axes[max(ones, key=lambda at: int(tensor.shape[at]))]


def _is_aligned(tensor: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    places = (tensor.data_ptr(), *(step * tensor.element_size() for step in (tensor.shape[-1], *steps)))
    return not any(place % 16 for place in places)


def check_apart(out: Any, c: Any, **inputs: Any) -> None:
    """Refuse an ``out`` that shares memory with an input, or some of its memory with ``c``."""
    for name, tensor in inputs.items():
        if tensor is not None and overlap(tensor, out):
            raise PinnedError(
                f"out shares memory with {name}, which is read while out is written; pass another"
            )
    if c is not None and (c.data_ptr() != out.data_ptr() or c.stride() != out.stride()) and overlap(c, out):
        raise PinnedError("out shares some of its memory with c; pass out=c itself, or apart from it")


def check_grad(**tensors: Any) -> None:
    """Refuse tensors whose gradients the caller would miss; for calls that autograd would record."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor is not True and tensor.requires_grad:
            raise PinnedError(f"{name} requires grad, but pinned kernels compute no gradients")


def write_counter(torch: Any) -> Callable[[Sequence[Any]], None]:
    """Return what lets autograd, which sees no write by an address, know which tensors were written."""
    count: Callable[[Sequence[Any]], None] | None = getattr(torch._C, "_increment_version", None)
    if count is not None:
        with torch.inference_mode():
            unseen = torch.empty(0, dtype=torch.float32, device="cpu")
        try:  # torch's own function takes twice as long
            count((unseen,))
        except (RuntimeError, TypeError):
            count = None

    def one_by_one(tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    return count or one_by_one


def span_bytes(tensor: Any) -> int:
    """Return the bytes from a tensor's first element to behind its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * int(tensor.element_size())


def _row_bytes(tensor: Any) -> int:
    axes = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    return int(sum((size - 1) * step for size, step in axes) + 1) * int(tensor.element_size())


def overlap(x: Any, y: Any) -> bool:
    """Whether two tensors may share an element: exact for rows of one pitch, else by address ranges."""
    start_x, start_y = x.data_ptr(), y.data_ptr()
    if not (start_x < start_y + span_bytes(y) and start_y < start_x + span_bytes(x)):
        return False
    rows = [t.stride(0) * t.element_size() for t in (x, y) if t.dim() > 1]
    if len(rows) != 2 or rows[0] != rows[1] or rows[0] == 0:
        return True
    width_x, width_y = map(_row_bytes, (x, y))
    ahead = (start_y - start_x) % rows[0]
    return bool(ahead < width_x or ahead + width_y > rows[0])
