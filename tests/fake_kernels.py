"""Stand-ins for a GPU and a compiler: kernels of the real calling convention that compute on the CPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cutegen.build import Artifact, Failure, Resources, Result, Toolchain, artifact_key, symbol_of
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.errors import BuildError, CutegenError, StoreError
from cutegen.families.gemm.stand_in import factored_product
from cutegen.measure.device import Device
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels

if TYPE_CHECKING:
    import pytest

H200 = Device("NVIDIA H200", (9, 0), 132, 52428800, 150754820096, "580.1", "13.0", "GPU-0")


class FakeGpu:
    """Compiles and loads kernels that compute with torch on the CPU, and counts what happens.

    Attributes:
        compiled: The sources compiled so far.
        loaded: The symbols loaded so far.
        calls: The positional arguments of each launch, most recent last.
        builders: What compiled in the background, most recent last.
        gate: Background compilations end only while it is set.
        failure: Says for a source why a background compilation of it fails; None if it does not.
    """

    def __init__(self, root: Path) -> None:
        self.store = Store(root)
        self.compiled: list[Source] = []
        self.loaded: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.builders: list[FakeBuilder] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Callable[[Source], CutegenError | None] = lambda source: None
        self._signatures: dict[str, Source] = {}

    @cached_property
    def toolchain(self) -> Toolchain:
        """Looked up once: some tests compile hundreds of kernels."""
        return Toolchain.current()

    def compile(self, source: Source, store: Store) -> Artifact:
        tools = self.toolchain
        key = artifact_key(source, tools)
        self.compiled.append(source)
        self._signatures[symbol_of(key)] = source
        folder = store.folder(source.arch, key)
        return Artifact(
            key, symbol_of(key), source.arch, folder, Resources(), 0.1, source.digest, self.toolchain
        )

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        self.loaded.append(symbol)
        source = self._signatures[symbol]

        def function(*arguments: Any) -> None:
            self.calls.append(arguments)
            compute(source, arguments)

        return function

    def kernels(self, build: str = "allow", **options: Any) -> Kernels:
        made = {"load": self.load, "compile": self.compile, "builder": lambda store: FakeBuilder(self, store)}
        return Kernels(self.store, build=build, **{**made, **options})

    def dispatcher(self, table: Any = None, *, fallback: str = "measured", **options: Any) -> Dispatcher:
        """Return one that does not leave to torch what it expects torch to be faster at, unless asked to."""
        kernels = self.kernels(**options)
        return Dispatcher(
            table, kernels=kernels, device=lambda index: H200, device_type="cpu", fallback=fallback
        )


class FakeBuilder:
    """What :class:`cutegen.build.Builder` is to a background compiler."""

    def __init__(self, gpu: FakeGpu, store: Store) -> None:
        self._gpu, self._store = gpu, store
        self._waiting: list[Source] = []
        self.asked: list[Source] = []
        self.closed = False
        gpu.builders.append(self)

    def __enter__(self) -> FakeBuilder:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def submit(self, sources: Iterable[Source]) -> None:
        self._waiting += (new := list(sources))
        self.asked += new

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        if not self._waiting or not self._gpu.gate.wait(timeout_s):
            return []
        done, self._waiting = self._waiting, []
        return [(source, self._result(source)) for source in done]

    def _result(self, source: Source) -> Result:
        error = self._gpu.failure(source)
        if isinstance(error, BuildError):
            return Failure("0" * 32, error.outcome, str(error), "")
        if isinstance(error, StoreError):
            return Failure("0" * 32, "store", str(error), "", again=True)
        if error is not None:
            raise error
        return self._gpu.compile(source, self._store)


def compute(source: Source, arguments: tuple[Any, ...]) -> None:
    """Do what the kernel of ``source`` does, after the checks that its compiled interface makes."""
    import torch

    signature, config = source.signature, source.config
    epilogue = signature.epilogue
    parts = config.get("split_k", 1) != 1 or config.get("stream_k", False)
    rest = list(arguments)
    a, b, d = (rest.pop(0) for _ in range(3))
    c = rest.pop(0) if epilogue.beta else None
    bias = rest.pop(0) if epilogue.bias else None
    factored = signature.family == "gemm_blocks"
    scales = [rest.pop(0), rest.pop(0)] if epilogue.scale or factored else []
    workspace = rest.pop(0) if parts else None
    beta = rest.pop() if epilogue.beta else 0.0
    alpha = rest.pop() if epilogue.alpha else 1.0
    assert all(type(scalar) is int for scalar in rest), rest
    few_rows = config.algorithm == "few_rows"
    integers = 0 if few_rows else 1 if config.source == "operators" else 4 if parts else 3
    assert len(rest) == integers
    assert isinstance(alpha, (int, float)) and isinstance(beta, (int, float))
    for at, tensor in enumerate((a, b, *(() if signature.unaligned_out else (d,)))):
        if tensor.data_ptr() % 16:
            raise ValueError(f"Misaligned Tensor data on argument #{at}")
    if b.dtype != a.dtype or b.device != a.device:
        raise ValueError("Mismatched Tensor on argument #1: expected dtype")
    assert a.dim() == (3 if signature.batched else 2) and d.stride(-1) == 1
    assert workspace is None or (workspace.dim() == 1 and workspace.dtype == torch.float32)
    if factored:
        blocks_k, blocks_n = -(-b.shape[0] // 128), -(-b.shape[1] // 128)
        assert scales[0].shape == (a.shape[0], blocks_k) and scales[1].shape == (blocks_k, blocks_n)
        assert all(scale.stride(0) == 1 and scale.dtype == torch.float32 for scale in scales)
        value = alpha * factored_product(a, b, *scales)
    else:
        value = alpha * (a.float() @ b.float())
    for scale in scales if epilogue.scale else ():
        assert scale.shape == (1,) and scale.dtype == torch.float32
        value = value * scale
    if c is not None:
        value += beta * c.float()
    if bias is not None:
        assert bias.dim() == 1
        value += bias.float()[:, None] if epilogue.bias == "m" else bias.float()
    functions: dict[str, Callable[[Any], Any]] = {
        "": lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    d.copy_(functions[epilogue.activation](value))


Fake = TypeVar("Fake", bound=FakeGpu)


@contextmanager
def calls_go_to(fake: Fake) -> Iterator[Fake]:
    """Let eager calls ask ``fake``; afterwards as before. What traces needs :func:`operators_ask`."""
    from cutegen.torch_ops import gemm

    before = gemm._dispatcher
    gemm.use(fake.dispatcher())
    try:
        yield fake
    finally:
        gemm._dispatcher = before


@contextmanager
def operators_ask(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Let operators, layers and the backend ask ``fake``, with the CPU for a GPU; afterwards as before."""
    import torch

    import cutegen
    from cutegen.runtime.workspace import Workspaces
    from cutegen.torch_ops import gated_modules, gemm, inductor, linear_modules, norm_modules, rotary_modules

    gemm.prepare()
    before = gemm.default_dispatcher()
    cutegen.use(fake.dispatcher())
    cutegen.reset_counters()
    buffers = Workspaces(lambda _, n, zeroed: torch.zeros(n), lambda _: 0, lambda _: False)
    monkeypatch.setattr(gemm, "_workspaces", buffers)
    for module in (inductor, linear_modules, norm_modules, gated_modules, rotary_modules):
        monkeypatch.setattr(module, "_DEVICE", "cpu")
    yield fake
    cutegen.use(before)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
