"""``cutegen.check_ranks``: whether all ranks of a program would answer alike, asked once and in bounded time.

Ranks meet in the key-value store that torch.distributed was started with, not in a collective: a rank that
never comes cannot hang the others, and no stream or communicator is touched.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import cutegen
from cutegen.digest import Json, digest
from cutegen.errors import CutegenError, RankError, UsageError
from cutegen.text import shown
from cutegen.torch_ops import gemm as state

if TYPE_CHECKING:
    import torch

__all__ = ["FACTS", "check_ranks", "prepare"]

#: What is compared, in the order in which differences are named.
FACTS = ("versions", "gpu", "table", "fallback", "kernels", "frozen")
#: Seconds by which the store's own answers may be late before the thread that asks it is given up.
_LATE_S = 5.0
#: Seconds for which the process that keeps the store waits for the others to have read it.
_READ_S = 5.0


def check_ranks(
    group: torch.distributed.ProcessGroup | None = None,
    *,
    timeout_s: float = 60.0,
    ignore: Sequence[str] = (),
) -> Mapping[str, str]:
    """Compare with the other ranks what calls of cutegen would be answered with; return what all have.

    To be called once by every rank of ``group``, after warming up and before serving. It is no collective: it
    uses the store of torch.distributed, whatever the backend, and ends after ``timeout_s`` and some seconds.

    Args:
        group: The ranks; all by default.
        timeout_s: Seconds to wait for the others.
        ignore: Names of facts that may differ: ``versions`` (cutegen, torch and what compiles), ``gpu``
            (name and SMs), ``table`` (its digest), ``fallback`` (where torch answers), ``kernels`` (the
            digest of what is loaded), ``frozen``. Ranks that have other layers need ``kernels``.

    Raises:
        RankError: Ranks differ, which all of them raise and which names the facts and the ranks; or a rank
            did not come in time, or the store does not answer.
        UsageError: torch.distributed is not initialized, this process is no rank of ``group``, or there is no
            such fact.
    """
    unknown = sorted({*ignore} - {*FACTS})
    if unknown:
        raise UsageError(f"ignore names {shown(unknown[0])}; valid: {', '.join(FACTS)}")
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("torch.distributed is not initialized, so there are no ranks to compare")
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    rank = dist.get_rank()
    if rank not in ranks:
        raise UsageError(f"rank {rank} is not in the group, which has {', '.join(map(str, ranks))}")
    own = {name: text for name, text in _facts().items() if name not in ignore}
    answers = _within(timeout_s, lambda: _exchange(_store(), ranks, rank, own, timeout_s))
    differences = [_difference(name, answers) for name in FACTS if len(_values(name, answers)) > 1]
    if differences:
        raise RankError(f"ranks differ in {'; '.join(differences)}")
    return own


def _store() -> Any:
    """Return the store that torch.distributed was started with."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    return private._get_default_store()


def _facts() -> dict[str, str]:
    """Return what decides how calls of this process are answered, as short texts."""
    import torch

    dispatcher = state.default_dispatcher()
    kernels = dispatcher.kernels
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    try:
        device = dispatcher.device(index)
        gpu, table = f"{device.name}, {device.sm_count} SMs", dispatcher.table(index)
    except CutegenError:
        gpu, table = "none", None
    tools = digest(kernels.toolchain.to_json(), length=8)
    return {
        "versions": f"cutegen {cutegen.__version__}, torch {torch.__version__}, toolchain {tools}",
        "gpu": gpu,
        "table": "none" if table is None else table.digest,
        "fallback": dispatcher.fallback or "of the table",
        "kernels": digest(sorted(kernels.loaded), length=16),
        "frozen": kernels.on_miss or "no",
    }


def _exchange(
    store: Any, ranks: Sequence[int], rank: int, own: Mapping[str, str], timeout_s: float
) -> dict[int, dict[str, Json]]:
    """Return what every rank says, this one included."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    deadline = time.monotonic() + timeout_s
    place = f"cutegen_ranks/{'_'.join(map(str, ranks))}"
    number = store.add(f"{place}/calls_of_{rank}", 1)  # the n-th call of one rank meets the n-th of others
    shared = private.PrefixStore(f"{place}/{number}", store)
    shared.set(f"says_{rank}", json.dumps(own))
    missing = _wait(shared, {each: f"says_{each}" for each in ranks}, deadline)
    if missing:
        names = ", ".join(map(str, missing))
        raise RankError(
            f"no answer from rank {names} within {timeout_s:g} s; it may have ended, or does not ask"
        )
    found = {each: json.loads(shared.get(f"says_{each}")) for each in ranks}
    shared.set(f"read_{rank}", "")
    if rank == 0:  # whose process keeps the store, and may end as soon as this returns
        _wait(shared, {each: f"read_{each}" for each in ranks}, min(deadline, time.monotonic() + _READ_S))
    return found


def _wait(store: Any, keys: Mapping[int, str], deadline: float) -> list[int]:
    """Wait for keys of ranks; return the ranks whose keys are not there in time."""
    left = max(0.001, deadline - time.monotonic())
    try:
        store.wait([*keys.values()], timedelta(seconds=left))
    except RuntimeError:
        if time.monotonic() < deadline - _LATE_S:
            raise  # the store, not a rank
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def _within(timeout_s: float, ask: Callable[[], dict[int, dict[str, Json]]]) -> dict[int, dict[str, Json]]:
    """Return what ``ask`` does, which the machine of the store may keep waiting if it is gone."""
    answers: list[dict[int, dict[str, Json]]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except (RankError, RuntimeError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="cutegen ranks", daemon=True)
    thread.start()
    thread.join(timeout_s + _LATE_S + _READ_S)
    if answers:
        return answers[0]
    if errors and isinstance(errors[0], RankError):
        raise errors[0]
    reason = str(errors[0]).strip().splitlines()[:1] if errors else [f"no answer within {timeout_s:g} s"]
    raise RankError(f"the store of torch.distributed does not answer: {''.join(reason)}")


def _values(name: str, answers: Mapping[int, Mapping[str, Json]]) -> dict[Json, list[int]]:
    """Return which ranks say what of a fact; what a rank left out, or another version lacks, is nothing."""
    found: dict[Json, list[int]] = {}
    for rank, said in sorted(answers.items()):
        found.setdefault(said.get(name, "not compared"), []).append(rank)
    return found


def _difference(name: str, answers: Mapping[int, Mapping[str, Json]]) -> str:
    sides = [f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in _values(name, answers).items()]
    return f"{name}: {' against '.join(sides)}"


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
