"""Calls counted while somebody records, at no cost while nobody does: launchers of new plans are wrapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from cutegen.errors import CutegenError
from cutegen.family import Problem
from cutegen.records.recorded_calls import ALIGNMENTS, UNKNOWN, Call
from cutegen.runtime.answer_lookup import Answer
from cutegen.system.forks import RenewedLock

__all__ = ["Recorder", "counted", "is_recording", "note", "start", "stop"]

#: Of a launcher's arguments so many are looked at: a, b and the result of a GEMM.
_OPERANDS = 3
_lock = RenewedLock()
#: Those that count now. A plan that is made meanwhile counts for them; plans must be dropped at both ends.
_recorders: tuple[Recorder, ...] = ()


class Recorder:
    """Counts calls by problem, phase, and how the dispatcher answered.

    Args:
        in_backward: Whether this thread computes gradients.
        explain: Asks the dispatcher about a problem that is only traced with fake tensors.
        layers: Names of layers by the address of their weight; empty if calls are not told apart by them.
    """

    def __init__(
        self,
        in_backward: Callable[[], bool],
        explain: Callable[[Problem], Answer],
        layers: Mapping[int, str] | None = None,
    ) -> None:
        self._in_backward = in_backward
        self._explain = explain
        self._layers = layers or {}
        self._lock = RenewedLock()
        #: Of each kind of call the number, and all addresses of operands or'ed together.
        self._cells: dict[Call, list[int]] = {}
        self._answers: dict[Problem, Answer | None] = {}

    def counted(self, launch: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
        """Return a launcher that counts a call and then launches."""
        cells = {phase: {"": self._cell(_call(answer, phase))} for phase in ("forward", "backward")}
        lock, in_backward, layers = self._lock, self._in_backward, self._layers

        def counting(*arguments: Any) -> Any:
            phase = "backward" if in_backward() else "forward"
            addresses = [tensor.data_ptr() for tensor in arguments[:_OPERANDS] if hasattr(tensor, "data_ptr")]
            layer = next((layers[address] for address in addresses if address in layers), "")
            cell = cells[phase].get(layer)
            if cell is None:
                cell = cells[phase][layer] = self._cell(_call(answer, phase, layer))
            with lock:
                cell[0] += 1
                for address in addresses:
                    cell[1] |= address
            return launch(*arguments)

        return counting

    def note(self, problem: Problem) -> None:
        """Count a call that computes nothing."""
        phase = "backward" if self._in_backward() else "forward"
        if problem not in self._answers:
            self._answers[problem] = self._ask(problem)
        answer = self._answers[problem]
        cell = self._cell(_call(answer, phase) if answer else Call(problem, phase, UNKNOWN))
        with self._lock:
            cell[0] += 1

    def _cell(self, call: Call) -> list[int]:
        """Return where a kind of call is counted: to find it costs more than to count."""
        with self._lock:
            return self._cells.setdefault(call, [0, 0])

    def _ask(self, problem: Problem) -> Answer | None:
        try:
            return self._explain(problem)
        except CutegenError:  # such as no GPU that could answer
            return None

    @property
    def counts(self) -> Counter[Call]:
        """How often each call was seen so far."""
        with self._lock:
            return Counter({call: cell[0] for call, cell in self._cells.items() if cell[0]})

    @property
    def alignments(self) -> dict[Call, int]:
        """To how many bytes all operands of all calls of a kind were aligned, where there were addresses."""
        with self._lock:
            found = {call: cell[1] for call, cell in self._cells.items() if cell[1]}
        return {call: min(ALIGNMENTS[-1], bits & -bits) for call, bits in found.items()}


def _call(answer: Answer, phase: str, layer: str = "") -> Call:
    source = answer.config.source if answer.config else "torch"
    return Call(answer.problem, phase, answer.how, source, layer)


def start(recorder: Recorder) -> None:
    """Let ``recorder`` count the calls of plans that are made from now on."""
    global _recorders
    with _lock:
        _recorders = (*_recorders, recorder)


def stop(recorder: Recorder) -> None:
    """Let plans that are made from now on do without ``recorder``."""
    global _recorders
    with _lock:
        _recorders = tuple(each for each in _recorders if each is not recorder)


def is_recording() -> bool:
    """Return whether anybody records."""
    return bool(_recorders)


def note(problem: Problem) -> None:
    """Count a call with fake tensors."""
    for recorder in _recorders:
        recorder.note(problem)


def counted(launch: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    """Return ``launch``, or what counts and launches if somebody records."""
    for recorder in _recorders:
        launch = recorder.counted(launch, answer)
    return launch
