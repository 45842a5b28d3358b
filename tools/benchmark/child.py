"""The measuring child of a contest: cutegen's engine, plus implementations that are called, not loaded.

A candidate whose library is one of the names below is such a call; its symbol says what to call. All others
are compiled kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.digest import Json
from cutegen.errors import LaunchError
from cutegen.families.gemm.problem import Problem
from cutegen.measure import Candidate
from cutegen.measure.torch_engine import TorchEngine
from cutegen.system.publish import publish
from tools.benchmark.bandwidth import COPY_CALL, CopyCall
from tools.benchmark.cublaslt import LT_CALL, CublasLt, LtCall, LtOrder, loaded_library
from tools.benchmark.max_autotune import MAX_AUTOTUNE_CALL, MaxAutotuneCall

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENGINE",
    "GEMM_CALL",
    "QUACK_CALL",
    "ContestEngine",
    "QuackCall",
    "QuackOrder",
    "load",
    "open_engine",
]

#: What to start the measuring child with.
ENGINE = "tools.benchmark.child:open_engine"
#: ``cutegen.gemm`` or ``scaled_gemm``; the symbol says for which problem, and which table to load (empty: the
#: cache's).
GEMM_CALL = "call-cutegen-gemm"
#: ``quack.gemm``; the symbol is a :class:`QuackOrder`.
QUACK_CALL = "call-quack-gemm"

Call = Callable[..., None]


class ContestEngine(TorchEngine):
    """cutegen's engine, which also times copies, which compute nothing, and calls that make their output."""

    def must_write(self, candidate: Candidate) -> bool:
        """Return whether ``candidate`` is to fill the output that it is given."""
        return candidate.shared_object.name not in (COPY_CALL, MAX_AUTOTUNE_CALL)


def open_engine(index: int) -> ContestEngine:
    """Return the engine for GPU ``index``, with our loader.

    Raises:
        DeviceError: There is no such GPU.
    """
    from cutegen.measure.device import present_device
    from cutegen.measure.nvml import ClockMeter

    facts = present_device(index)
    import torch

    from cutegen.measure.cuda_graphs import CudaLane

    lane = CudaLane(index)
    return ContestEngine(torch.device("cuda", index), facts, lane, load, ClockMeter(facts.uuid))


def load(library: Path, symbol: str) -> Call:
    """Return what a candidate runs.

    Raises:
        LaunchError: It cannot be had.
    """
    if library.name == GEMM_CALL:
        return _gemm_call(symbol)
    if library.name == COPY_CALL:
        return CopyCall(symbol)
    if library.name == LT_CALL:
        return LtCall(LtOrder.from_json(json.loads(symbol)), _cublaslt())
    if library.name == MAX_AUTOTUNE_CALL:
        return MaxAutotuneCall(symbol, _keywords)
    if library.name == QUACK_CALL:
        return QuackCall(QuackOrder.from_json(json.loads(symbol)))
    from cutegen.build.loader import load_kernel

    return load_kernel(library, symbol)


@cache
def _cublaslt() -> CublasLt:
    return CublasLt(loaded_library())


def _gemm_call(order: str) -> Call:
    """Return the library call that a user would write for a problem, taking a kernel's arguments."""
    import cutegen

    wanted = json.loads(order)
    problem = Problem.parse(wanted["problem"])
    cutegen.configure(build="allow")
    if wanted["table"]:
        cutegen.load_table(wanted["table"], fallback="none")

    def call(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *rest: Any) -> None:
        given = _keywords(problem, rest)
        if problem.epilogue.scale:
            cutegen.scaled_gemm(a, b, out=d, fast_accum=not problem.promote, **given)
        else:
            cutegen.gemm(a, b, out=d, any_order=problem.any_order, **given)

    return call


def _keywords(problem: Problem, rest: Sequence[Any]) -> dict[str, Any]:
    """Return what follows a, b and d in a kernel's arguments under the names that the library gives it."""
    epilogue = problem.epilogue
    present = {
        "c": epilogue.beta,
        "bias": epilogue.bias,
        "scale_a": epilogue.scale,
        "scale_b": epilogue.scale,
        "alpha": epilogue.alpha,
        "beta": epilogue.beta,
    }
    given = dict(zip((name for name, there in present.items() if there), rest, strict=True))
    if epilogue.bias == "m":
        given["bias"] = given["bias"][:, None]
    return {**given, "activation": epilogue.activation}


@dataclass(frozen=True)
class QuackOrder:
    """What QuACK is to run, and how it is to find out.

    Attributes:
        note: File to write what its autotuner found to; empty for none.
        config: Fields of its config, to run that one without tuning; empty tunes.
        split_k: ``1`` as by default, ``0`` to let its autotuner choose.
        timed_calls: Calls that its autotuner times per config; 0 leaves its own number.
    """

    note: str = ""
    config: Mapping[str, Json] | None = None
    split_k: int = 1
    timed_calls: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {**asdict(self), "config": None if self.config is None else dict(self.config)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuackOrder:
        """Return the order that :meth:`to_json` described."""
        return cls(**data)


class QuackCall:
    """``quack.gemm`` as a kernel: the first call tunes, or compiles the config that was asked for.

    Args:
        order: What to run.

    Raises:
        LaunchError: QuACK is not installed, or does not import.
    """

    def __init__(self, order: QuackOrder) -> None:
        try:
            from cutlass.base_dsl.common import DSLBaseError
            from quack import autotuner, gemm_config, gemm_interface
        except ImportError as error:
            raise LaunchError(f"QuACK cannot be imported: {error}") from error
        self._compile_error: type[Exception] = DSLBaseError
        self._order = order
        self._tuned = False
        self._interface: Any = gemm_interface
        self._config: Any = None if order.config is None else gemm_config.GemmConfig(**order.config)
        if order.timed_calls:
            _limit_timed_calls(autotuner, order.timed_calls)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        """Compute ``d = a @ b``.

        Raises:
            LaunchError: It did not compile.
        """
        try:
            self._run(a, b, d)
        except self._compile_error as error:
            raise LaunchError(f"QuACK does not compile: {error}") from error

    def _run(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        if self._config is not None:
            split_k = int(self._config.split_k)
            self._interface.gemm_tuned.fn(a, b, d, config=self._config, split_k=split_k)
        elif self._tuned:
            self._gemm(a, b, d)
        else:
            self._tune(a, b, d)
            self._tuned = True

    def _gemm(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        self._interface.gemm(a, b, out=d, tuned=True, split_k=self._order.split_k or None)

    def _tune(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        import torch

        torch.cuda.synchronize()
        started = time.perf_counter()
        self._gemm(a, b, d)
        torch.cuda.synchronize()
        note = {**_found(self._interface.gemm_tuned), "tuning_s": time.perf_counter() - started}
        if self._order.note:
            _write(Path(self._order.note), note)
        if note["failed"] == note["candidates"]:
            raise LaunchError(f"all {note['candidates']} configs of QuACK's autotuner failed")


def _limit_timed_calls(autotuner: Any, count: int) -> None:
    """Make QuACK's autotuner time fewer calls per config; everything else of its measurement stays."""
    original = getattr(autotuner, "_cutegen_original", autotuner._bench_cuda_graph_l2_rotate)
    autotuner._cutegen_original = original

    def bench(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **{**options, "n_timed_calls": count})

    autotuner._bench_cuda_graph_l2_rotate = bench


def _found(tuner: Any) -> dict[str, Any]:
    """Return what QuACK's autotuner found last: its config, and how many it tried."""
    times = [timings[0] for timings in getattr(tuner, "configs_timings", {}).values()]
    return {
        "config": asdict(tuner.best_config.kwargs["config"]),
        "candidates": len(times),
        "failed": sum(seconds == float("inf") for seconds in times),
    }


def _write(path: Path, note: Mapping[str, Any]) -> None:
    publish(path, json.dumps(note).encode(), "note of QuACK's tuning")
