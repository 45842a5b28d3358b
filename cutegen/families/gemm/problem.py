"""What is to be computed: sizes, dtypes, layouts and epilogue of one GEMM, on one line.

A problem knows nothing about configs. Its line form parses back: ``Problem.parse(str(p)) == p``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple

from cutegen.dtypes import DTYPE_BYTES, TMA_ALIGN_BYTES, short_dtype
from cutegen.errors import ProblemError
from cutegen.text import shown

__all__ = [
    "ACTIVATIONS",
    "BIASES",
    "BLOCKS_FAMILY",
    "BLOCK_SCALED",
    "BLOCK_SCALED_FAMILY",
    "FACTOR_BLOCK",
    "LARGEST_SIZE",
    "LAYOUTS",
    "OLD_LAYOUTS",
    "BlockScaling",
    "Epilogue",
    "Problem",
    "Signature",
    "aligned_step",
    "default_dtype",
    "mended",
    "operand_bits",
    "output_dtypes",
    "parse_sizes",
]

FP8_DTYPES = ("e4m3", "e5m2")


@dataclass(frozen=True)
class BlockScaling:
    """Operands whose elements share scale factors, a block of neighbours along k each.

    Attributes:
        element: Type of an element.
        bits: Of an element; smaller than a byte they lie side by side, the first in the lowest bits.
        scale: Type of a scale factor, of one byte.
        block: Elements along k that share one.
    """

    element: str
    bits: int
    scale: str
    block: int


#: Source: OCP Microscaling formats 1.0 for mxfp8; PTX ISA, tcgen05.mma kind::mxf4nvf4, for nvfp4.
BLOCK_SCALED = {
    "mxfp8_e4m3": BlockScaling("e4m3", 8, "e8m0", 32),
    "mxfp8_e5m2": BlockScaling("e5m2", 8, "e8m0", 32),
    "nvfp4": BlockScaling("e2m1", 4, "e4m3", 16),
}
#: The family that computes them, and nothing else.
BLOCK_SCALED_FAMILY = "gemm_blockscaled"
#: The family whose operands have an fp32 factor for so many elements along k: one for each row of A, and one
#: for as many columns of B. Source: DeepSeek-V3, and what ``torch._scaled_mm`` takes on Hopper.
BLOCKS_FAMILY, FACTOR_BLOCK = "gemm_blocks", 128
#: Scale factors lie in tiles of this many rows and this many blocks along k, padded to whole ones.
SCALE_ROWS, SCALE_BLOCKS = 128, 4
#: Output types of each input type that ``gemm`` multiplies, the one taken when none is named first.
OUT_DTYPES = {
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "e4m3": ("bf16", "fp16", "fp32"),
    "e5m2": ("bf16", "fp16", "fp32"),
    "tf32": ("fp32", "bf16", "fp16"),
    "int8": ("int32", "bf16", "fp16", "fp32"),
}
#: The same for all of :data:`BLOCK_SCALED`.
SCALED_OUT_DTYPES = ("bf16", "fp16", "fp32")

#: The axes along which A and B are contiguous; the name of a layout is just these two letters.
LAYOUTS = {"kk": ("k", "k"), "kn": ("k", "n"), "mn": ("m", "n"), "mk": ("m", "k")}
#: Names of the same layouts in early development versions. They are still accepted, and templates compare
#: them.
OLD_LAYOUTS = {"tn": "kk", "nn": "kn", "nt": "mn", "tt": "mk"}
_TEMPLATE_LETTERS = {layout: letters for letters, layout in OLD_LAYOUTS.items()}
ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "silu")
BIASES = ("", "m", "n")

#: No cluster of tiles of any space is larger than this along an axis: tiles of 256 on 16 CTAs.
_LARGEST_CLUSTER = 4096
#: Kernels round m, n and k up to whole clusters of tiles in 32-bit integers.
LARGEST_SIZE = 2**31 - _LARGEST_CLUSTER
#: Coordinates and layouts of the kernels are 32-bit.
MAX_SIZE = 2**31 - 1
#: Most digits of a size that is parsed; longer ones are refused by their length.
_SIZE_DIGITS = 20


def default_dtype(family: str) -> str:
    """Return the operands' dtype that a problem of ``family`` has when none is named."""
    special = {BLOCK_SCALED_FAMILY: next(iter(BLOCK_SCALED)), BLOCKS_FAMILY: "e4m3"}
    return special.get(family, "bf16")


def output_dtypes(ab_dtype: str) -> tuple[str, ...]:
    """Return the output types of an input type that exists, the one taken when none is named first."""
    return SCALED_OUT_DTYPES if ab_dtype in BLOCK_SCALED else OUT_DTYPES[ab_dtype]


def aligned_step(ab_dtype: str) -> int:
    """Return the elements of A or B by which the extent grows that they are contiguous along.

    They fill whole steps of 16 bytes, and whole blocks where scale factors come in blocks.
    """
    fills = 8 * TMA_ALIGN_BYTES // operand_bits(ab_dtype)
    return max(fills, BLOCK_SCALED[ab_dtype].block) if ab_dtype in BLOCK_SCALED else fills


def mended(axis: str, extent: int, step: int) -> str:
    """Return how a size that is no multiple of ``step`` becomes one that kernels compute, for messages."""
    padded, most = -(-extent // step) * step, LARGEST_SIZE // step * step
    return f"pad {axis} to {padded}" if padded <= most else f"{axis} may be {most} at most"


def parse_sizes(word: str) -> tuple[int, int, int, int]:
    """Return ``(m, n, k, batch)`` of a word like ``4096x4096x4096`` or ``8x512x512x64`` (batch first).

    Raises:
        ProblemError: The word is not of that form, or a number has more digits than any size.
    """
    numbers = re.fullmatch(r"(?:([0-9]+)x)?([0-9]+)x([0-9]+)x([0-9]+)", word)
    if numbers is None:
        raise ProblemError(f"{shown(word)} is not MxNxK or BATCHxMxNxK")
    digits = [number or "1" for number in numbers.groups()]
    longest = max(digits, key=len)
    if len(longest) > _SIZE_DIGITS:
        raise ProblemError(f"a size has {len(longest)} digits; valid: integers from 1 to {MAX_SIZE}")
    batch, m, n, k = map(int, digits)
    return m, n, k, batch


def operand_bits(ab_dtype: str) -> int:
    """Return the bits of an element of A or B."""
    return BLOCK_SCALED[ab_dtype].bits if ab_dtype in BLOCK_SCALED else 8 * DTYPE_BYTES[ab_dtype]


@dataclass(frozen=True)
class Epilogue:
    """What happens to the fp32 accumulator before it is converted and stored.

    ``D = activation(alpha * scale_a * scale_b * A @ B + beta * C + bias)``; each part is absent unless
    asked for.

    Attributes:
        alpha: Whether a run-time factor on A @ B is wanted.
        beta: Whether ``beta * C`` is added; ``C`` has the shape and dtype of ``D``.
        bias: ``"n"`` adds a row vector of n elements, ``"m"`` a column of m, ``""`` nothing.
        activation: One of ``relu``, ``gelu`` (exact), ``gelu_tanh``, ``silu``, or ``""``.
        scale: Whether one fp32 factor for each operand is read from device memory.
    """

    alpha: bool = False
    beta: bool = False
    bias: str = ""
    activation: str = ""
    scale: bool = False

    def __post_init__(self) -> None:
        if self.bias not in BIASES:
            raise ProblemError(f"bias runs along {shown(self.bias)}; valid: 'm', 'n' or ''")
        if self.activation not in ACTIVATIONS:
            raise ProblemError(
                f"unknown activation {shown(self.activation)}; valid: {', '.join(ACTIVATIONS[1:])}"
            )


@dataclass(frozen=True)
class Signature:
    """The compiled-in part of a problem; sizes stay symbolic, so one artifact serves many shapes.

    ``layout`` has the old letters (:data:`OLD_LAYOUTS`), which templates compare: rendered texts and artifact
    keys stay as they were.

    Attributes:
        renamed: What problems of one signature have in common under the same name, in another form.
    """

    family: str
    ab_dtype: str
    out_dtype: str
    layout: str
    batched: bool
    unaligned_out: bool
    epilogue: Epilogue
    promote: bool = False
    renamed: ClassVar[tuple[str, ...]] = ("layout",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._values()))

    def __hash__(self) -> int:
        # Every dictionary that a first call looks into asks for it.
        found: int = self._hash  # type: ignore[attr-defined]
        return found

    def __reduce__(self) -> tuple[Callable[..., Signature], tuple[Any, ...]]:
        # Another process has other hashes of strings.
        return _signature, self._values()

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))


@lru_cache(maxsize=1024, typed=True)
def _signature(*values: Any) -> Signature:
    """Return one object for the same values: dictionaries that are asked for it need not compare them."""
    return Signature(*values)


_PLAIN = Epilogue()


#: Fields of a problem that name its kind and are not kept as they are given, in the order of ``_Kind.names``.
_NAMES = ("ab_dtype", "out_dtype", "layout", "promote")


class _Kind(NamedTuple):
    """What problems have in common that were given the same names.

    Attributes:
        names: Their ``_NAMES``, as they keep them.
        step: Elements of A and B by which the extents grow that these are contiguous along.
        out_bytes: Bytes of an element of D.
    """

    names: tuple[str, str, str, bool]
    step: int
    out_bytes: int


@lru_cache(maxsize=1024, typed=True)
def _kind(
    family: str, ab_dtype: str, out_dtype: str, layout: str, promote: bool, epilogue: Epilogue
) -> _Kind:
    """Check what of a problem is not a size, and return what follows; remembered, since it is all the same.

    Raises:
        ProblemError: There are no such problems.
    """
    ab_dtype, out_dtype = _dtypes(family, ab_dtype, out_dtype)
    layout = _layout(ab_dtype, layout)
    if out_dtype == "int32" and epilogue != _PLAIN:
        raise ProblemError(
            "an int32 output is the plain integer GEMM; name a floating-point output for alpha, beta, "
            "bias, activation or scale"
        )
    if family == BLOCKS_FAMILY:
        promote = True
        if ab_dtype != "e4m3":
            raise ProblemError(f"{family} multiplies e4m3 and nothing else, not {ab_dtype}")
        if epilogue.scale:
            raise ProblemError(f"{family} has factors of blocks, so there is no scale beside them")
    if promote and ab_dtype not in FP8_DTYPES:
        raise ProblemError(f"promote is for fp8 inputs, not {ab_dtype}")
    return _Kind((ab_dtype, out_dtype, layout, promote), aligned_step(ab_dtype), DTYPE_BYTES[out_dtype])


def _dtypes(family: str, ab_dtype: str, out_dtype: str) -> tuple[str, str]:
    """Return our short names of a problem's dtypes; raises :class:`ProblemError`."""
    ab_dtype, out_dtype = (
        short_dtype(given) if isinstance(given, str) and given not in DTYPE_BYTES else given
        for given in (ab_dtype, out_dtype)
    )
    if ab_dtype not in OUT_DTYPES and ab_dtype not in BLOCK_SCALED:
        valid = ", ".join(BLOCK_SCALED if family == BLOCK_SCALED_FAMILY else OUT_DTYPES)
        hint = "; fp8 is e4m3 or e5m2" if ab_dtype == "fp8" else ""
        raise ProblemError(f"unsupported input dtype {shown(ab_dtype)}; valid: {valid}{hint}")
    if (ab_dtype in BLOCK_SCALED) != (family == BLOCK_SCALED_FAMILY):
        raise ProblemError(
            f"{family} does not multiply {ab_dtype}; {BLOCK_SCALED_FAMILY} multiplies "
            f"{', '.join(BLOCK_SCALED)} and nothing else"
        )
    valid_out = output_dtypes(ab_dtype)
    if out_dtype and out_dtype not in valid_out:
        name = f"output dtype {shown(out_dtype)} of {ab_dtype}"
        raise ProblemError(f"unsupported {name}; valid: {', '.join(valid_out)}")
    return ab_dtype, out_dtype or valid_out[0]


def _layout(ab_dtype: str, layout: str) -> str:
    """Return today's name of a problem's layout; raises :class:`ProblemError`."""
    layout = OLD_LAYOUTS.get(layout, layout)
    if layout not in LAYOUTS:
        raise ProblemError(
            f"unknown layout {shown(layout)}; valid: {', '.join(LAYOUTS)} "
            "(the contiguous axis of A, then of B)"
        )
    if operand_bits(ab_dtype) <= 8 and layout != "kk":
        why = "blocks lie along k" if ab_dtype in BLOCK_SCALED else "our kernels read no other"
        raise ProblemError(
            f"layout {layout!r} of {ab_dtype} is not supported; operands of 8 bits and fewer "
            f"must both be contiguous along k, which is layout 'kk' ({why})"
        )
    return layout


@dataclass(frozen=True)
class Problem:
    """``D[m, n] = A[m, k] @ B[k, n]`` for ``batch`` independent GEMMs.

    Attributes:
        m: Rows of A and D.
        n: Columns of B and D.
        k: Columns of A, rows of B.
        batch: Independent GEMMs; 1 means plain matrices.
        ab_dtype: Element type of A and B: ``bf16``, ``fp16``, ``e4m3``, ``e5m2``, ``int8`` or
            ``tf32``, which are fp32 values of whose fractions the MMA reads the first 10 bits. Sums are in
            fp32, in int32 for ``int8``. Those of :data:`BLOCK_SCALED` have scale factors along k, and a
            family of their own.
        out_dtype: Element type of D (and C): ``bf16``, ``fp16``, ``fp32``, or ``int32`` for ``int8``.
        layout: The axis along which A is contiguous, then that of B: ``kk`` (torch's ``x @ w.T``), ``kn``,
            ``mn`` or ``mk``. The old names (:data:`OLD_LAYOUTS`) become these.
        unaligned_out: Rows of D do not start at multiples of 16 bytes. Set by itself when n demands it;
            pass True for an output tensor with an odd pitch or address.
        epilogue: What is fused behind the GEMM.
        promote: Whether fp8 accumulators leave the tensor cores, which keep about 14 bits of them, after
            every 128 or 256 terms (a k tile), to be added up in fp32. Always so where blocks have factors.
        any_order: Whether partial sums may be added in any order, so that the last bits of a result may
            differ from run to run. Faster for some problems with deep k.
        family: The kernel family that computes it.

    Raises:
        ProblemError: A size, dtype or layout is not supported; the message says what would be.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    ab_dtype: str = "bf16"
    out_dtype: str = ""
    layout: str = "kk"
    unaligned_out: bool = False
    epilogue: Epilogue = _PLAIN
    promote: bool = False
    any_order: bool = False
    family: str = "gemm"

    def __post_init__(self) -> None:
        # A first call waits for this, so nothing is set that is there already.
        given = self.ab_dtype, self.out_dtype, self.layout, self.promote
        kind = _kind(self.family, *given, self.epilogue)
        if given != kind.names:
            for name, value in zip(_NAMES, kind.names, strict=True):
                object.__setattr__(self, name, value)
        self._check_sizes(kind.step)
        if self.n * kind.out_bytes % TMA_ALIGN_BYTES:
            object.__setattr__(self, "unaligned_out", True)

    def _check_sizes(self, step: int) -> None:
        m, n, k, batch = self.m, self.n, self.k, self.batch
        if not (
            type(m) is type(n) is type(k) is type(batch) is int
            and 0 < m <= MAX_SIZE
            and 0 < n <= MAX_SIZE
            and 0 < k <= MAX_SIZE
            and 0 < batch <= MAX_SIZE
        ):
            raise self._size_error()
        if self.batch != 1 and self.has_factors:
            raise ProblemError(f"{self.family} has no kernel for batch={self.batch}; valid: 1")
        for operand, axis in zip("AB", LAYOUTS[self.layout], strict=True):
            extent = getattr(self, axis)
            if extent % step:
                raise ProblemError(
                    f"{operand} is contiguous along {axis}={extent}, which must be a multiple of {step} "
                    f"({self._why_aligned()}); {mended(axis, extent, step)}"
                )

    def _size_error(self) -> ProblemError:
        """Return the error for the first size that is none."""
        wrong = ((name, x) for name, x in self.sizes.items() if type(x) is not int or not 1 <= x <= MAX_SIZE)
        name, value = next(wrong)
        return ProblemError(f"{name}={shown(value)} must be an integer from 1 to {MAX_SIZE}")

    def _why_aligned(self) -> str:
        if self.ab_dtype in BLOCK_SCALED:
            return f"{TMA_ALIGN_BYTES} bytes and {BLOCK_SCALED[self.ab_dtype].block} for each scale factor"
        return f"{TMA_ALIGN_BYTES} bytes of {self.ab_dtype}"

    @cached_property
    def signature(self) -> Signature:
        """The compiled-in part of this problem."""
        letters = _TEMPLATE_LETTERS[self.layout]
        kind = self.family, self.ab_dtype, self.out_dtype, letters, self.batch > 1, self.unaligned_out
        return _signature(*kind, self.epilogue, self.promote)

    @property
    def has_factors(self) -> bool:
        """Whether blocks of A and B have factors, see :data:`FACTOR_BLOCK`."""
        return self.family == BLOCKS_FAMILY

    @property
    def factor_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the factors of A and of B, laid out as A and B are."""
        along_k, along_n = (-(-size // FACTOR_BLOCK) for size in (self.k, self.n))
        return (self.m, along_k), (along_k, along_n)

    @property
    def flops(self) -> int:
        """Floating-point operations of the GEMM."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def min_bytes(self) -> int:
        """Bytes that must cross device memory: each input read once, the output written once."""
        ab = (self.m + self.n) * self.k * operand_bits(self.ab_dtype) // 8
        c = 2 if self.epilogue.beta else 1
        out = c * self.m * self.n * DTYPE_BYTES[self.out_dtype]
        factors = 4 * sum(map(prod, self.factor_shapes)) if self.has_factors else 0
        scales = sum(self.scale_factors) if self.ab_dtype in BLOCK_SCALED else 0
        return self.batch * (ab + out + scales) + factors

    @property
    def scale_factors(self) -> tuple[int, int]:
        """Scale factors of one batch of A and of B, one byte each, padded to whole tiles; 0 if none."""
        if self.ab_dtype not in BLOCK_SCALED:
            return 0, 0
        tile_k = SCALE_BLOCKS * BLOCK_SCALED[self.ab_dtype].block
        per_row = -(-self.k // tile_k) * SCALE_BLOCKS
        a, b = (-(-extent // SCALE_ROWS) * SCALE_ROWS * per_row for extent in (self.m, self.n))
        return a, b

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name."""
        return {"m": self.m, "n": self.n, "k": self.k, "batch": self.batch}

    def with_sizes(self, **sizes: int) -> Problem:
        """Return the same kind of problem with some sizes changed."""
        return self.resized(**{**self.sizes, **sizes})

    def resized(self, m: int, n: int, k: int, batch: int = 1) -> Problem:
        """Return the same kind of problem at another size."""
        aligned = self.n * DTYPE_BYTES[self.out_dtype] % TMA_ALIGN_BYTES == 0
        return replace(self, m=m, n=n, k=k, batch=batch, unaligned_out=self.unaligned_out and aligned)

    def __str__(self) -> str:
        return self._line(self.layout)

    @property
    def old_line(self) -> str:
        """The line of this problem with the old name of its layout."""
        return self._line(self.signature.layout)

    def _line(self, layout: str) -> str:
        sizes = f"{self.m}x{self.n}x{self.k}"
        words = [
            self.family,
            sizes if self.batch == 1 else f"{self.batch}x{sizes}",
            self.ab_dtype,
            layout,
        ]
        if self.out_dtype != output_dtypes(self.ab_dtype)[0]:
            words.append(f"out={self.out_dtype}")
        epilogue = self.epilogue
        words += [name for name in ("alpha", "beta", "scale") if getattr(epilogue, name)]
        if epilogue.bias:
            words.append(f"bias={epilogue.bias}")
        if epilogue.activation:
            words.append(f"act={epilogue.activation}")
        if self.unaligned_out and self.n * DTYPE_BYTES[self.out_dtype] % TMA_ALIGN_BYTES == 0:
            words.append("unaligned")
        if self.promote and not self.has_factors:
            words.append("promote")
        words += ["any_order"] if self.any_order else []
        return " ".join(words)

    @classmethod
    def parse(cls, line: str) -> Problem:
        """Return the problem that ``line`` (as printed by ``str``) describes.

        Raises:
            ProblemError: The line is not of that form.
        """
        words = line.split()
        if len(words) < 4:
            raise ProblemError(f"{shown(line)} is not a problem; write 'gemm 4096x4096x4096 bf16 kk'")
        family, sizes, dtype, layout, *rest = words
        m, n, k, batch = parse_sizes(sizes)
        options = _parse_options(rest, line)
        epilogue = Epilogue(
            alpha="alpha" in options,
            beta="beta" in options,
            bias=options.get("bias", ""),
            activation=options.get("act", ""),
            scale="scale" in options,
        )
        return cls(
            m,
            n,
            k,
            batch,
            dtype,
            options.get("out", ""),
            layout,
            "unaligned" in options,
            epilogue,
            "promote" in options,
            "any_order" in options,
            family,
        )


_FLAGS = ("alpha", "beta", "scale", "unaligned", "promote", "any_order")
_WITH_VALUE = ("out", "bias", "act")


def _parse_options(words: list[str], line: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = {"out_dtype": "out", "activation": "act"}.get(name, name)
        takes_value = name in _WITH_VALUE
        if not (takes_value or name in _FLAGS) or takes_value != bool(equals):
            valid = ", ".join([*(f"{known}=..." for known in _WITH_VALUE), *_FLAGS])
            raise ProblemError(f"unknown word {shown(word)} in problem {shown(line)}; valid: {valid}")
        options[name] = value
    return options
