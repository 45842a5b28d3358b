"""Programs that serve: no compiler and no loading from some moment on, and counts of what answered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from cutegen.errors import CutegenError
from cutegen.runtime.dispatch import Dispatcher
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops import gemm as state

__all__ = ["counters", "freeze", "prepare", "reset_counters"]


def freeze(on_miss: str = "fallback") -> Dispatcher:
    """Let the operators compile and load nothing from now on, and return their new dispatcher.

    Calls use the kernels that have run in this process: warm up before, :func:`cutegen.warmup`. What is being
    compiled in the background is given up. :func:`cutegen.load_table` and :func:`cutegen.warmup` still do
    what they are called for; ``cutegen.configure(build="background")`` ends it. Each call is counted from now
    on, which costs it 0.2 to 0.3 us on the host.

    Args:
        on_miss: What a call gets whose kernel has not run. ``fallback``: torch, or another kernel that has,
            computes it, and :func:`counters` names the problem. ``warn``: so, and the log (``cutegen``)
            says it once for each problem. ``error``: :class:`cutegen.errors.FrozenError`, also from
            optimized layers; so does, whatever is said here, a call with a ``config``.

    Raises:
        UsageError: There is no such answer.
    """
    found = state.default_dispatcher().frozen(on_miss)
    _table_of(found)  # read now, if it was not before
    return state.use(found)


def counters() -> Mapping[str, Any]:
    """Return what was answered since the start or :func:`reset_counters`.

    - ``problems``: how many problems each rule of lookup answers; ``torch`` where the choice was torch,
      ``awaited`` while a kernel is being compiled or cannot be, ``missed`` where it had not run before
      :func:`freeze`.
    - ``calls``: the same in calls, counted after :func:`freeze` only; replays of CUDA graphs do not count.
    - ``fallbacks``: calls that torch answered in optimized models, and missed calls, by reason; a compiled
      graph counts once, when it is traced.
    - ``late_compiles``: kernels compiled because a call needed them.
    - ``frozen``: ``on_miss`` of :func:`freeze`, else empty.
    - ``table``: the digest of the table that answers, empty if none does.
    """
    dispatcher = state.default_dispatcher()
    tally, table = dispatcher.kernels.tally, _table_of(dispatcher)
    missed = {f"frozen before {problem} was warmed up": n for problem, n in tally.missed.items()}
    return {
        "fallbacks": {**fallbacks.counts(), **missed},
        "problems": tally.problems,
        "calls": tally.calls,
        "late_compiles": tally.late_compiles,
        "frozen": dispatcher.kernels.on_miss,
        "table": "" if table is None else table.digest,
    }


def reset_counters() -> None:
    """Begin counting anew. What answers a problem is counted again when it is looked up again."""
    fallbacks.reset()
    state.default_dispatcher().kernels.tally.reset()


def _table_of(dispatcher: Dispatcher) -> Any:
    """Return the table that answers on the current GPU; None if there is none, or no GPU."""
    torch = sys.modules.get("torch")  # who never used it has no current GPU
    try:
        index = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
        return dispatcher.table(index)
    except CutegenError:
        return None


def prepare() -> None:
    """Nothing: neither freezing nor counting needs torch."""
