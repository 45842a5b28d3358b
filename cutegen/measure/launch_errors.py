"""What a launch that fails raises, and what of it is worth saying."""

from __future__ import annotations

from cutegen.errors import LaunchError

__all__ = ["LAUNCH_ERRORS", "brief"]

#: What a kernel that refuses its arguments, or a launch that the driver refuses, raises through TVM-FFI.
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
