"""Call the kernels of declared families; a part of the loader of its own.

In a deployment the loader runs this file in its own namespace when a family is first called, so neither its
import nor a GEMM waits for it. Folders without such kernels do not have it.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple

from cutegen.deploy.launch import Call, DLTensor, PinnedError
from cutegen.deploy.manifest import is_record
from cutegen.deploy.tensors import check_grad, overlap, span_bytes

__all__ = ["FamilyCalls", "rms_norm"]

#: Short name, DLPack's code, and bits of a dtype, by torch's name.
_DTYPES = {
    "torch.bfloat16": ("bf16", 4, 16),
    "torch.float16": ("fp16", 2, 16),
    "torch.float32": ("fp32", 2, 32),
    "torch.float64": ("fp64", 2, 64),
    "torch.int8": ("int8", 0, 8),
    "torch.int32": ("int32", 0, 32),
    "torch.int64": ("int64", 0, 64),
    "torch.uint8": ("uint8", 1, 8),
    "torch.bool": ("bool", 6, 8),
    "torch.float8_e4m3fn": ("e4m3", 10, 8),
    "torch.float8_e5m2": ("e5m2", 12, 8),
    "torch.float8_e8m0fnu": ("e8m0", 14, 8),
}
_TORCH_NAMES = {short: (name.partition(".")[2], bits) for name, (short, _, bits) in _DTYPES.items()}
_TENSORS = ("in", "out", "inout")
_GIVEN = (*_TENSORS, "scalar")
_KINDS = (*_GIVEN, "scratch", "launch")
#: Aligned rows start at multiples of so many bytes, where the manifest has no ``align_bytes``.
_ALIGNED_BYTES = 16
#: So many kinds of call are kept; a thread that makes more starts over.
_MOST_PLANS = 16384
_CUDA = 2  # kDLCUDA of DLPack


class _Argument(NamedTuple):
    """An argument of a family's kernels, as the manifest has it."""

    name: str
    kind: str
    dims: tuple[tuple[Any, str], ...]
    optional: bool
    may_alias: tuple[str, ...]
    anywhere: bool
    align_bytes: int


class _Plan(NamedTuple):
    """How to answer every call with the same shapes, strides, dtypes, device, alignment and words.

    Attributes:
        launch: Takes the addresses of the tensors that there are, and the scalars, in order.
        made: Position, shape and dtype of each output to allocate.
        outputs: Positions of all outputs.
        scalars: Name of each scalar that there is, and whether it is an integer.
        written: Positions of the tensors that the caller gave to be written.
        pairs: Positions of such a tensor, and of each other one that was given.
        sizes: Bytes of each tensor, by position.
        place: The GPU.
    """

    launch: Callable[[list[int], list[float]], None]
    made: tuple[tuple[int, tuple[int, ...], Any], ...]
    outputs: tuple[int, ...]
    scalars: tuple[tuple[str, bool], ...]
    written: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    place: Any


class _Launch(Call):
    """A kernel whose scalars may be integers."""

    def __init__(self, deployment: Any, record: Any, blocks: Any, place: Any, kinds: list[str]) -> None:
        super().__init__(deployment, record, blocks, place, kinds)
        self._fields = [kind for kind in kinds if kind in ("real", "integer")]

    def __call__(self, addresses: list[int], factors: list[float], *matrices: Any) -> None:
        for slot, field, factor in zip(self._factors, self._fields, factors, strict=True):
            setattr(slot, field, factor)
        super().__call__(addresses, [])


class FamilyCalls:
    """The kernels of one family.

    Attributes:
        name: Of the family.
        said: What the manifest says of it.
        arguments: Of its kernels.
        tensors: Those of them that are tensors.
        words: What tensors do not tell: which optional scalars there are, options, and some sizes.
        defaults: Values of sizes and options, by name.

    Raises:
        PinnedError: The manifest does not describe a family.
    """

    def __init__(self, deployment: Any, name: str, said: Any) -> None:
        self._deployment, self.name, self.said = deployment, name, said
        try:
            self.arguments = _read_arguments(said)
            self._sizes: dict[str, int | None] = dict(said["sizes"])
            self._options: dict[str, Any] = dict(said["options"])
            self._records: dict[tuple[int, ...], list[dict[str, Any]]] = {}
            for record in said["kernels"]:
                self._records.setdefault(tuple(record["sizes"]), []).append(record)
            self._ranges = [(dict(zip(self._sizes, r["sizes"], strict=True)), r) for r in said["ranges"]]
            pinned = (*said["kernels"], *said["ranges"])
            self._problems = [str(record["problem"]) for record in pinned]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise deployment._malformed(f"family {name}: {type(error).__name__}: {error}") from error
        self.tensors = tuple(a for a in self.arguments if a.kind in _TENSORS)
        #: What stands for a tensor that is not given: True makes an output.
        self._absent = tuple(
            (a.name, True if a.kind == "out" and not a.optional else None) for a in self.tensors
        )
        told = {dim for a in self.arguments for _, dim in a.dims}
        self.words = (
            *(a.name for a in self.arguments if a.kind == "scalar" and a.optional),
            *self._options,
            *(size for size in self._sizes if size not in told),
        )
        scalars = {a.name for a in self.arguments if a.kind == "scalar"}
        self._names = {name for name, _ in self._absent} | scalars | set(self.words)
        self.defaults = {**self._sizes, **self._options}
        self._threads = threading.local()

    def __call__(self, values: dict[str, Any]) -> Any:
        """Launch the kernel that is pinned for ``values`` and return its outputs."""
        if not values.keys() <= self._names:
            raise self._unknown(values)
        tensors: list[Any] = []
        addresses: list[Any] = []
        key: list[Any] = []
        for name, absent in self._absent:
            value: Any = values.get(name)
            value = absent if value is None else value
            tensors.append(value)
            if value is None or value is True:
                addresses.append(None)
                key.append(value)
                continue
            try:
                address = value.data_ptr()
                key += (value.shape, value.stride(), value.dtype, value.device, address & 15)
            except AttributeError:
                raise PinnedError(f"{name} is {value!r:.40}; it must be a tensor") from None
            addresses.append(address)
        words = self._words_of(values)
        plan = self._plan((*key, *words), tensors, addresses, dict(zip(self.words, words, strict=True)))
        self._check_grad(tensors)
        for written, other in plan.pairs:
            start, place = addresses[written], addresses[other]
            if start < place + plan.sizes[other] and place < start + plan.sizes[written]:
                self._check_apart(written, other, tensors)
        scalars = [_number(name, whole, values.get(name)) for name, whole in plan.scalars]
        for at, shape, dtype in plan.made:
            tensors[at] = made = self._deployment.torch.empty(shape, dtype=dtype, device=plan.place)
            addresses[at] = made.data_ptr()
        plan.launch([address for address in addresses if address is not None], scalars)
        if plan.written:
            self._deployment.count_writes([tensors[at] for at in plan.written])
        found = [tensors[at] for at in plan.outputs]
        return found[0] if len(found) == 1 else tuple(found) or None

    def _words_of(self, values: dict[str, Any]) -> list[Any]:
        """Return, of what tensors do not tell, whether scalars are there, and the values of all else."""
        found: list[Any] = []
        for name in self.words:
            value = values.get(name)
            if name not in self.defaults:
                found.append(value is not None)
                continue
            value = self.defaults[name] if value is None else value
            if not isinstance(value, (str, int)):
                raise PinnedError(f"{name} is {value!r:.40}; it must be text, True, False or an integer")
            found.append(value)
        return found

    def _plan(
        self, key: tuple[Any, ...], tensors: list[Any], addresses: list[Any], words: dict[str, Any]
    ) -> _Plan:
        """Return the plan of a kind of call; each thread has its own, with the argument block of a kernel."""
        try:
            plans = self._threads.plans
        except AttributeError:
            plans = self._threads.plans = {}
        # A call with a known key is not checked again: all that _prepare looks at is in the key, or not 0.
        plan: _Plan | None = None if 0 in addresses else plans.get(key)
        if plan is None:
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plan = plans[key] = self._prepare(tensors, words)
        return plan

    # -- what is checked in every call

    def _unknown(self, values: dict[str, Any]) -> PinnedError:
        name = min(values.keys() - self._names)
        return PinnedError(f"{self.name} takes no {name!r}; it takes {', '.join(sorted(self._names))}")

    def _check_grad(self, tensors: list[Any]) -> None:
        if self._deployment.torch.is_grad_enabled():
            check_grad(**{name: tensor for (name, _), tensor in zip(self._absent, tensors, strict=True)})

    def _check_apart(self, written: int, other: int, tensors: list[Any]) -> None:
        out, tensor = tensors[written], tensors[other]
        argument, name = self.tensors[written], self.tensors[other].name
        same = out.data_ptr() == tensor.data_ptr() and out.stride() == tensor.stride()
        if (same and name in argument.may_alias) or not overlap(out, tensor):
            return
        may = " or ".join(argument.may_alias)
        rule = f"it may only be {may} itself" if may else "pass another"
        raise PinnedError(f"{argument.name} shares memory with {name}; {rule}")

    # -- what is checked once for each kind of call

    def _prepare(self, tensors: list[Any], words: dict[str, Any]) -> _Plan:
        pairs = zip(self.tensors, tensors, strict=True)
        given = {a.name: tensor for a, tensor in pairs if tensor is not None and tensor is not True}
        self._check_presence(tensors)
        sizes = self._take_sizes(given, words)
        self._deployment._check_place(list(given.values()))
        record = self._find(given, tensors, sizes, words)
        dtypes = record["dtypes"]
        first = next(iter(given.values()))
        blocks, made = self._describe(given, sizes, dtypes, first.get_device())
        scalars = {
            a.name: "int" in dtypes[a.name] for a in self.arguments if a.kind == "scalar" and a.name in dtypes
        }
        return _Plan(
            _Launch(self._deployment, record, blocks, first.device, self._kinds(dtypes, scalars)),
            made,
            tuple(at for at, a in enumerate(self.tensors) if a.kind == "out" and a.name in dtypes),
            tuple(scalars.items()),
            tuple(at for at, a in enumerate(self.tensors) if a.kind != "in" and a.name in given),
            tuple(self._pairs(given)),
            tuple(span_bytes(given[a.name]) if a.name in given else 0 for a in self.tensors),
            first.device,
        )

    def _describe(
        self, given: dict[str, Any], sizes: dict[str, int], dtypes: dict[str, str], device: int
    ) -> tuple[list[DLTensor], tuple[tuple[int, tuple[int, ...], Any], ...]]:
        """Return the kernel's tensors as it takes them, and position, shape and dtype of those to be made."""
        blocks, made = [], []
        for at, argument in enumerate(self.tensors):
            if argument.name in given:
                tensor = given[argument.name]
                shape, stride, dtype = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
            elif argument.name in dtypes:
                shape = tuple(int(times * sizes[dim]) for times, dim in argument.dims)
                stride = _dense(shape)
                dtype = self.torch_dtype(dtypes[argument.name])
                made.append((at, shape, dtype))
            else:
                continue
            blocks.append(_block(shape, stride, dtype, device))
        return blocks, tuple(made)

    def _kinds(self, dtypes: dict[str, str], scalars: dict[str, bool]) -> list[str]:
        """Return the kind of each of the kernel's parameters, as :class:`Call` wants them."""
        present = [a for a in self.arguments if a.name in dtypes]
        kinds = {a.name: "tensor" if a.kind in _TENSORS else a.kind for a in present}
        kinds |= {name: "integer" if is_integer else "real" for name, is_integer in scalars.items()}
        return [*kinds.values()]

    @staticmethod
    def short_dtype(name: str, dtype: Any) -> str:
        """Return the short name of the dtype of an argument; raises :class:`PinnedError` if there is none."""
        try:
            return _DTYPES[str(dtype)][0]
        except KeyError:
            raise PinnedError(f"{name} has dtype {dtype}, which no kernel takes") from None

    def torch_dtype(self, short: str) -> Any:
        """Return torch's dtype of a short name; raises :class:`PinnedError` if this torch lacks it."""
        name = _TORCH_NAMES[short][0]
        dtype = getattr(self._deployment.torch, name, None)
        if dtype is None:
            raise PinnedError(f"this torch has no dtype {name}, which an output of {self.name} has")
        return dtype

    def _pairs(self, given: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """Yield the positions of all that must not share memory, as far as the caller gave it."""
        places = [at for at, argument in enumerate(self.tensors) if argument.name in given]
        for written in places:
            if self.tensors[written].kind != "in":
                yield from ((written, other) for other in places if other != written)

    def _check_presence(self, tensors: list[Any]) -> None:
        for argument, tensor in zip(self.tensors, tensors, strict=True):
            if tensor is True and argument.kind != "out":
                raise PinnedError(
                    f"{argument.name} is True; it must be a tensor, since only outputs are made"
                )
            if tensor is None and not argument.optional:
                raise PinnedError(f"{self.name} needs {argument.name}")
        if all(tensor is None or tensor is True for tensor in tensors):
            raise PinnedError(f"{self.name} needs a tensor that tells the GPU")

    def _take_sizes(self, given: dict[str, Any], words: dict[str, Any]) -> dict[str, int]:
        """Return every size, as the tensors tell it."""
        found: dict[str, tuple[int, str]] = {}
        for argument in self.tensors:
            if argument.name in given:
                _take_sizes_of(argument, given[argument.name], found)
        sizes: dict[str, int] = {}
        for size in self._sizes:
            value = found[size][0] if size in found else words.get(size, self._sizes[size])
            if value is None:
                raise PinnedError(f"{self.name}: no tensor tells the size {size}")
            sizes[size] = value
        return sizes

    def _find(
        self, given: dict[str, Any], tensors: list[Any], sizes: dict[str, int], words: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the record of the kernel that is pinned for a call."""
        dtypes = {name: self.short_dtype(name, tensor.dtype) for name, tensor in given.items()}
        wanted = {a.name for a, tensor in zip(self.tensors, tensors, strict=True) if tensor is not None}
        wanted |= {a.name for a in self.arguments if a.kind == "scalar" and words.get(a.name, True)}
        options = {name: words[name] for name in self._options}
        bound = (a for a in self.tensors if a.name in given and not a.anywhere)
        unaligned = not all(_is_aligned(given[a.name], a.align_bytes) for a in bound)

        def fits(record: dict[str, Any]) -> bool:
            self.require_record(record)
            pinned = record["dtypes"]
            return (
                {a.name for a in self.arguments if a.name in pinned and a.kind in _GIVEN} == wanted
                and all(pinned[name] == dtype for name, dtype in dtypes.items())
                and bool(record["options"] == options)
                and bool(record["unaligned"] == (unaligned or self._is_odd(pinned, sizes)))
            )

        fitting = [*filter(fits, self._records.get(tuple(sizes.values()), ()))]
        if not fitting:
            held = [(size, record) for size, record in self._held(sizes) if fits(record)]
            inside = (self._deployment._lookup().of_size(record, sizes[size]) for size, record in held)
            fitting = [*islice(filter(None, inside), 1)]
        if len(fitting) == 1:
            if not is_record(fitting[0]) or not fitting[0]["symbol"]:
                raise self._malformed(fitting[0])
            return fitting[0]
        asked = {**sizes, **dtypes, **dict.fromkeys(sorted(wanted - dtypes.keys()), True), **options}
        text = " ".join(f"{name}={value}" for name, value in asked.items()) + " unaligned" * unaligned
        if fitting:
            raise PinnedError(f"several kernels of {self.name} are pinned for {text}; pass all outputs")
        some = "; ".join(self._problems[:8]) + ("; ..." if len(self._problems) > 8 else "")
        raise PinnedError(f"no kernel of {self.name} is pinned for {text}; pinned: {some}")

    def _held(self, sizes: dict[str, int]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the ranges of problems that agree with ``sizes`` in all sizes but one, and which that is."""
        for known, record in self._ranges:
            free = [size for size in known if known[size] is None]
            if len(free) == 1 and {**known, free[0]: sizes[free[0]]} == sizes:
                yield free[0], record

    def require_record(self, record: dict[str, Any]) -> None:
        """Refuse a record that says of its arguments what no kernel of the family has."""
        dtypes, kinds = record.get("dtypes"), {a.name: a.kind for a in self.arguments}
        right = (
            isinstance(dtypes, dict)
            and isinstance(record.get("options"), dict)
            and isinstance(record.get("unaligned"), bool)
            and all(
                isinstance(dtype, str) and (dtype in _TORCH_NAMES or kinds.get(name) not in _GIVEN)
                for name, dtype in dtypes.items()
            )
            and kinds.keys() >= dtypes.keys() >= {a.name for a in self.arguments if not a.optional}
        )
        if not right:
            raise self._malformed(record)

    def _malformed(self, record: dict[str, Any]) -> PinnedError:
        found: PinnedError = self._deployment._malformed(
            f"the record of {record.get('problem')} is not one that was pinned"
        )
        return found

    def _is_odd(self, dtypes: dict[str, str], sizes: dict[str, int]) -> bool:
        """Whether rows of some argument, one behind the other, do not start where aligned ones do."""
        return any(
            a.dims[-1][0] * sizes[a.dims[-1][1]] * _TORCH_NAMES[dtypes[a.name]][1] // 8 % a.align_bytes
            for a in self.tensors
            if a.name in dtypes and len(a.dims) > 1 and not a.anywhere
        )


def _read_arguments(said: dict[str, Any]) -> tuple[_Argument, ...]:
    """Return what the manifest says of a family's arguments; errors of a malformed one are of many kinds."""
    sizes = said["sizes"]
    found: list[_Argument] = []
    for name, size in sizes.items():
        if not (size is None or type(size) is int):
            raise TypeError(f"size {name} is no number")
    for item in said["arguments"]:
        made = _Argument(
            item["name"],
            item["kind"],
            tuple(map(_multiple, item["dims"])),
            item["optional"],
            tuple(item["may_alias"]),
            item.get("anywhere", False) is True,
            item.get("align_bytes", _ALIGNED_BYTES),
        )
        right = (
            isinstance(made.name, str)
            and made.kind in _KINDS
            and all(times and dim in sizes for times, dim in made.dims)
            and bool(made.dims) == (made.kind in _TENSORS)
            and isinstance(made.optional, bool)
            and all(isinstance(other, str) for other in made.may_alias)
            and type(made.align_bytes) is int
            and made.align_bytes in (1, 2, 4, 8, _ALIGNED_BYTES)
        )
        if not right or made.name in {other.name for other in found}:
            raise ValueError(f"argument {made.name!r:.40} is not one that was pinned")
        found.append(made)
    return tuple(found)


def _take_sizes_of(argument: _Argument, tensor: Any, found: dict[str, tuple[int, str]]) -> None:
    """Add to ``found`` what the shape of a tensor says of each size, and which argument said it first."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    where = f"{argument.name} has shape {shape}"
    if len(shape) != len(argument.dims):
        form = ", ".join(f"{times if times != 1 else ''}{dim}" for times, dim in argument.dims)
        raise PinnedError(f"{where}; it must be ({form})")
    for (times, dim), whole in zip(argument.dims, shape, strict=True):
        extent, rest = divmod(whole, times)
        if rest:
            raise PinnedError(f"{where}, but {whole} is no multiple of {times}")
        known, by = found.setdefault(dim, (extent, argument.name))
        if known != extent:
            raise PinnedError(f"{where}, which makes {dim} {extent}, but {by} makes it {known}")
        if extent == 0:
            raise PinnedError(f"{where}; {dim} must be at least 1")
    if (shape[-1] > 1 and stride[-1] != 1) or _may_repeat(shape, stride):
        raise PinnedError(
            f"{argument.name} has strides {stride}; its rows must be contiguous and apart, so pass "
            f"{argument.name}.contiguous()"
        )


def _multiple(dim: str) -> tuple[Any, str]:
    """Return how many times which size an axis is: ``2n`` is twice ``n``, and ``n/128`` a 128th of it."""
    size = dim.lstrip("0123456789")
    times = int(dim[: len(dim) - len(size)] or 1)
    size, slash, parts = size.partition("/")
    return (Fraction(times, int(parts)) if slash else times), size


def _number(name: str, is_integer: bool, value: Any) -> float:
    """Return a scalar of a call, if it is a number of its kind."""
    if is_integer and not (isinstance(value, int) and -(2**31) <= value < 2**31):
        raise PinnedError(f"{name} is {value!r:.40}; it must be a 32-bit integer")
    if not isinstance(value, (int, float)):
        raise PinnedError(f"{name} is {value!r:.40}; it must be a number")
    return value


def _is_aligned(tensor: Any, align_bytes: int) -> bool:
    """Whether every row of a tensor starts at a multiple of so many bytes."""
    steps = [step for step, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if extent > 1]
    places = (tensor.data_ptr(), *(step * tensor.element_size() for step in steps))
    return not any(place % align_bytes for place in places)


def _may_repeat(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two places of a tensor may be one address; exact for slices and permutations of dense ones."""
    reach = 0  # elements that the axes so far span, less one
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if extent > 1 and step <= reach:
            return True
        reach += (extent - 1) * step
    return False


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def _block(shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any, device: int) -> DLTensor:
    """Describe a tensor, without odd strides along axes of extent 1."""
    pitch = -(-shape[-1] // _ALIGNED_BYTES) * _ALIGNED_BYTES
    steps = [*stride[:-1], 1]
    for at, extent in enumerate(shape[:-1]):
        steps[at] = pitch if extent == 1 else steps[at]
    numbers = ctypes.c_int64 * len(shape)
    _, code, bits = _DTYPES[str(dtype)]
    return DLTensor(None, _CUDA, device, len(shape), code, bits, 1, numbers(*shape), numbers(*steps), 0)


# --- short methods for families that cutegen brings ---


def rms_norm(
    deployment: Any,
    x: Any,
    weight: Any,
    eps: float,
    residual: Any,
    out: Any,
    residual_out: Any,
    return_rstd: bool,
) -> Any:
    """Return what :meth:`Deployment.rms_norm` does; see there."""
    if residual_out is not False and residual is None:
        raise PinnedError("residual_out is given but residual is not; pass both")
    if not hasattr(x, "requires_grad"):
        raise PinnedError(f"x is {x!r:.40}; it must be a torch.Tensor")
    if x.dim() == 0:
        raise PinnedError("x has no dimensions; it must have rows, (..., n)")
    #: What the caller gave of each output that is wanted: a tensor, or nothing yet.
    given = {"out": out}
    if residual_out is not False:
        given["residual_out"] = None if residual_out is True else residual_out
    if return_rstd:
        given["rstd"] = None
    shapes = {name: x.shape[:-1] if name == "rstd" else x.shape for name in given}
    if x.numel() == 0:
        torch = deployment.torch
        dtypes = {name: torch.float32 if name == "rstd" else x.dtype for name in given}
        made = [torch.empty(shapes[name], dtype=dtypes[name], device=x.device) for name in given]
    else:
        outputs = {name: True if t is None else _rows(name, t) for name, t in given.items()}
        inputs = {"x": _rows("x", x), "weight": weight, "residual": _rows("residual", residual), "eps": eps}
        found = deployment.call("rmsnorm", **inputs, **outputs)
        made = [found] if len(given) == 1 else [*found]
    results = [
        own.view(shapes[name]) if mine is None else mine
        for own, (name, mine) in zip(made, given.items(), strict=True)
    ]
    return results[0] if len(results) == 1 else tuple(results)


def _rows(name: str, tensor: Any) -> Any:
    """Return a tensor as a matrix of its rows, without a copy; anything else as it is."""
    if not hasattr(tensor, "stride") or tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    except (IndexError, RuntimeError) as error:
        raise PinnedError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, under which its "
            f"rows are not evenly spaced; pass {name}.contiguous()"
        ) from error
