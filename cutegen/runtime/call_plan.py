"""A kernel's arguments bound by name, once: what is left for a call is one Python call of the kernel.

The binding is a lambda that is written for the kernel, so no call loops over arguments or unpacks a tuple.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cutegen.family import Argument, Inputs, StandIn
from cutegen.runtime.dispatch import Served
from cutegen.runtime.recorder import counted
from cutegen.runtime.workspace import GetWorkspace
from cutegen.space import Launch

__all__ = ["call_by_name", "make_launcher", "serve_call"]

_log = logging.getLogger("cutegen")


def make_launcher(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    launch: Launch,
    workspace: GetWorkspace,
    device: int,
    *,
    parameters: Sequence[str] = (),
    places: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls a kernel, adding workspace and integers where the kernel takes them.

    Args:
        function: The loaded kernel.
        arguments: Of the kernel, in the order of its parameters.
        launch: Integers and workspace for one config and problem.
        workspace: Asked at every call for scratch memory, if the launch needs any.
        device: Index of the GPU.
        parameters: Of the returned function; by default the tensors and scalars among ``arguments``.
        places: Where a tensor or scalar is among the parameters, as a Python expression; by default the
            parameter of its name.
    """
    given = [a.name for a in arguments if a.kind not in ("scratch", "launch")]
    elements = -(-launch.workspace_bytes // 4)
    passed: list[str] = []
    for argument in arguments:
        if argument.kind == "scratch":
            passed += [f"workspace({device}, {elements}, {launch.zeroed})"] if elements else []
        elif argument.kind == "launch":
            passed += map(str, launch.scalars)
        else:
            passed.append((places or {}).get(argument.name, argument.name))
    text = f"lambda {', '.join(parameters or given)}: function({', '.join(passed)})"
    # Names are identifiers of families, which these check; the numbers are ours.
    bound: Callable[..., Any] = eval(text, {"function": function, "workspace": workspace})
    return bound


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

    A launcher that waits for a kernel replaces itself in the plan, so that calls of a finished plan cost
    nothing more. It does so outside of captures only, where kernels may be loaded: a CUDA graph keeps what
    served while it was captured.

    Args:
        serve: Asks the dispatcher, given whether a CUDA graph is being captured.
        bind: Turns its answer into a launcher.
        keep: Puts a launcher into the plan.
        capturing: Whether a CUDA graph is being captured.
    """
    served = serve(capturing())
    launch, awaited = counted(_ticking(bind(served), served.ticks), served.answer), served.awaited
    if awaited is None:
        return launch
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
