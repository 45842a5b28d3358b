"""Rendered element-wise kernels run as plain Python, thread after thread: their indices, without a compiler.

The names of ``cutlass`` that these kernels use are replaced by ones that work on torch tensors. Addresses are
checked: a vector must lie within its tensor's storage and be aligned as the kernel says. Values that a thread
exchanges with others of its warp are found by running the threads again until all of them are known, and so
is when all threads of a block have come to a barrier; what a thread copies to a tensor takes effect when the
block has ended.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from cutegen.build.render import Source

__all__ = ["run"]

WARP = 32


class _Dtype:
    """A type of elements; called, it converts a number."""

    inf = math.inf

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.width = dtype, dtype.itemsize * 8

    def __call__(self, value: float) -> Any:
        return value


class _Word(int):
    """32 bits of two elements."""

    def __lshift__(self, count: int) -> _Word:
        return _Word((int(self) << count) & 0xFFFFFFFF)

    def __and__(self, other: int) -> _Word:
        return _Word(int(self) & int(other))

    def bitcast(self, dtype: _Dtype) -> float:
        return float(struct.unpack("f", struct.pack("I", int(self)))[0])


_DTYPES = {
    torch.bfloat16: _Dtype(torch.bfloat16),
    torch.float16: _Dtype(torch.float16),
    torch.float32: _Dtype(torch.float32),
    torch.int32: _Dtype(torch.int32),
    torch.int64: _Dtype(torch.int64),
}


class _Address(int):
    """A byte of a storage, which sums still know."""

    storage: torch.Tensor

    def __new__(cls, storage: torch.Tensor, value: int) -> _Address:
        made = super().__new__(cls, value)
        made.storage = storage
        return made

    def __add__(self, count: int) -> _Address:
        return _Address(self.storage, int(self) + int(count))


class _Pointer:
    """An element of a storage."""

    def __init__(self, storage: torch.Tensor, at: int) -> None:
        self.storage, self.at, self.dtype = storage, at, _DTYPES[storage.dtype]

    def __add__(self, count: int) -> _Pointer:
        return _Pointer(self.storage, self.at + int(count))

    def __sub__(self, count: int) -> _Pointer:
        return self + -int(count)

    def load(self) -> _Scalar:
        assert 0 <= self.at < self.storage.numel(), "an element lies outside of its tensor's memory"
        return _Scalar(self.storage[self.at].item())

    def align(self, count: int) -> _Pointer:
        assert self.at * self.storage.itemsize % count == 0, "a vector is not aligned"
        return self

    def toint(self) -> _Address:
        return _Address(self.storage, self.storage.data_ptr() + self.at * self.storage.itemsize)


class _Tensor:
    """Elements of a storage by coordinates; what is stored waits in ``pending`` if there is such a list."""

    def __init__(
        self, start: _Pointer, shape: Sequence[int], stride: Sequence[int], pending: list[Any] | None = None
    ) -> None:
        self.iterator, self.shape, self.stride, self.pending = start, tuple(shape), tuple(stride), pending
        self.element_type = start.dtype
        self.layout = _Layout(self.shape, self.stride)

    def place(self, index: Any) -> int:
        index = index if isinstance(index, tuple) else (index,)
        assert all(0 <= i < size for i, size in zip(index, self.shape, strict=True)), "no such coordinate"
        at = self.iterator.at + sum(i * s for i, s in zip(index, self.stride, strict=True))
        assert 0 <= at < self.iterator.storage.numel(), "an element lies outside of its tensor's memory"
        return int(at)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and None in index:  # such as a vector of a matrix
            given = zip(index, self.stride, strict=True)
            start = self.iterator + sum(i * s for i, s in given if i is not None)
            kept = [axis for axis, i in enumerate(index) if i is None]
            shape, stride = ([sizes[axis] for axis in kept] for sizes in (self.shape, self.stride))
            return _Tensor(start, shape, stride, self.pending)
        return self.iterator.storage[self.place(index)].item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.iterator.storage[self.place(index)] = value

    def fill(self, value: float) -> None:
        for index in product(*map(range, self.shape)):
            self[index] = value

    def load(self) -> _Values:
        return _Values([self[i] for i in range(self.shape[0])])

    def store(self, values: _Values) -> None:
        for i, value in enumerate(values):
            self[i] = value


class _Values(list[float]):
    """The elements of a register vector, with arithmetic."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def _with(self, function: Callable[[float, float], float], other: Any) -> _Values:
        others = other if isinstance(other, _Values) else [other] * len(self)
        return _Values(map(function, self, others))

    def __neg__(self) -> _Values:
        return _Values(-x for x in self)

    def __add__(self, other: Any) -> _Values:  # type: ignore[override]
        return self._with(lambda x, y: x + y, other)

    def __mul__(self, other: Any) -> _Values:  # type: ignore[override]
        return self._with(lambda x, y: x * y, other)

    def __truediv__(self, other: Any) -> _Values:
        return self._with(lambda x, y: x / y, other)

    def __lt__(self, other: Any) -> _Values:  # type: ignore[override]
        return self._with(lambda x, y: x < y, other)

    __radd__, __rmul__ = __add__, __mul__

    def to(self, dtype: _Dtype) -> _Values:
        return _Values(torch.tensor(list(self), dtype=torch.float64).to(dtype.dtype).tolist())


class _Scalar(float):
    """An element that was loaded by its address."""

    def to(self, dtype: _Dtype) -> float:
        return float(torch.tensor(float(self), dtype=torch.float64).to(dtype.dtype).item())


class _Waiting(Exception):
    """A thread needs values of others."""


class _Machine:
    """Which thread runs, what it has stored, and what its warp has exchanged."""

    def __init__(self, most_blocks: int | None = None) -> None:
        self.most_blocks = most_blocks
        self.policies: set[int] = set()
        self.thread = self.block = self.grid = self.threads = 0
        self.stores: list[tuple[torch.Tensor, int, float]] = []
        self.given: dict[tuple[int, int], dict[int, float]] = {}
        self.shared: list[torch.Tensor] = []
        self.count = self.allocated = 0

    def copy_cached(self, atom: None, source: _Tensor, target: _Tensor, cache_policy: int = 0) -> None:
        """Copy, and note what L2 is told."""
        self.policies.add(cache_policy)
        self.copy(source, target)

    def copy(self, source: _Tensor, target: _Tensor) -> None:
        assert source.shape == target.shape
        for i in range(source.shape[0]):
            if target.pending is None:
                self.stores.append((target.iterator.storage, target.place(i), source[i]))
            else:
                target[i] = source[i]

    def reduce(self, value: float, threads_in_group: int = WARP) -> float:
        """Return the sum over the thread's group, once every thread of it has come here."""
        return sum(self._exchange(value, threads_in_group).values())

    def largest(self, value: float, threads_in_group: int = WARP) -> float:
        """Return the largest value of the thread's group, once every thread of it has come here."""
        return max(self._exchange(value, threads_in_group).values())

    def shuffle(self, value: float, offset: int) -> float:
        """Return what the lane has whose number differs in ``offset``."""
        return self._exchange(value, WARP)[self.thread ^ offset]

    def barrier(self) -> None:
        """Wait for all threads of the block."""
        self._exchange(0.0, self.threads)

    def _exchange(self, value: float, threads: int) -> dict[int, float]:
        key = (self.thread // threads, self.count)
        self.count += 1
        known = self.given.setdefault(key, {})
        known[self.thread] = value
        if len(known) < threads:
            raise _Waiting
        return known

    def allocate(self, dtype: _Dtype, layout: _Layout, byte_alignment: int) -> _Tensor:
        """Return shared memory: the same to all threads of a block."""
        if self.allocated == len(self.shared):
            self.shared.append(torch.full((math.prod(layout.shape),), torch.nan, dtype=dtype.dtype))
        self.allocated += 1
        return _Tensor(_Pointer(self.shared[self.allocated - 1], 0), layout.shape, layout.stride)

    def run(self, body: Callable[[], None], threads: int) -> None:
        """Run all threads of a block, again and again while some wait."""
        self.given.clear()
        self.shared.clear()
        self.threads, waiting = threads, True
        while waiting:
            waiting, stores = False, []
            for self.thread in range(threads):
                self.count, self.allocated, self.stores = 0, 0, []
                try:
                    body()
                except _Waiting:
                    waiting = True
                stores += self.stores
        for storage, at, value in stores:
            storage[at] = value


def _exp2(x: float) -> float:
    return 2.0**x if x < 1024 else math.inf


class _Layout(NamedTuple):
    """Extents and strides, the first axis contiguous if nothing else is said."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int] | None = None) -> _Layout:
        steps = stride or [math.prod(shape[:axis]) for axis in range(len(shape))]
        return cls(tuple(shape), tuple(steps))


def _register(shape: Sequence[int], dtype: _Dtype) -> _Tensor:
    values = torch.zeros(math.prod(shape), dtype=dtype.dtype)
    return _Tensor(_Pointer(values, 0), *_Layout.of(shape), [])


class _Words:
    """A register vector as words."""

    def __init__(self, vector: _Tensor) -> None:
        self._words = vector.iterator.storage.view(torch.int32)

    def __getitem__(self, index: int) -> _Word:
        return _Word(int(self._words[index].item()) & 0xFFFFFFFF)

    def __setitem__(self, index: int, word: int) -> None:
        self._words[index] = word - 2**32 if word >= 2**31 else word


def _recast(vector: _Tensor, dtype: Any) -> _Words:
    return _Words(vector)


def _pointer(dtype: _Dtype, address: _Address, space: None, assumed_align: int) -> _Pointer:
    bytes_before, item = int(address) - address.storage.data_ptr(), address.storage.itemsize
    assert dtype.dtype == address.storage.dtype and bytes_before % item == 0, "an element is split"
    return _Pointer(address.storage, bytes_before // item).align(assumed_align)


def _view(start: _Pointer, layout: _Layout) -> _Tensor:
    return _Tensor(start, *layout)


def _each(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """Return ``function`` for one number and for vectors."""
    return lambda x: _Values(map(function, x)) if isinstance(x, _Values) else function(x)


def _cute(machine: _Machine) -> ModuleType:
    """Return what stands for ``cutlass.cute``."""

    def kernel(function: Callable[..., None]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            def launch(grid: Any, block: Any, **options: Any) -> None:
                machine.grid = grid[0]
                blocks = grid[0] if machine.most_blocks is None else machine.most_blocks
                for machine.block in range(blocks):
                    machine.run(lambda: function(*arguments), block[0])

            return SimpleNamespace(launch=launch)

        return called

    found = ModuleType("cutlass.cute")
    vars(found).update(
        Tensor=object,
        Pointer=object,
        jit=lambda function: function,
        kernel=kernel,
        arch=SimpleNamespace(
            thread_idx=lambda: (machine.thread, 0, 0),
            block_idx=lambda: (machine.block, 0, 0),
            grid_dim=lambda: (machine.grid, 1, 1),
            griddepcontrol_launch_dependents=lambda: None,
            griddepcontrol_wait=lambda: None,
            rcp_approx=lambda x: 1.0 / x if x else math.inf,
            warp_reduction_sum=machine.reduce,
            warp_reduction_max=machine.largest,
            fmax=max,
            sync_warp=lambda: None,
            shuffle_sync_bfly=machine.shuffle,
            sync_threads=machine.barrier,
            make_warp_uniform=lambda value: value,
        ),
        math=SimpleNamespace(
            exp2=lambda x, fastmath=False: _each(_exp2)(x),
            exp=_each(math.exp),
            erf=_each(math.erf),
            tanh=_each(math.tanh),
            rsqrt=lambda x, fastmath=False: x**-0.5,
            log=math.log,
        ),
        where=lambda chosen, yes, no: _Values(y if c else n for c, y, n in zip(chosen, yes, no, strict=True)),
        full_like=lambda vector, value: _Values([value] * len(vector)),
        nvgpu=SimpleNamespace(
            CopyG2ROp=object,
            CopyR2GOp=object,
            CacheEvictionPriority=SimpleNamespace(NO_ALLOCATE=None),
        ),
        AddressSpace=SimpleNamespace(gmem=None),
        make_ptr=_pointer,
        make_tensor=_view,
        make_layout=_Layout.of,
        make_rmem_tensor=_register,
        size=math.prod,
        make_copy_atom=lambda *given, **options: None,
        copy=machine.copy_cached,
        autovec_copy=machine.copy,
        recast_tensor=_recast,
    )
    return found


def _cutlass(cute: ModuleType, memory: ModuleType) -> ModuleType:
    """Return what stands for ``cutlass``."""
    found = ModuleType("cutlass")
    names = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}
    vars(found).update({name: _DTYPES[dtype] for name, dtype in names.items()})
    vars(found).update(
        **dict.fromkeys(("Int32", "Int64", "Uint64"), int),
        Boolean=bool,
        Uint32=_Count,
        min=min,
        max=max,
        select_=lambda condition, a, b: a if condition else b,
        range_constexpr=range,
        range=lambda *steps, unroll=1: range(*steps),
        const_expr=lambda value: value,
        Constexpr=object,
        cute=cute,
        memory=memory,
    )
    return found


@contextmanager
def _modules(machine: _Machine) -> Iterator[None]:
    """Let ``import cutlass`` and its like find the replacements."""
    cute = _cute(machine)
    memory = ModuleType("cutlass.memory")
    vars(memory).update(SmemAllocator=lambda: SimpleNamespace(allocate_tensor=machine.allocate))
    driver, bindings = ModuleType("cuda.bindings.driver"), ModuleType("cuda.bindings")
    vars(driver).update(CUstream=object)
    vars(bindings).update(driver=driver)
    given = {
        "cutlass": _cutlass(cute, memory),
        "cutlass.memory": memory,
        "cutlass.cute": cute,
        "cuda": ModuleType("cuda"),
        "cuda.bindings": bindings,
        "cuda.bindings.driver": driver,
    }
    before = {name: sys.modules.get(name) for name in given}
    sys.modules.update(given)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Count(int):
    """A number without sign, which a kernel must not make negative."""

    def __new__(cls, value: int) -> _Count:
        assert 0 <= value < 2**32
        return super().__new__(cls, value)


def run(source: Source, arguments: Sequence[Any], most_blocks: int | None = None) -> set[int]:
    """Call the ``launch`` of a rendered kernel with torch tensors and numbers.

    Args:
        source: The kernel.
        arguments: What ``launch`` takes, without the stream.
        most_blocks: Run only the first blocks.

    Returns:
        The cache policies of copies that name one, and 0 for those of an atom that do not.
    """
    machine = _Machine(most_blocks)
    with _modules(machine):
        scope: dict[str, Any] = {}
        text = source.text.replace(
            "import cuda.bindings.driver as cuda", "from cuda.bindings import driver as cuda"
        )
        exec(compile(text, "rendered", "exec"), scope)
        scope["launch"](*[_given(a) for a in arguments], None)
    return machine.policies


def _given(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    whole = torch.empty(0, dtype=argument.dtype).set_(argument.untyped_storage())  # type: ignore[call-overload]
    return _Tensor(_Pointer(whole, argument.storage_offset()), argument.shape, argument.stride())


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    return tensor.new_empty(0).set_(tensor.untyped_storage().clone(), 0, tensor.shape, tensor.stride())


def require_right(problem: Any, inputs: Any, values: Mapping[str, Any]) -> None:
    """Compare all results of a kernel with the reference of what it was given."""
    reference = problem.declared.reference(problem, inputs)
    for a in problem.declared.arguments(problem):
        for chunk in reference.chunks(a.name, values[a.name]) if a.kind == "out" else ():
            wrong = ~((chunk.got - chunk.want).abs() <= chunk.allowed)  # NaN is wrong
            assert not wrong.any(), f"{a.name}{wrong.nonzero()[0].tolist()}"
