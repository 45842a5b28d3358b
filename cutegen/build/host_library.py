"""C files of the package as libraries for the host: compiled into a store, where there is a compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
from pathlib import Path

from cutegen.build.host_compiler import C_COMPILERS, find_program, run_program
from cutegen.build.store import Store
from cutegen.digest import digest
from cutegen.errors import BuildError, StoreError
from cutegen.system.private import make_private
from cutegen.system.publish import publish
from cutegen.system.temporary import TemporaryFolder

__all__ = ["build_library", "open_library"]

_log = logging.getLogger("cutegen")

#: No option that changes a bit of a result: no contraction, no fast math.
_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
#: Comes behind the library in its file, before the SHA-256 of what is before it. Loaders do not read so far.
_MARK = b"\ncutegen sha256 "


def build_library(source: Path, store: Store) -> ctypes.PyDLL | None:
    """Return the library of ``source``, compiled into the store if it is not there.

    None without a compiler, or where the store cannot be written: callers have another way.

    Raises:
        StoreError: Another user may have written what is in the store.
    """
    found = open_library(source, store)
    path = _path(source, store)
    compiler = find_program(C_COMPILERS)
    if found is None and compiler is not None and not store.shared:
        try:
            with TemporaryFolder() as scratch:
                made = scratch.path / path.name
                command = [compiler, *_FLAGS, str(source), "-o", str(made), "-lm"]
                run_program(command)
                make_private(path.parent)
                library = made.read_bytes()
                publish(path, library + _MARK + _digest(library), "library")
        except (OSError, BuildError, StoreError) as error:
            _log.info("%s is not compiled, so Python does its work: %s", source.name, error)
            return None
        found = open_library(source, store)
    return found


def open_library(source: Path, store: Store) -> ctypes.PyDLL | None:
    """Return the library of ``source`` if the store holds it whole. Calls of it keep Python's lock.

    Raises:
        StoreError: Another user may have written what is in the store.
    """
    path = _path(source, store)
    try:
        library, mark, said = path.read_bytes().rpartition(_MARK)
        if not mark or said != _digest(library):  # the system's loader dies of a file that is cut short
            raise OSError("it is damaged")
        return ctypes.PyDLL(str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _log.info("%s cannot be loaded, so Python does its work: %s", path, error)
        return None


def _path(source: Path, store: Store) -> Path:
    """Return where the library of ``source`` is in the store, for machines of this kind."""
    text = source.read_text(encoding="utf-8")
    name = digest([text, *_FLAGS, _MARK.decode(), platform.machine(), platform.system()], length=16)
    return store.host_folder() / f"{source.stem}-{name}.so"


def _digest(library: bytes) -> bytes:
    return hashlib.sha256(library).hexdigest().encode()
