"""Object file to library: the system's C compiler and the small launch runtime, no CUDA toolkit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cutegen.build.host_compiler import C_COMPILERS, find_program, run_program
from cutegen.build.toolchain import RUNTIME_SOURCE
from cutegen.errors import BuildError

__all__ = ["Linker", "ffi_library"]

_CFLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
#: Only the function to call is visible in the library.
_EXPORTS = "{ global: __tvm_ffi_*; local: *; };\n"


def ffi_library() -> Path:
    """Return the call interface's shared library, found without importing it.

    Raises:
        BuildError: apache-tvm-ffi is not installed, or without its library.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root) / "lib" / "libtvm_ffi.so"
        if path.is_file():
            return path
    raise BuildError("apache-tvm-ffi is not installed; pip install 'apache-tvm-ffi>=0.1.11,<0.2'")


class Linker:
    """Turns object files into libraries.

    Args:
        folder: An existing folder for its own files.

    Raises:
        BuildError: There is no C compiler or no call interface, or the runtime does not compile.
    """

    def __init__(self, folder: Path) -> None:
        found = find_program(C_COMPILERS)
        if found is None:
            raise BuildError(f"no C compiler; install one of {', '.join(C_COMPILERS)}")
        self._compiler = found
        self._ffi = ffi_library()
        self._exports = folder / "exports.map"
        self._runtime = folder / "launch_runtime.o"
        self._exports.write_text(_EXPORTS, encoding="ascii")
        run_program([found, *_CFLAGS, "-c", str(RUNTIME_SOURCE), "-o", str(self._runtime)])

    def link(self, compiled: Path, library: Path) -> None:
        """Write ``library`` from the object file ``compiled``.

        Raises:
            BuildError: The linker refused; an unresolved symbol is one the launch runtime does not know.
        """
        options = ["-Wl,-Bsymbolic", "-Wl,--no-undefined", f"-Wl,--version-script={self._exports}"]
        objects = [str(compiled), str(self._runtime), str(self._ffi)]
        run_program([self._compiler, "-shared", *options, "-o", str(library), *objects])

    def part(self, compiled: Path, symbol: str, target: Path) -> Path:
        """Write and return an object file of a kernel with a launch runtime, to be linked with others.

        The runtime keeps state for one kernel, so each has its own; only the function to call is seen.

        Args:
            compiled: The object file of the kernel.
            symbol: Its name.
            target: The file to write.

        Raises:
            BuildError: The linker refused, or there is no objcopy.
        """
        tool = find_program(["objcopy"])
        if tool is None:
            raise BuildError("no objcopy; install binutils")
        run_program([self._compiler, "-r", "-nostdlib", "-o", str(target), str(compiled), str(self._runtime)])
        run_program([tool, f"--keep-global-symbol=__tvm_ffi_{symbol}", str(target)])
        return target
