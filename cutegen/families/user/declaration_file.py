"""A declaration file is read: one kernel, or an error that names the file and the line."""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from cutegen.digest import digest
from cutegen.errors import CutegenError, FamilyError
from cutegen.families.family_file import place_of_error
from cutegen.families.resources import load_module
from cutegen.families.user.declaration import Kernel
from cutegen.families.user.family import UserFamily
from cutegen.text import did_you_mean

__all__ = ["read_declaration"]


def read_declaration(path: Path) -> UserFamily:
    """Return the kernel that the file ``path`` declares, as a family.

    Raises:
        FamilyError: It cannot be read, or declares no kernel, or several, or one that contradicts itself.
    """
    name = f"cutegen_kernels.{path.stem}_{digest(str(path), length=8)}"
    line = 1
    try:
        module = load_module(path, name)
        found = {id(value): value for value in vars(module).values() if isinstance(value, Kernel)}
        if len(found) != 1:
            why = f"{len(found)} kernels" if found else "no kernel"
            raise FamilyError(f"the file declares {why}; it must hold one: kernel = Kernel(...)")
        (kernel,) = found.values()
        for function, name, at in _undefined(module, path):
            line = at
            meant = did_you_mean(name, [*inspect.signature(function).parameters, *vars(module)])
            raise FamilyError(f"{function.__name__}() names {name}{meant}, which nothing defines")
        line = kernel.line
        return UserFamily(kernel, path)
    except CutegenError as error:
        sys.modules.pop(name, None)  # so that it can be mended and read again
        raise FamilyError(f"{place_of_error(path, error, line)}: {error}") from error
    except SystemExit as error:
        raise FamilyError(
            f"{place_of_error(path, error)}: the file ends the program (SystemExit) while it is read"
        ) from error
    except NameError as error:
        left = "a TODO of the draft is left; fill it in" if error.name == "TODO" else f"NameError: {error}"
        raise FamilyError(f"{place_of_error(path, error)} cannot be read: {left}") from error
    except Exception as error:  # running a user's file may raise anything
        place = place_of_error(path, error)
        raise FamilyError(f"{place} cannot be read: {type(error).__name__}: {error}") from error


def _undefined(module: ModuleType, path: Path) -> Iterator[tuple[FunctionType, str, int]]:
    """Yield functions of the file with names that nothing defines, and where: they would fail when called."""
    known = {*vars(module), *vars(builtins)}
    for function in vars(module).values():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            for name, line in _global_names(function.__code__):
                if name not in known:
                    yield function, name, line


def _global_names(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yield the global names that code reads, also in functions inside of it, and the line of each."""
    lines = [(start, end, line) for start, end, line in code.co_lines() if line is not None]
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield str(step.argval), next(line for start, end, line in lines if start <= step.offset < end)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _global_names(inner)
