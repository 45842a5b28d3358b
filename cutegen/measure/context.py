"""What runs right before a launch that is timed: the launch before it, or a kernel that is not ours."""

from __future__ import annotations

from cutegen.errors import UsageError

__all__ = ["BACK_TO_BACK", "CONTEXTS", "DEFAULT_CONTEXT", "OVERLAPPING", "PREDECESSOR", "require_context"]

#: Launches of one kernel in a row, which a kernel that starts up early overlaps with itself. All timings of
#: early development versions were made so.
BACK_TO_BACK = "back_to_back"
#: As ``behind``, but that kernel overlaps with its neighbours as kernels with ``use_pdl`` do: the next one
#: may start at once, and it starts itself before the one before has ended. So are launches between other
#: kernels of cutegen.
OVERLAPPING = "overlapping"
#: ``alone``: before each launch runs a kernel of one block that touches no operand. ``behind``: an
#: element-wise kernel that writes the input that comes from the layer before, as in a model.
CONTEXTS = ("alone", "behind", OVERLAPPING, BACK_TO_BACK)
#: What winners are chosen for.
DEFAULT_CONTEXT = "behind"
#: The name of the kernel that runs before each launch, among the entries that are timed.
PREDECESSOR = "predecessor"


def require_context(name: str) -> str:
    """Return ``name`` if it is a launch context.

    Raises:
        UsageError: It is none.
    """
    if name not in CONTEXTS:
        raise UsageError(f"unknown launch context {name!r}; valid: {', '.join(CONTEXTS)}")
    return name
