"""Tensors to a problem: every check that an operand must pass, each with its reason.

Nothing here imports torch; tensors are asked for their shape, strides, dtype and address only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from cutegen.dtypes import SHORT_NAMES, TMA_ALIGN_BYTES, TORCH_DTYPES
from cutegen.errors import OperandError, ProblemError
from cutegen.families.gemm.problem import (
    ACTIVATIONS,
    BLOCKS_FAMILY,
    FACTOR_BLOCK,
    FP8_DTYPES,
    LAYOUTS,
    OUT_DTYPES,
    Epilogue,
    Problem,
)
from cutegen.families.strides import (
    View,
    is_aligned,
    may_repeat,
    normal_view,
    overlap,
    refuse_negated,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Operands",
    "Request",
    "check_traced",
    "describe",
    "out_dtype_name",
    "refuse_inputs",
    "refuse_part_of_c",
    "refuse_shared",
    "require_activation",
    "require_numbers",
]

_LAYOUT_OF = {axes: letters for letters, axes in LAYOUTS.items()}
#: What most operands are: bytes of their elements by dtype, and where these are.
_USUAL, _STRIDED = {"bf16": 2, "fp16": 2}, "torch.strided"
_AS_THEY_ARE = (None, None, None)


@dataclass(eq=False)
class Request:
    """The arguments of one GEMM, as the caller gave them."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None = None
    c: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    bias: torch.Tensor | None = None
    activation: str = ""
    out_dtype: torch.dtype | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    fast_accum: bool = False
    any_order: bool = False

    @property
    def has_factors(self) -> bool:
        """Whether the scales are factors of blocks, and not one for each operand."""
        scales = [scale for scale in (self.scale_a, self.scale_b) if scale is not None]
        return any(scale.dim() == 2 and scale.numel() != 1 for scale in scales)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that were given, by argument name."""
        names = ("a", "b", "out", "c", "bias", "scale_a", "scale_b")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


@dataclass
class Operands:
    """What a request amounts to.

    Attributes:
        problem: What is to be computed; None if there is nothing to multiply (a size is 0).
        shape: Shape of the result.
        out_dtype: Short name of the result's dtype.
        epilogue: What is fused behind the GEMM.
        views: For each tensor that the kernel takes, in its order: the view that replaces it, or None.
        dense: Whether a, b and out are known to be matrices without gaps.
    """

    problem: Problem | None
    shape: tuple[int, ...]
    out_dtype: str
    epilogue: Epilogue
    views: tuple[View | None, ...]
    dense: bool = field(default=False, compare=False)


def describe(request: Request, *, device_type: str = "cuda") -> Operands:
    """Check every operand of ``request`` and return the problem that they pose.

    Args:
        request: The arguments of the call.
        device_type: Where tensors must be; tests pass ``cpu``.

    Raises:
        OperandError: A tensor or a number cannot be an operand: names it, the rule, and what would be valid.
    """
    usual = _usual(request, device_type)
    if usual is not None:
        return usual
    ab_dtype, out_dtype = _check_kinds_and_dtypes(request, device_type)
    (batch, m, n, k), epilogue, extras = _check_sizes(request)
    shape = (m, n) if request.a.dim() == 2 else (batch, m, n)
    if 0 in (batch, m, n, k):
        first: list[View | None] = [None] * (4 if epilogue.beta else 3)
        return Operands(None, shape, out_dtype, epilogue, (*first, *extras))
    a_axis, a = _input("a", request.a, "mk")
    b_axis, b = _input("b", request.b, "kn")
    outputs = {"out": request.out, "c": request.c if epilogue.beta else None}
    aligned, views = _outputs({name: tensor for name, tensor in outputs.items() if tensor is not None})
    first = [a, b, *([] if request.out is not None else [None]), *views]
    promote = ab_dtype in FP8_DTYPES and not request.fast_accum
    try:
        problem = Problem(
            *(m, n, k, batch, ab_dtype, out_dtype),
            layout=_LAYOUT_OF[a_axis, b_axis],
            unaligned_out=not aligned,
            epilogue=epilogue,
            promote=promote,
            any_order=request.any_order,
            family=BLOCKS_FAMILY if request.has_factors else "gemm",
        )
    except ProblemError as error:
        raise OperandError(str(error)) from error
    return Operands(problem, shape, out_dtype, epilogue, (*first, *extras))


def check_traced(request: Request) -> None:
    """Check operands that a compiler traces: where they are, dtypes and shapes, but not how they lie.

    Shapes are left to the call where some size is a symbol, and so are numbers that are symbols.

    Raises:
        OperandError: As :func:`describe`.
    """
    _check_kinds_and_dtypes(request, "")
    if all(type(size) is int for tensor in request.tensors.values() for size in tensor.shape):
        _check_sizes(request)


def refuse_inputs(a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor], device_type: str) -> None:
    """Do nothing if two matrices can be multiplied, whatever else belongs to the call.

    Args:
        a: What the caller calls the left one, and the matrix.
        b: The same of the right one, or its transpose, since the rules are the same.
        device_type: As for :func:`describe`; empty if how they lie in memory is not known either.

    Raises:
        OperandError: As :func:`describe`, in the caller's names.
    """
    _check_kinds({a[0]: a[1], b[0]: b[1]}, device_type)
    _check_input_dtypes(a, b)
    for name, tensor in (a, b) if device_type else ():
        _input(name, tensor, "mk")


def _usual(request: Request, device_type: str) -> Operands | None:
    """Return what a plain product of dense, aligned matrices in 16 bits amounts to; None for all others.

    Most requests are such, and a first call waits for the checks: whatever is in doubt is left to them.
    """
    a, b, out = request.a, request.b, request.out
    plain = request.c is None and request.bias is None and request.scale_a is None and request.scale_b is None
    plain = plain and type(request.alpha) is type(request.beta) is float
    plain = plain and request.alpha == 1.0 == request.beta
    if not plain or request.activation or request.fast_accum or out is None:
        return None
    try:
        dtype = _short_name(a.dtype)
        same = a.dtype == b.dtype == out.dtype and dtype in _USUAL
        same = same and request.out_dtype in (None, out.dtype)
        device = a.device
        alike = device == b.device == out.device and device.type == device_type
        if not (same and alike and str(a.layout) == _STRIDED and a.layout == b.layout == out.layout):
            return None
        of_a, of_b, result = tuple(a.shape), tuple(b.shape), tuple(out.shape)
        along_a, along_b = _dense_axis(of_a, a.stride()), _dense_axis(of_b, b.stride())
        if not along_a or not along_b or _dense_axis(result, out.stride()) != -1:
            return None
        addresses = a.data_ptr() | b.data_ptr() | out.data_ptr()
        if a.is_neg() or b.is_neg() or out.is_neg():
            return None
    except AttributeError:
        return None
    (m, k), (rows, n) = of_a, of_b
    size = _USUAL[dtype]
    reach = addresses | of_a[along_a] * size | of_b[along_b] * size | n * size
    if rows != k or result != (m, n) or reach % TMA_ALIGN_BYTES:
        return None
    layout = _LAYOUT_OF["mk"[along_a], "kn"[along_b]]
    try:
        problem = Problem(m, n, k, 1, dtype, dtype, layout, any_order=request.any_order)
    except ProblemError:
        return None
    return Operands(problem, result, dtype, problem.epilogue, _AS_THEY_ARE, dense=True)


def out_dtype_name(a_dtype: torch.dtype, out_dtype: torch.dtype | None, name: str = "a") -> str:
    """Return the short name of the result's dtype, the usual one of ``a_dtype`` if none is wished for.

    Args:
        a_dtype: Of the operands.
        out_dtype: What is wished for.
        name: What the caller calls the left operand.

    Raises:
        OperandError: There is no such GEMM.
    """
    short = _short_name(a_dtype)
    if short not in OUT_DTYPES:
        known = [name for name in OUT_DTYPES if name in TORCH_DTYPES]
        raise OperandError(f"{name} has dtype {a_dtype}; supported: {_torch_names(known)}")
    valid = OUT_DTYPES[short]
    if out_dtype is None:
        return valid[0]
    found = _short_name(out_dtype)
    if found not in valid:
        raise OperandError(f"the result cannot have dtype {out_dtype}; of {a_dtype}: {_torch_names(valid)}")
    return found


def _short_name(dtype: torch.dtype) -> str:
    """Return our name of a torch dtype, empty if there is none."""
    return SHORT_NAMES.get(str(dtype), "")


def _torch_names(short: Iterable[str]) -> str:
    return ", ".join(f"torch.{TORCH_DTYPES[name]}" for name in short)


# --- what an operand is ---


def _check_kinds_and_dtypes(request: Request, device_type: str) -> tuple[str, str]:
    """Check all that does not depend on sizes; return the short names of dtypes, inputs' and result's."""
    _check_kinds({"a": request.a, "b": request.b, **request.tensors}, device_type)
    _check_numbers(request)
    return _check_dtypes(request)


def _check_sizes(request: Request) -> tuple[tuple[int, int, int, int], Epilogue, list[View | None]]:
    """Check all shapes; return batch, m, n and k, the epilogue, and views of the bias and the scales."""
    batch, m, n, k = _check_shapes(request)
    along, bias = _check_bias(request, m, n)
    epilogue = _epilogue(request, along)
    extras: list[View | None] = [bias] if along else []
    if request.has_factors:
        extras += _factor_views(request, m, n, k)
    elif epilogue.scale:
        extras += [_scale_view(name, getattr(request, name)) for name in ("scale_a", "scale_b")]
    return (batch, m, n, k), epilogue, extras


def _check_kinds(tensors: Mapping[str, torch.Tensor], device_type: str) -> None:
    where, first = None, next(iter(tensors))
    for name, tensor in tensors.items():
        for word in ("stride", "data_ptr", "layout", "get_device"):  # a generator takes longer than these
            if not hasattr(tensor, word):
                raise OperandError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if str(tensor.layout) != "torch.strided":
            raise OperandError(
                f"{name} has layout {tensor.layout}; it must be strided, such as {name}.to_dense()"
            )
        device = tensor.device
        if device_type and device.type != device_type:
            raise OperandError(f"{name} is on {device}; it must be on a {device_type} device")
        if where is not None and device != where:
            raise OperandError(
                f"{name} is on {device} but {first} is on {where}; all operands must be on one device"
            )
        where = device
        refuse_negated(name, tensor)


def _check_numbers(request: Request) -> None:
    require_numbers(request.alpha, request.beta)
    if request.c is None and request.beta != 1.0:
        raise OperandError(f"beta={request.beta} scales c, which was not given")
    require_activation(request.activation)


def require_numbers(alpha: float, beta: float) -> None:
    """Do nothing if the factors of a GEMM are numbers; torch can trace this.

    Raises:
        OperandError: One is none.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if type(value) is not float and not isinstance(value, Real):
            raise OperandError(f"{name} is a {type(value).__name__}; it must be a number")


def require_activation(activation: str) -> None:
    """Do nothing if a GEMM has such an activation.

    Raises:
        OperandError: It has none.
    """
    if activation not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS[1:])
        raise OperandError(f"unknown activation {activation!r}; valid: {known} or ''")


def _check_dtypes(request: Request) -> tuple[str, str]:
    """Check all dtypes; return the short names of the inputs' and the result's."""
    a, out = request.a, request.out
    _check_input_dtypes(("a", a), ("b", request.b))
    wish = request.out_dtype
    if out is not None:
        if wish is not None and wish != out.dtype:
            raise OperandError(f"out has dtype {out.dtype} but out_dtype={wish}; they must agree")
        wish = out.dtype
    result = out_dtype_name(a.dtype, wish)
    for name, tensor in (("c", request.c), ("bias", request.bias)):
        if tensor is not None and _short_name(tensor.dtype) != result:
            want = TORCH_DTYPES[result]
            raise OperandError(
                f"{name} has dtype {tensor.dtype} but the result torch.{want}; they must agree"
            )
    return _short_name(a.dtype), result


def _check_input_dtypes(a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor]) -> None:
    """Check the dtypes of both inputs, each given with its name."""
    (first, left), (second, right) = a, b
    out_dtype_name(left.dtype, None, first)
    if right.dtype != left.dtype:
        raise OperandError(f"{second} has dtype {right.dtype} but {first} has {left.dtype}; they must agree")


def _check_shapes(request: Request) -> tuple[int, int, int, int]:
    """Check all shapes; return batch, m, n and k."""
    a, b = tuple(request.a.shape), tuple(request.b.shape)
    for name, shape in (("a", a), ("b", b)):
        if len(shape) not in (2, 3):
            raise OperandError(f"{name} has shape {shape}; it must be a matrix or a batch of matrices")
    if len(a) != len(b):
        raise OperandError(f"b has shape {b} but a has {a}; both must be matrices or both batches")
    if a[-1] != b[-2]:
        raise OperandError(f"b has shape {b}: its {b[-2]} rows must be the {a[-1]} columns of a, shaped {a}")
    if a[:-2] != b[:-2]:
        raise OperandError(f"b has shape {b} but a has {a}; their batches must agree (nothing is broadcast)")
    want = (*a[:-1], b[-1])
    for name, tensor in (("out", request.out), ("c", request.c)):
        if tensor is not None and tuple(tensor.shape) != want:
            raise OperandError(f"{name} has shape {tuple(tensor.shape)}; it must have the result's, {want}")
    return (a[0] if len(a) == 3 else 1), a[-2], b[-1], a[-1]


def _epilogue(request: Request, bias: str) -> Epilogue:
    if (request.scale_a is None) != (request.scale_b is None):
        raise OperandError("only one of scale_a and scale_b was given; pass both or none")
    # beta == 0 drops C instead of multiplying it, as in BLAS: a NaN in C must not reach the result.
    has_c = request.c is not None and request.beta != 0
    scale = request.scale_a is not None and not request.has_factors
    return Epilogue(request.alpha != 1, has_c, bias, request.activation, scale)


def _check_bias(request: Request, m: int, n: int) -> tuple[str, View | None]:
    """Return which way the bias runs and the vector that the kernel reads."""
    if request.bias is None:
        return "", None
    shape, stride = tuple(request.bias.shape), request.bias.stride()
    if shape in ((n,), (1, n)):
        along, extent, step = "n", n, stride[-1]
    elif shape == (m, 1):
        along, extent, step = "m", m, stride[0]
    else:
        raise OperandError(
            f"bias has shape {shape}; it must be ({n},) to run along n or ({m}, 1) to run along m"
        )
    if extent > 1 and step != 1:
        raise OperandError(f"bias has stride {step}; it must be contiguous, such as bias.contiguous()")
    if len(shape) == 1 and step == 1:
        return along, None
    return along, View((extent,), (1,))


def _scale_view(name: str, scale: torch.Tensor) -> View | None:
    if scale.numel() != 1 or str(scale.dtype) != "torch.float32":
        raise OperandError(
            f"{name} has {scale.numel()} elements of {scale.dtype}; it must be one factor in torch.float32, "
            f"or a matrix with a factor for every block of {FACTOR_BLOCK} along k"
        )
    return None if scale.dim() == 1 else View((1,), (1,))


def _factor_views(request: Request, m: int, n: int, k: int) -> list[View | None]:
    """Check the factors of blocks and return the views that kernels take, whose columns are contiguous."""
    scale_a, scale_b = request.scale_a, request.scale_b
    assert scale_a is not None and scale_b is not None  # _epilogue refuses one alone
    if str(request.a.dtype) != "torch.float8_e4m3fn" or request.a.dim() != 2:
        raise OperandError(
            f"a has shape {tuple(request.a.shape)} and dtype {request.a.dtype}; factors of blocks are for "
            f"matrices in torch.float8_e4m3fn, others take one element in each of scale_a and scale_b"
        )
    if request.fast_accum:
        raise OperandError(
            f"fast_accum leaves sums to the tensor cores, but factors of blocks multiply them after every "
            f"{FACTOR_BLOCK} terms; leave it out"
        )
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if str(scale.dtype) != "torch.float32":
            raise OperandError(f"{name} has dtype {scale.dtype}; factors are in torch.float32")
    blocks_k, blocks_n = -(-k // FACTOR_BLOCK), -(-n // FACTOR_BLOCK)
    return [_factors_of_a(scale_a, m, blocks_k), _factors_of_b(scale_b, blocks_k, blocks_n)]


def _factors_of_a(scale: torch.Tensor, m: int, blocks_k: int) -> View | None:
    shape, stride = tuple(scale.shape), scale.stride()
    if shape != (m, blocks_k):
        raise OperandError(
            f"scale_a has shape {shape}; it must be {(m, blocks_k)}, one factor for every {FACTOR_BLOCK} "
            "elements of a row of a, or a single factor"
        )
    if (m > 1 and stride[0] != 1) or (blocks_k > 1 and stride[1] < m):
        raise OperandError(
            f"scale_a has strides {stride}; they must be (1, {m}) or with a larger second one: pass "
            "scale_a.t().contiguous().t()"
        )
    return None if stride[0] == 1 else View(shape, (1, stride[1]))


def _factors_of_b(scale: torch.Tensor, blocks_k: int, blocks_n: int) -> View | None:
    """Return how to see the factors of b as ``(blocks_k, blocks_n)``.

    They may come as torch takes them, which wants a multiple of 4 rows, or as the weight lies in memory, with
    a row for every 128 of its rows; along k they are contiguous in either form.
    """
    shape, stride = tuple(scale.shape), scale.stride()
    padded = -(-blocks_k // 4) * 4
    forms = {(blocks_k, blocks_n): 0, (padded, blocks_n): 0, (blocks_n, blocks_k): 1}
    if shape not in forms:
        raise OperandError(
            f"scale_b has shape {shape}; it must be {(blocks_k, blocks_n)} or {(blocks_n, blocks_k)}, one "
            f"factor for every {FACTOR_BLOCK} x {FACTOR_BLOCK} elements of b, or a single factor"
        )
    along_k = forms[shape]
    if shape[0] == shape[1]:  # both forms have this shape: the strides tell them apart
        along_k = 0 if stride[0] == 1 else 1
    pitch = stride[1 - along_k]
    if (blocks_k > 1 and stride[along_k] != 1) or (blocks_n > 1 and pitch < blocks_k):
        valid = "scale_b.contiguous()" if along_k else "scale_b.t().contiguous().t()"
        raise OperandError(
            f"scale_b has shape {shape} and strides {stride}; factors along k must be contiguous: "
            f"pass {valid}"
        )
    return (
        None if shape == (blocks_k, blocks_n) and stride[0] == 1 else View((blocks_k, blocks_n), (1, pitch))
    )


# --- how it lies in memory ---


def _input(name: str, tensor: torch.Tensor, axes: str) -> tuple[str, View | None]:
    """Return the axis along which an input is contiguous, and a view if its strides would not pass."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    size = tensor.element_size()
    dense = _dense_axis(shape, stride)
    if dense and shape[dense] * size % TMA_ALIGN_BYTES == 0 and tensor.data_ptr() % TMA_ALIGN_BYTES == 0:
        return axes[dense], None
    ones = [at for at in (-1, -2) if stride[at] == 1]
    if not ones:
        raise OperandError(
            f"{name} has strides {stride}: neither its rows nor its columns are contiguous; "
            f"pass {name}.contiguous()"
        )
    inner = max(ones, key=lambda at: shape[at])
    _check_repeats(name, shape, stride)
    step = TMA_ALIGN_BYTES // size
    if not is_aligned(shape, stride, inner, size):
        raise OperandError(
            f"{name} has strides {stride}: its pitch must be a multiple of {step} elements "
            f"({TMA_ALIGN_BYTES} bytes); pad it or pass {name}.contiguous()"
        )
    off = tensor.data_ptr() % TMA_ALIGN_BYTES
    if off:
        raise OperandError(
            f"{name} starts {off} bytes behind a multiple of {TMA_ALIGN_BYTES}; pass {name}.clone()"
        )
    return axes[inner], normal_view(shape, stride, inner, step)


def _outputs(tensors: dict[str, torch.Tensor]) -> tuple[bool, list[View | None]]:
    """Check out and c; return whether all of them are aligned to 16 bytes, and their views."""
    aligned = True
    views: list[View | None] = []
    for name, tensor in tensors.items():
        shape, stride, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        if _dense_axis(shape, stride) == -1:
            aligned &= (shape[1] * size) % TMA_ALIGN_BYTES == 0 and tensor.data_ptr() % TMA_ALIGN_BYTES == 0
            views.append(None)
            continue
        if shape[-1] > 1 and stride[-1] != 1:
            raise OperandError(f"{name} has strides {stride}: its rows must be contiguous (stride 1 along n)")
        _check_repeats(name, shape, stride)
        aligned &= is_aligned(shape, stride, -1, size) and tensor.data_ptr() % TMA_ALIGN_BYTES == 0
        views.append(normal_view(shape, stride, -1, TMA_ALIGN_BYTES // size))
    return aligned, views


def _dense_axis(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the contiguous axis of a matrix without gaps, counted from the end; 0 for all others.

    Most operands are such: nothing else is to be asked of their strides.
    """
    if len(shape) == 2 and shape[0] > 1 and shape[1] > 1:
        if stride == (shape[1], 1):
            return -1
        if stride == (1, shape[0]):
            return -2
    return 0


def _check_repeats(name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if may_repeat(shape, stride):
        raise OperandError(
            f"{name} has shape {shape} and strides {stride}, under which elements overlap; "
            f"pass {name}.contiguous()"
        )


# --- what two operands may share ---


def refuse_shared(name: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Do nothing if an input and ``out`` are apart.

    Raises:
        OperandError: They share memory.
    """
    if overlap(tensor, out):
        raise OperandError(f"out shares memory with {name}, which is read while out is written; pass another")


def refuse_part_of_c(c: torch.Tensor, out: torch.Tensor) -> None:
    """Do nothing if ``out`` is ``c`` or apart from it.

    Raises:
        OperandError: They share some of their memory.
    """
    same = c.data_ptr() == out.data_ptr() and c.stride() == out.stride()
    if not same and overlap(c, out):
        raise OperandError("out shares some of its memory with c; pass out=c itself, or apart from it")
