"""Tensors of a call to the problem of a declared family that they pose, every rule checked with its reason.

Nothing here imports torch; tensors are asked for their shape, strides, dtype and address only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutegen.dtypes import DTYPE_BYTES, SHORT_NAMES, TORCH_DTYPES, short_dtype
from cutegen.errors import OperandError, ProblemError
from cutegen.families.declared import (
    Declared,
    DeclaredFamily,
    DeclaredProblem,
    multiple,
)
from cutegen.families.declared.arguments import NONE, SAME
from cutegen.families.declared.problem import UNALIGNED
from cutegen.families.strides import is_aligned, may_repeat, overlap, refuse_negated
from cutegen.family import Option

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_of_nothing",
    "describe_call",
    "output_shapes",
    "refuse_overlap",
    "require_number",
    "require_tensor",
    "untold_size",
]

#: Stands for the tensor that tells a size where the call itself does.
_CALL = "the call"


def describe_call(
    family: DeclaredFamily,
    tensors: Mapping[str, torch.Tensor],
    wanted: frozenset[str],
    named: Mapping[str, Any] | None = None,
    *,
    device_type: str = "cuda",
) -> DeclaredProblem:
    """Return the problem that a call poses.

    Args:
        family: Whose.
        tensors: The tensors that were given, by argument name: inputs, and outputs of the caller's.
        wanted: The outputs that are to be made, whether given or not.
        named: Options and sizes that no input tells.
        device_type: Where tensors must be; tests pass ``cpu``.

    Raises:
        OperandError: A tensor cannot be an operand: names it, the rule, and what would be valid.
    """
    sizes, options = _collected(family, tensors, wanted, named, device_type)
    bound = (a for a in family.declared_arguments if a.name in tensors and not a.anywhere)
    aligned = all(_is_aligned(tensors[a.name], a.align_bytes) for a in bound)
    missing = [size.name for size in family.sizes if size.name not in sizes and size.default is None]
    if missing:
        raise untold_size(family, missing[0])
    try:
        return family.problem(
            {name: value for name, (value, _) in sizes.items()},
            {**options, UNALIGNED: not aligned},
        )
    except ProblemError as error:
        raise OperandError(str(error)) from error


def check_of_nothing(
    family: DeclaredFamily,
    tensors: Mapping[str, torch.Tensor],
    wanted: frozenset[str],
    named: Mapping[str, Any] | None = None,
    *,
    device_type: str = "cuda",
) -> None:
    """Check a call that computes nothing, as some extent is 0, by the rules that do not need a problem.

    These are presence, place, shape and dtype. Arguments are those of :func:`describe_call`. Sizes that are
    symbols of a compiler are not compared, and without a ``device_type`` tensors may be anywhere.

    Raises:
        OperandError: A tensor cannot be an operand: names it, the rule, and what would be valid.
    """
    _collected(family, tensors, wanted, named, device_type, least=0)


def _collected(
    family: DeclaredFamily,
    tensors: Mapping[str, torch.Tensor],
    wanted: frozenset[str],
    named: Mapping[str, Any] | None,
    device_type: str,
    *,
    least: int = 1,
) -> tuple[dict[str, tuple[int, str]], dict[str, str | bool]]:
    """Return the sizes, each with the tensor that told it first, and the options that a call has.

    Where sizes may be 0 nothing is read, so that strides and addresses are not asked for.
    """
    given_words = dict(named or {})
    sizes = _named_sizes(family, given_words)
    options = _named_dtypes(family, given_words)
    named = {**{o.name: False if o.is_flag else o.default for o in family.named_options}, **given_words}
    given = {o.name: o for o in family.options}
    for declared in family.declared_arguments:
        present = declared.name in tensors or declared.name in wanted
        if "=" in declared.when:
            _agree_with_option(declared, present, named)
        elif declared.when and declared.kind != "scalar":
            _agree_on_presence(declared, present, given[declared.when], options)
        if declared.name in tensors:
            tensor = tensors[declared.name]
            _check_place(declared.name, tensor, tensors, device_type)
            if least and declared.aligned:
                _require_aligned(declared, tensor)
            _take_sizes(declared, tensor, sizes, least)
            if least:
                _require_rows_apart(declared, tensor)
                refuse_negated(declared.name, tensor)
            _take_dtype(
                declared, tensor, options, given[declared.dtype].values if declared.dtype in given else ()
            )
    return sizes, {**named, **options}


def untold_size(family: DeclaredFamily, size: str) -> OperandError:
    """Return the error of a call of which nothing tells a size."""
    return OperandError(f"{family.name}: no tensor tells the size {size}; pass {size}= with the call")


def _named_sizes(family: DeclaredFamily, named: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Move the sizes that the call names out of ``named``."""
    found: dict[str, tuple[int, str]] = {}
    for size in family.named_sizes:
        if size.name in named:
            value = named.pop(size.name)
            if type(value) is bool or not hasattr(value, "__index__"):
                raise OperandError(f"{size.name}={value!r} must be an integer")
            found[size.name] = (value, _CALL)
    return found


def _named_dtypes(family: DeclaredFamily, named: dict[str, Any]) -> dict[str, str | bool]:
    """Move the dtypes of outputs that the call names out of ``named``."""
    found: dict[str, str | bool] = {}
    for option in family.dtypes_of_outputs:
        if option.name in named:
            value = short_dtype(str(named.pop(option.name)))
            if value not in option.values:
                raise OperandError(f"{option.name}={value!r} is not valid; valid: {', '.join(option.values)}")
            found[option.name] = value
    return found


def _agree_on_presence(
    declared: Declared, present: bool, option: Option, options: dict[str, str | bool]
) -> None:
    if not option.is_flag:
        if not present:
            options[declared.when] = NONE
        return
    before = options.setdefault(declared.when, present)
    if before != present:
        raise OperandError(
            f"{declared.name} and the others of {declared.when!r} go together; pass all or none"
        )


def _agree_with_option(declared: Declared, present: bool, named: Mapping[str, str | bool]) -> None:
    option = declared.when.partition("=")[0]
    if present != declared.is_present(named):
        raise OperandError(
            f"{declared.name} is {'given' if present else 'missing'}, but {option} is {named[option]}; "
            f"it goes with {declared.when}"
        )


def require_tensor(name: str, value: Any) -> None:
    """Do nothing if an argument of that name is a tensor.

    Raises:
        OperandError: It is none.
    """
    if not hasattr(value, "stride"):
        raise OperandError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")


def require_number(name: str, value: Any) -> float:
    """Return an argument of that name as a number.

    Raises:
        OperandError: It is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OperandError(f"{name}={value!r} must be a number") from error


def _check_place(
    name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], device_type: str
) -> None:
    require_tensor(name, tensor)
    first, other = next(iter(tensors.items()))
    if device_type and tensor.device.type != device_type:
        raise OperandError(f"{name} is on {tensor.device}; it must be on a {device_type} device")
    if tensor.device != other.device:
        raise OperandError(f"{name} is on {tensor.device} but {first} on {other.device}; use one device")


def _require_aligned(declared: Declared, tensor: torch.Tensor) -> None:
    align = declared.align_bytes
    if not _is_aligned(tensor, align):
        raise OperandError(
            f"{declared.name} has strides {tuple(tensor.stride())} and its data at byte "
            f"{tensor.data_ptr() % align} of {align}: every row must start at a multiple of {align} bytes; "
            f"pass a copy with such rows, padded where {declared.dims[-1]} is no such multiple"
        )


def _take_sizes(
    declared: Declared, tensor: torch.Tensor, sizes: dict[str, tuple[int, str]], least: int
) -> None:
    name, shape = declared.name, tuple(tensor.shape)
    form = f"({', '.join(declared.dims)}{',' if len(declared.dims) == 1 else ''})"
    if len(shape) != len(declared.dims):
        raise OperandError(f"{name} has shape {shape}; it must be {form}")
    for (times, dim), whole in zip(map(multiple, declared.dims), shape, strict=True):
        if type(whole) is not int:  # a symbol: to ask it is to fix it
            continue
        extent, rest = divmod(whole * times.denominator, times.numerator)
        if rest:
            raise OperandError(f"{name} has shape {shape}, but {whole} is no multiple of {times.numerator}")
        known, by = sizes.setdefault(dim, (extent, name))
        if type(known) is int and known != extent:
            raise OperandError(
                f"{name} has shape {shape}, which makes {dim} {extent}, but {by} makes it {known}"
            )
        if extent < least:
            raise OperandError(f"{name} has shape {shape}; {dim} must be at least {least}")


def _require_rows_apart(declared: Declared, tensor: torch.Tensor) -> None:
    name, shape, stride = declared.name, tuple(tensor.shape), tensor.stride()
    if shape and shape[-1] > 1 and stride[-1] != 1:
        raise OperandError(
            f"{name} has strides {stride}: its rows must be contiguous (stride 1 along {declared.dims[-1]}); "
            f"pass {name}.contiguous()"
        )
    if may_repeat(shape, stride):
        raise OperandError(
            f"{name} has strides {stride}, under which elements overlap; pass {name}.contiguous()"
        )


def _take_dtype(
    declared: Declared, tensor: torch.Tensor, options: dict[str, str | bool], values: tuple[str, ...]
) -> None:
    name, short = declared.name, SHORT_NAMES.get(str(tensor.dtype), "")
    if not values:
        if short != declared.dtype:
            raise OperandError(
                f"{name} has dtype {tensor.dtype}; it must be torch.{TORCH_DTYPES[declared.dtype]}"
            )
        return
    same = options.get("dtype") if SAME in values else None
    if short not in (*values, same):
        listed = [str(value) for value in (same, *values) if value in TORCH_DTYPES]
        known = ", ".join(f"torch.{TORCH_DTYPES[value]}" for value in dict.fromkeys(listed))
        raise OperandError(f"{name} has dtype {tensor.dtype}; valid: {known}")
    if short == same:
        short = SAME
    before = str(options.setdefault(declared.dtype, short))
    if before != short:
        other = TORCH_DTYPES[str(same) if before == SAME else before]
        raise OperandError(f"{name} has dtype {tensor.dtype} but others torch.{other}; they must agree")


def _is_aligned(tensor: torch.Tensor, align_bytes: int) -> bool:
    """Return whether every row of a tensor starts at a multiple of so many bytes."""
    if tensor.dim() < 2:
        return bool(tensor.data_ptr() % align_bytes == 0)
    fits = is_aligned(tuple(tensor.shape), tensor.stride(), -1, tensor.element_size(), align_bytes)
    return fits and tensor.data_ptr() % align_bytes == 0


def output_shapes(problem: DeclaredProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and short dtype of every output of ``problem``, by name."""
    arguments = problem.declared.arguments(problem)
    return {a.name: (a.shape, a.dtype) for a in arguments if a.kind == "out" and a.dtype in DTYPE_BYTES}


def refuse_overlap(family: DeclaredFamily, tensors: Mapping[str, torch.Tensor]) -> None:
    """Do nothing if every output is apart from all other tensors, or is exactly an input that it may be.

    Raises:
        OperandError: Two of them share memory.
    """
    written = [a for a in family.declared_arguments if a.kind in ("out", "inout") and a.name in tensors]
    for argument in written:
        out = tensors[argument.name]
        for name, tensor in tensors.items():
            if name == argument.name or not overlap(out, tensor):
                continue
            same = out.data_ptr() == tensor.data_ptr() and out.stride() == tensor.stride()
            if name in argument.may_alias and same:
                continue
            allowed = [other for other in argument.may_alias if other in tensors]
            may = f"it may only be {' or '.join(allowed)} itself" if allowed else "pass another"
            raise OperandError(f"{argument.name} shares memory with {name}; {may}")
