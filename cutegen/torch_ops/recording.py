"""``cutegen.record``: which problems a program calls, how often, and how they are answered."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cutegen
from cutegen.digest import Json
from cutegen.errors import CutegenError, UsageError
from cutegen.family import Problem
from cutegen.records.recorded_calls import (
    Call,
    append_calls,
    problems_of,
    rank_path,
    require_writable,
    table_of,
)
from cutegen.runtime import recorder
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import drop_family_plans

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["Recording", "prepare", "record"]

#: The report of a program that called none of the operators.
_NOTHING = (
    "no call of cutegen's operators; a model calls them after cutegen.optimize(model) or "
    'torch.compile(model, backend="cutegen")'
)


class Recording:
    """Calls of cutegen's operators between ``with`` and the end of its block; see :func:`record`.

    Attributes:
        path: Where they are appended at the end; None if nowhere.
    """

    def __init__(self, path: Path | None, model: torch.nn.Module | None = None) -> None:
        self.path = path
        self._recorder = recorder.Recorder(_in_backward(), _explain, _layers(model))
        self._saved: Counter[Call] = Counter()
        self._refused: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        self._running = False

    def __enter__(self) -> Self:
        if self._running:
            raise UsageError("this recording runs already; cutegen.record() makes another")
        if self.path is not None:
            require_writable(self.path)
        prepare()
        self._running = True
        self._before = _fallbacks()
        recorder.start(self._recorder)
        _drop_plans()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder.stop(self._recorder)
        _drop_plans()
        self._refused += _fallbacks() - self._before
        self._running = False
        self.save()

    @property
    def calls(self) -> Mapping[Call, int]:
        """How often each kind of call was seen so far."""
        return self._recorder.counts

    @property
    def alignments(self) -> Mapping[Call, int]:
        """To how many bytes, 256 at most, all operands of a kind of call were aligned so far."""
        return self._recorder.alignments

    @property
    def problems(self) -> dict[Problem, int]:
        """How often each problem was called so far, the most frequent first."""
        return problems_of(self.calls)

    def report(self) -> str:
        """Return a table of what was called, and what torch computed in optimized models, with reasons."""
        refused = self._refused + (_fallbacks() - self._before if self._running else Counter())
        if not self.calls and not refused:
            return _NOTHING
        rows = [("calls", "phase", "answer", "problem"), *table_of(self.calls)]
        widths = [max(len(row[at]) for row in rows) for at in range(3)]
        lines = [
            "  ".join([row[0].rjust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2]), row[3]])
            for row in rows
        ]
        lines += [f"{count} by torch: {reason}" for reason, count in refused.most_common()]
        return "\n".join(lines)

    def save(self) -> None:
        """Append what is new since the last time to the file, if there is one; done at the end of the block.

        Raises:
            StoreError: It cannot be written.
        """
        counts = self._recorder.counts
        new = counts - self._saved
        if self.path is not None and new:
            append_calls(self.path, _about(), new, self.alignments)
        self._saved = counts


def record(
    path: str | Path | None = None, *, rank: int | None = None, model: torch.nn.Module | None = None
) -> Recording:
    """Return a context in which calls of cutegen's operators are counted by problem.

    Calls are counted eager, in compiled code and in backward passes; with fake tensors too, if no compiler
    traces them. A CUDA graph counts when it is captured, not when it is replayed. Plans are
    dropped at both ends, so that the first call of each kind takes longer; while nobody records, calls check
    nothing. What torch computes in place of cutegen is no call; :meth:`Recording.report` counts it.

    Args:
        path: JSON lines are appended here at the end; nothing is written by default.
        rank: Of this process among several: each writes a file of its own, ``model.rank0.jsonl`` for
            ``model.jsonl``. By default ``RANK`` of the environment, which torchrun sets.
        model: Calls are told apart by its layers, known by the address of their weight, with numbers in their
            names as ``*``: forward calls and gradients of inputs. A compiled model may copy weights.

    Raises:
        UsageError: ``rank`` is negative.
    """
    if rank is None and os.environ.get("RANK", "").isdecimal():
        rank = int(os.environ["RANK"])
    if rank is not None and rank < 0:
        raise UsageError(f"rank={rank} must be at least 0")
    return Recording(None if path is None else rank_path(Path(path), rank), model)


def _drop_plans() -> None:
    state.drop_plans()
    drop_family_plans()


def _layers(model: torch.nn.Module | None) -> dict[int, str]:
    """Return the names of layers by the address of their weight; weights without memory have none."""
    import torch

    found: dict[int, str] = {}
    for name, module in model.named_modules() if model is not None else ():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.is_meta or _is_fake(weight):
            continue
        if address := weight.data_ptr():
            found.setdefault(address, re.sub(r"\b\d+\b", "*", name))
    return found


def _is_fake(tensor: torch.Tensor) -> bool:
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # not loaded: there can be none
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def _in_backward() -> Any:
    """Return what tells whether this thread runs a backward pass."""
    import torch

    task: Any = getattr(torch._C, "_current_graph_task_id", None)
    return (lambda: False) if task is None else (lambda: task() != -1)


def _explain(problem: Problem) -> Any:
    return state.default_dispatcher().explain(problem)


def _fallbacks() -> Counter[str]:
    return Counter(fallbacks.counts())


def _about() -> dict[str, Json]:
    """Return the header of a section."""
    try:
        gpu: str | None = state.default_dispatcher().device().name
    except CutegenError:
        gpu = None
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"cutegen": cutegen.__version__, "gpu": gpu, "pid": os.getpid(), "written_at": moment}


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
