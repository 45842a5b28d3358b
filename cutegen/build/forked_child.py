"""A freshly forked child of the compile daemon: isolated, answers through a pipe, never returns."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import json
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cutegen.build.artifact import LOG, SOURCE
from cutegen.build.child import SameKernel, Traced
from cutegen.build.user_code import Refused
from cutegen.digest import Json
from cutegen.errors import BuildError
from cutegen.system.pipes import write_all

__all__ = ["GO", "plain", "run_and_exit"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
#: The order to compile a kernel that was traced.
GO = b"g"
#: Errors of the disk, not of the source.
_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
}


def plain(text: str) -> str:
    """Return ``text`` without terminal colour codes."""
    return _ANSI.sub("", text)


def run_and_exit(
    work: Callable[[Traced], dict[str, Json]], folder: Path, report: int, orders: int, parent: int
) -> NoReturn:
    """Do ``work`` in this freshly forked process, write its answer to the descriptor ``report`` and exit.

    A traced kernel is reported on a line of its own; what comes from the descriptor ``orders`` says whether
    to go on.
    Whatever the source does ends here: output goes to the log file, an exception becomes the answer, an abort
    leaves its Python stack in the log, and the process dies with its parent.
    """
    before = frozenset(sys.modules)

    def traced(name: str, facts: dict[str, Json]) -> bool:
        return _ask(report, orders, {"traced": name, "facts": facts, "torch": _loaded_of_torch(before)})

    try:
        _isolate(folder, parent)
        answer = work(traced)
        _send(report, answer)
    except SameKernel:
        pass
    except BaseException as error:
        _send(report, _explain(error))  # first: nothing that goes wrong with the log may cost the answer
        _print_from_source(error.__cause__ if isinstance(error, Refused) and error.__cause__ else error)
        raise
    finally:
        sys.stderr.flush()
        os._exit(0)


def _print_from_source(error: BaseException) -> None:
    """Print the traceback without the frames that lead to the source."""
    whole = frame = error.__traceback__
    while frame is not None and not frame.tb_frame.f_code.co_filename.endswith(f"/{SOURCE}"):
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame or whole)


def _isolate(folder: Path, parent: int) -> None:
    os.setpgid(0, 0)
    gc.disable()  # the process is short-lived
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, own in ((null, 0), (log, 1), (log, 2)):
        os.dup2(target, own)
    # The log is read as UTF-8, whatever the locale says.
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        for fd in (1, 2)
    )
    faulthandler.enable(file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)


def _ask(report: int, orders: int, traced: dict[str, Json]) -> bool:
    _send(report, traced)
    os.write(report, b"\n")
    return os.read(orders, 1) == GO


def _loaded_of_torch(before: frozenset[str]) -> list[Json]:
    """Return the modules of torch that were loaded meanwhile, in their order."""
    return [name for name in sys.modules if name.startswith("torch.") and name not in before]


def _send(descriptor: int, answer: dict[str, Json]) -> None:
    write_all(descriptor, json.dumps(answer).encode())


def _explain(error: BaseException) -> dict[str, Json]:
    text = plain(str(error)).strip()
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    message = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return {"outcome": "store", "message": error.strerror}
    if isinstance(error, Refused):
        return {"outcome": error.outcome, "message": plain(str(error)), "keep": error.outcome == "rejected"}
    lacking = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if isinstance(error, BuildError) or lacking:
        return {"outcome": "error", "message": first or message, "keep": False, "again": lacking}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(f"/{SOURCE}")]
    if frames:
        message += f" at line {frames[-1].lineno} of the source"
    return {"outcome": "error", "message": message}
