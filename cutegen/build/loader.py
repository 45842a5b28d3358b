"""A compiled library becomes a Python callable (GPU library: tvm_ffi; no compiler, no torch needed)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from cutegen.build.store import file_digest
from cutegen.errors import LaunchError
from cutegen.system.mounts import is_noexec

__all__ = ["load_kernel"]

#: The kind of error that the launch runtime raises.
_ERROR_KIND = "CutegenLaunchError"


def load_kernel(library: Path, symbol: str, sha256: str = "") -> Callable[..., None]:
    """Return the function ``symbol`` of a compiled library; needs no GPU until it is called.

    A failing call raises :class:`~cutegen.errors.LaunchError` with the driver's error name and number, or
    ``ValueError`` or ``TypeError`` when an argument is not what the kernel was compiled for. The library
    stays loaded for the life of the process.

    Args:
        library: The file, of an artifact or a deployment.
        symbol: The function's name.
        sha256: Its expected SHA-256, 64 hexadecimal digits; empty means unchecked.

    Raises:
        LaunchError: The library is missing, has changed, cannot be loaded or has no such function.
    """
    import tvm_ffi

    tvm_ffi.register_error(_ERROR_KIND, LaunchError)
    try:
        if sha256 and file_digest(library) != sha256:
            raise LaunchError(f"{library} has changed since it was built; remove it and build it again")
        module: Any = tvm_ffi.load_module(str(library))
    except (OSError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "")
        if is_noexec(library):
            reason += "; its file system is mounted with noexec: use a cache folder on another one"
        raise LaunchError(f"cannot load {library}: {reason}") from error
    function = module.get_function(symbol) if module.implements_function(symbol) else None
    if function is None:
        raise LaunchError(f"{library} has no function {symbol}")
    return cast("Callable[..., None]", function)
