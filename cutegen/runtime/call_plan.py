"""A kernel's arguments bound by name, once: what is left for a call is one Python call of the kernel.

The binding is a lambda that is written for the kernel, so no call loops over arguments or unpacks a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cutegen.family import Argument
from cutegen.runtime.workspace import GetWorkspace
from cutegen.space import Launch

__all__ = ["make_launcher"]


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
