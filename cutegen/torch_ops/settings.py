"""Settings of the operators: which table answers, what waits for the compiler, and where PyTorch computes."""

from __future__ import annotations

import sys
from pathlib import Path

from cutegen.errors import UsageError
from cutegen.runtime.dispatch import Dispatcher
from cutegen.torch_ops import gemm as state

__all__ = ["configure", "load_table", "prepare", "wait_for_kernels"]


def configure(*, build: str | None = None, fallback: str | None = None) -> Dispatcher:
    """Change the settings of the operators, and return their new dispatcher; None leaves one as it is.

    Args:
        build: What a call does whose kernel is not compiled. ``background``, the default: PyTorch or another
            kernel computes while a thread compiles it, and from then on it is used. ``allow``: the call
            waits for the compiler, for seconds. ``never``: the call is refused.
        fallback: Where PyTorch's own call answers instead of a kernel, as for :func:`load_table`.

    Raises:
        UsageError: There is no such value.
    """
    dispatcher = state.default_dispatcher()
    if build is not None:
        dispatcher = dispatcher.with_build(build)
    return state.use(dispatcher if fallback is None else dispatcher.with_fallback(fallback))


def wait_for_kernels(timeout_s: float | None = None) -> bool:
    """Wait until no kernel is compiled in the background, or for so many seconds.

    The next call of each kind then uses its kernel. To be done before results must not change in their last
    bits, before times are taken, and before CUDA graphs are captured.

    Returns:
        Whether nothing is being compiled. What cannot be compiled was logged, and counts as done.
    """
    return state.default_dispatcher().kernels.wait(timeout_s)


def load_table(path: str | Path, *, fallback: str | None = None) -> Dispatcher:
    """Make the operators use the dispatch table at ``path``, and return their new dispatcher.

    A table made for another GPU or toolchain is ignored, with a warning that names the field. The next calls
    use the new table; captured CUDA graphs keep their kernels. Where no call may wait, warm up with the
    table before: :func:`cutegen.warmup`.

    Args:
        path: The table.
        fallback: Where PyTorch's own call answers instead of a kernel: ``torch`` (where the kernel is not
            sure to be faster), ``expected`` (where a measurement or, of what nobody measured, the model says
            that PyTorch is), ``measured`` (where a measurement does) or ``none``. None keeps the setting of
            the present dispatcher.

    Raises:
        StoreError: The file cannot be read.
        TableError: It is not a dispatch table.
        UsageError: There is no such fallback; a CUDA graph is being captured; or calls were answered, and
            torch is to be deterministic: other configs may add in another order.
    """
    _require_swappable()
    return state.use(state.default_dispatcher().with_table(path, fallback=fallback))


def _require_swappable() -> None:
    """Refuse another table where results must stay the same."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UsageError("a CUDA graph is being captured; load a table before or after")
    if state.has_plans() and torch.are_deterministic_algorithms_enabled():
        raise UsageError(
            "calls were answered with the present table, and torch.use_deterministic_algorithms is on: "
            "another table may change their last bits; load it before the first call"
        )


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
