"""Arguments of kernels as a family declares them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cutegen.dtypes import TMA_ALIGN_BYTES
from cutegen.errors import FamilyError, ProblemError
from cutegen.family import Kind

__all__ = [
    "NONE",
    "SAME",
    "Declared",
    "dtype_of",
    "integers",
    "multiple",
    "read",
    "row_starts",
    "scalar",
    "scratch",
    "update",
    "write",
]

#: Values of an option that holds a dtype: that of option ``dtype``; or that what it describes is absent,
#: which is the empty text in problems and signatures.
SAME, NONE = "same", "none"


@dataclass(frozen=True)
class Declared:
    """An argument as it is declared; build one with :func:`read`, :func:`write` and their like.

    Attributes:
        name: Its name.
        kind: What the kernel does with it.
        dtype: A short name of a dtype, or the option that holds one, or ``same``: that of option ``dtype``.
        dims: The sizes of its axes, in order; ``2n`` for an axis of twice the size ``n``, ``n/128`` for a
            128th of it, which must be whole.
        when: What says whether it is there: an option that is a flag, or whose value may be ``none``; or an
            option and the values with which it is there, such as ``layout=halves,interleaved``. Empty for
            always.
        may_alias: As :class:`cutegen.family.Argument` has it.
        values: Of a scalar: what it is in most runs, and in the check on awkward sizes.
        below: Of a tensor of integers: the size that those drawn for it stay below; empty for 128.
        aligned: Whether kernels take it only with rows that start at multiples of ``align_bytes``.
        anywhere: Whether its rows may start anywhere in every problem.
        align_bytes: Its rows start at multiples of so many bytes in problems that are not ``unaligned``: a
            power of two, at most 16. Fewer suffice where a kernel's accesses to it are narrower.
    """

    name: str
    kind: Kind
    dtype: str = ""
    dims: tuple[str, ...] = ()
    when: str = ""
    may_alias: tuple[str, ...] = ()
    values: tuple[float, float] = (1.0, -0.5)
    below: str = ""
    aligned: bool = False
    anywhere: bool = False
    align_bytes: int = TMA_ALIGN_BYTES

    def is_present(self, options: Mapping[str, str | bool]) -> bool:
        """Return whether a problem of these options has it."""
        option, equals, values = self.when.partition("=")
        return not option or (options[option] in values.split(",") if equals else bool(options[option]))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape in a problem of these sizes.

        Raises:
            ProblemError: A part of a size is not whole.
        """
        return tuple(_extent(times, size, sizes[size]) for times, size in map(multiple, self.dims))


def _extent(times: Fraction, size: str, value: int) -> int:
    """Return the extent of an axis; a size may be a symbol of torch, which integers alone multiply."""
    if times.denominator == 1:
        return times.numerator * value
    if value % times.denominator:
        raise ProblemError(f"{size}={value} must be a multiple of {times.denominator}")
    return times.numerator * value // times.denominator


def multiple(dim: str) -> tuple[Fraction, str]:
    """Return how many times which size an axis is: ``2n`` is twice ``n``, and ``n/128`` a 128th of it."""
    parts = re.fullmatch("([0-9]*)(.*?)(?:/([1-9][0-9]*))?", dim)
    assert parts is not None
    return Fraction(int(parts[1] or 1), int(parts[3] or 1)), parts[2]


def read(
    name: str,
    dtype: str,
    dims: Sequence[str],
    *,
    when: str = "",
    below: str = "",
    aligned: bool = False,
    anywhere: bool = False,
    align_bytes: int = TMA_ALIGN_BYTES,
) -> Declared:
    """Declare a tensor that kernels only read; its integers, such as places in another, stay below a size.

    Its rows may start anywhere in problems that say ``unaligned``, unless it is always ``aligned``; in all of
    them if ``anywhere``. Elsewhere they start at multiples of ``align_bytes``.
    """
    return Declared(
        *(name, "in", dtype, _dims(name, dims), when),
        below=below,
        aligned=aligned,
        anywhere=anywhere,
        align_bytes=align_bytes,
    )


def write(
    name: str,
    dtype: str,
    dims: Sequence[str],
    *,
    when: str = "",
    may_alias: Sequence[str] = (),
    align_bytes: int = TMA_ALIGN_BYTES,
) -> Declared:
    """Declare a tensor that kernels write completely; it may be one of the inputs in ``may_alias``.

    Its rows start at multiples of ``align_bytes`` in problems that do not say ``unaligned``.
    """
    return Declared(name, "out", dtype, _dims(name, dims), when, tuple(may_alias), align_bytes=align_bytes)


def update(
    name: str,
    dtype: str,
    dims: Sequence[str],
    *,
    when: str = "",
    align_bytes: int = TMA_ALIGN_BYTES,
) -> Declared:
    """Declare a tensor that kernels read and write in place; ``align_bytes`` as of :func:`write`."""
    return Declared(name, "inout", dtype, _dims(name, dims), when, align_bytes=align_bytes)


def _dims(name: str, dims: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of a tensor; a text is the only one, since ``("m")`` is no tuple."""
    found = (dims,) if isinstance(dims, str) else tuple(dims)
    for dim in found:
        if not isinstance(dim, str):
            raise FamilyError(
                f"argument {name}: axis {dim!r} is no text; name a size, which may be fixed, such as 'n'"
            )
    return found


def scalar(name: str, dtype: str, values: tuple[float, float], *, when: str = "") -> Declared:
    """Declare a number that the caller gives.

    The second of the values must change the result by more than its rounding: a kernel in which the first is
    compiled is found by it.
    """
    return Declared(name, "scalar", dtype, (), when, (), values)


def scratch(name: str = "workspace") -> Declared:
    """Declare where among the arguments the workspace comes, if a launch needs one."""
    return Declared(name, "scratch")


def integers(name: str = "launch") -> Declared:
    """Declare where among the arguments the integers of a launch come."""
    return Declared(name, "launch", "int32")


def dtype_of(declared: Declared, options: Mapping[str, str | bool]) -> str:
    """Return the dtype of an argument in problems of these options."""
    named = str(options.get(declared.dtype, declared.dtype))
    return str(options["dtype"]) if named == SAME else named


def row_starts(arguments: Iterable[Declared]) -> str:
    """Return in words at multiples of how many bytes rows start in problems that are not ``unaligned``."""
    bound = [a for a in arguments if a.dims and not (a.aligned or a.anywhere)]
    most = max((a.align_bytes for a in bound), default=TMA_ALIGN_BYTES)
    less = ", ".join(f"{a.align_bytes} of {a.name}" for a in bound if a.align_bytes < most)
    return f"multiples of {most} bytes" + (f" ({less})" if less else "")
