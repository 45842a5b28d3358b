"""Children that run this Python: they import from an explicit path, never from the working directory.

A child runs with ``-I``: its interpreter reads no ``PYTHON*`` variable and puts neither the working directory
nor a script's folder on ``sys.path``. The parent hands over its own path, made absolute, as an argument.
``-P`` would not do: Python 3.10 lacks it. Neither would code that cleans the path first: Python 3.13 imports
``linecache`` before it runs the code of ``-c``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cutegen.errors import ResourceError

__all__ = ["PACKAGE_ROOT", "import_path", "python_command", "python_environment"]

#: The folder that ``cutegen`` is imported from.
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
#: Variables that would make a Python program that the child starts wait for input, or print warnings.
_UNWANTED = ("PYTHONINSPECT", "PYTHONWARNINGS")
_BOOT = """
import importlib, json, sys
sys.path[:], sys.argv = json.loads(sys.argv[1]), sys.argv[2:]
sys.exit(importlib.import_module(sys.argv[0]).main(sys.argv[1:]))
"""


def import_path() -> list[str]:
    """Return the folders that a child imports from: those of this process, less the working directory.

    The folder of the package stays although it may be the working directory.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        here = None
    kept = [entry for given in sys.path if isinstance(given, str) and (entry := _elsewhere(given, here))]
    return kept if str(PACKAGE_ROOT) in kept else [str(PACKAGE_ROOT), *kept]


def _elsewhere(entry: str, here: Path | None) -> str:
    """Return ``entry`` as an absolute path, empty if it is the working directory ``here`` or needs one."""
    if not entry or (here is None and not entry.startswith("/")):
        return ""
    path = os.path.abspath(entry)  # noqa: PTH100  a Path costs more, and versions are read at each start
    if here is None or path == str(PACKAGE_ROOT):
        return path
    try:
        return "" if os.path.samefile(path, here) else path  # noqa: PTH121
    except OSError:
        return path


def python_command(
    module: str, arguments: Sequence[str] = (), *, first: Sequence[Path] = (), options: Sequence[str] = ()
) -> list[str]:
    """Return the command line that runs ``main(arguments)`` of ``module`` in a child.

    Args:
        module: Its dotted name.
        arguments: What ``main`` is given; its answer is the exit status.
        first: Folders that the child imports from before all others.
        options: Further options of the interpreter.

    Raises:
        ResourceError: This Python does not know its own executable.
    """
    if not sys.executable:
        raise ResourceError("cannot start a child process: this Python does not know its executable")
    flags = ["-I", *(["-B"] if sys.dont_write_bytecode else [])]
    if sys.pycache_prefix:
        flags += ["-X", f"pycache_prefix={sys.pycache_prefix}"]
    path = [*(str(folder.absolute()) for folder in first), *import_path()]
    return [sys.executable, *flags, *options, "-c", _BOOT, json.dumps(path), module, *arguments]


def python_environment() -> dict[str, str]:
    """Return the environment for a child, whose own interpreter ignores every ``PYTHON*`` variable.

    What the child starts in turn inherits them, but no entry of ``PYTHONPATH`` that depends on the working
    directory.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    entries = environment.pop("PYTHONPATH", "").split(os.pathsep)
    absolute = [str(Path(entry).absolute()) for entry in entries if entry]
    if absolute:
        environment["PYTHONPATH"] = os.pathsep.join(absolute)
    return environment
