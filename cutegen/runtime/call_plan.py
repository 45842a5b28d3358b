"""A kernel's arguments bound by name, once: what is left for a call is one Python call of the kernel.

The binding is a lambda that is written for the kernel, so no call loops over arguments or unpacks a tuple.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cutegen.family import Argument, Inputs, StandIn
from cutegen.runtime.dispatch import Served
from cutegen.runtime.kernel_cache import not_in_capture
from cutegen.runtime.recorder import counted
from cutegen.runtime.workspace import GetWorkspace
from cutegen.space import Launch

__all__ = ["LauncherForm", "call_by_name", "launcher_form", "make_launcher", "serve_call"]

_log = logging.getLogger("cutegen")


def make_launcher(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    launch: Launch,
    workspace: GetWorkspace,
    device: int,
    *,
    parameters: Sequence[str] = (),
) -> Callable[..., Any]:
    """Return a function that calls a kernel, adding workspace and integers where the kernel takes them.

    Args:
        function: The loaded kernel.
        arguments: Of the kernel, in the order of its parameters.
        launch: Integers and workspace for one config and problem.
        workspace: Asked at every call for scratch memory, if the launch needs any.
        device: Index of the GPU.
        parameters: Of the returned function; by default the tensors and scalars among ``arguments``.
    """
    kinds = [(argument.name, argument.kind) for argument in arguments]
    given = parameters or [name for name, kind in kinds if kind not in ("scratch", "launch")]
    passed = [(kind if kind in ("scratch", "launch") else "", name) for name, kind in kinds]
    return launcher_form(tuple(passed), tuple(given))(function, launch, workspace, device)


@lru_cache(maxsize=256)
def launcher_form(passed: tuple[tuple[str, str], ...], parameters: tuple[str, ...]) -> LauncherForm:
    """Return what makes the launchers of kernels with such arguments, whose texts are compiled once.

    Args:
        passed: For each argument of the kernel ``scratch`` or ``launch``, or nothing and where it is among
            the parameters, as a Python expression.
        parameters: Of the launchers.
    """
    return LauncherForm(passed, parameters)


class LauncherForm:
    """Makes launchers: the text of one depends on how many integers and whether a workspace it adds."""

    def __init__(self, passed: Sequence[tuple[str, str]], parameters: Sequence[str]) -> None:
        self._passed, self._parameters = passed, parameters
        #: What is ours in the text begins with more underscores than any name of a family's.
        self._own = "_"
        while any(name.startswith(self._own) for name in parameters):
            self._own += "_"
        self._makers: dict[tuple[int, bool], Callable[..., Any]] = {}

    def __call__(
        self, function: Callable[..., Any], launch: Launch, workspace: GetWorkspace, device: int
    ) -> Callable[..., Any]:
        """Return a launcher; the arguments are those of :func:`make_launcher`."""
        elements = -(-launch.workspace_bytes // 4)
        kind = len(launch.scalars), elements > 0
        make = self._makers.get(kind)
        if make is None:
            make = self._makers[kind] = self._maker(*kind)
        made: Callable[..., Any] = make(function, workspace, device, elements, launch.zeroed, *launch.scalars)
        return made

    def _maker(self, integers: int, scratch: bool) -> Callable[..., Any]:
        function, workspace, device, elements, zeroed = fixed = [
            self._own + name for name in ("function", "workspace", "device", "elements", "zeroed")
        ]
        numbers = [f"{self._own}{at}" for at in range(integers)]
        adds = {
            "scratch": [f"{workspace}({device}, {elements}, {zeroed})"] if scratch else [],
            "launch": numbers,
        }
        passed = [text for kind, name in self._passed for text in (adds[kind] if kind else [name])]
        inner = f"lambda {', '.join(self._parameters)}: {function}({', '.join(passed)})"
        # Names are identifiers of families, which these check; the others are ours.
        made: Callable[..., Any] = eval(f"lambda {', '.join([*fixed, *numbers])}: {inner}", {})
        return made


def call_by_name(stand_in: StandIn, arguments: Sequence[Argument]) -> Callable[..., None]:
    """Return a function that calls a stand-in with tensors and scalars in the order of ``arguments``."""
    given = [a for a in arguments if a.kind not in ("scratch", "launch")]

    def launch(*values: Any) -> None:
        kinds = {a.name: (a.kind, value) for a, value in zip(given, values, strict=True)}
        tensors = {name: value for name, (kind, value) in kinds.items() if kind in ("in", "inout")}
        scalars = {name: value for name, (kind, value) in kinds.items() if kind == "scalar"}
        outputs = {name: value for name, (kind, value) in kinds.items() if kind in ("out", "inout")}
        stand_in(Inputs(tensors, scalars), outputs)

    return launch


def _ticking(launch: Callable[..., Any], ticks: Sequence[Callable[[], object]]) -> Callable[..., Any]:
    """Return a launcher that counts its calls."""
    for tick in ticks:
        launch = _ticking_once(launch, tick)
    return launch


def _ticking_once(launch: Callable[..., Any], tick: Callable[[], object]) -> Callable[..., Any]:
    def ticking(*arguments: Any) -> None:
        tick()
        launch(*arguments)

    return ticking


def serve_call(
    serve: Callable[[bool], Served],
    bind: Callable[[Served], Callable[..., Any]],
    keep: Callable[[Callable[..., Any]], None],
    capturing: Callable[[], bool],
) -> Callable[..., Any]:
    """Return what launches a call: what the dispatcher serves it with, until its kernel is ready.

    A launcher that waits for a kernel, or for its first launch on a GPU, replaces itself in the plan, so that
    calls of a finished plan cost nothing more. It does so outside of captures only, where kernels may be
    loaded: a CUDA graph keeps what served while it was captured.

    Args:
        serve: Asks the dispatcher, given whether a CUDA graph is being captured.
        bind: Turns its answer into a launcher.
        keep: Puts a launcher into the plan.
        capturing: Whether a CUDA graph is being captured.
    """
    served = serve(capturing())
    launch, awaited = counted(_ticking(bind(served), served.ticks), served.answer), served.awaited
    if awaited is None:
        return _launched_once(launch, served, keep, capturing)

    def keep_waiting(launcher: Callable[..., Any]) -> None:
        nonlocal launch
        launch = launcher

    launch = _launched_once(launch, served, keep_waiting, capturing)
    told = False

    def waiting(*arguments: Any) -> None:
        nonlocal told
        if capturing():
            if not told:
                told = True
                _log.warning(
                    "a CUDA graph captures %s without its kernel, which is being compiled, and keeps what "
                    "computes it now; cutegen.wait_for_kernels(), call once and capture again",
                    served.answer.problem,
                )
            launch(*arguments)
        elif awaited.finished:
            final = serve_call(serve, bind, keep, capturing)
            keep(final)
            final(*arguments)
        else:
            launch(*arguments)

    return waiting


def _launched_once(
    launch: Callable[..., Any],
    served: Served,
    keep: Callable[[Callable[..., Any]], None],
    capturing: Callable[[], bool],
) -> Callable[..., Any]:
    """Return ``launch``, at first with a note of its kernel's first launch, which no capture may be.

    That launch may fail, or its call may be refused before it comes to it: so it counts when it is over.
    """
    first = None if served.choice is None else served.choice.first
    if first is None:
        return launch

    def noting(*arguments: Any) -> None:
        if not first.done and capturing():
            raise not_in_capture(served.answer.problem)
        launch(*arguments)
        first.happened()
        keep(launch)

    return noting
