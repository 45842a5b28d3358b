"""The exceptions of a launch that fails, and the part of their text that is shown."""

from __future__ import annotations

from cutegen.errors import LaunchError

__all__ = ["LAUNCH_ERRORS", "brief"]

#: Raised through TVM-FFI by a kernel that refuses its arguments, or by a driver that refuses a launch.
LAUNCH_ERRORS = (
    LaunchError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
)


def brief(error: BaseException) -> str:
    """Return the first lines of an error, without torch's advice on debugging."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
