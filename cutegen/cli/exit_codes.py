"""How every command ends: one clear message per error, and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from cutegen.cli.wrapped_text import say
from cutegen.errors import (
    ArchError,
    ConfigError,
    CutegenError,
    FamilyError,
    NoWinnerError,
    ProblemError,
    SpaceError,
    UsageError,
)

__all__ = ["EXIT_ENVIRONMENT", "EXIT_INTERRUPTED", "EXIT_NO_WINNER", "EXIT_OK", "EXIT_USAGE", "run_command"]

EXIT_OK = 0
EXIT_NO_WINNER = 1
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_INTERRUPTED = 130
_USAGE_ERRORS = (UsageError, ProblemError, ConfigError, ArchError, FamilyError, SpaceError)


def run_command(command: Callable[[], int]) -> int:
    """Return the exit code of ``command``; errors of cutegen and the system become one message each."""
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        return command()
    except CutegenError as error:
        _tell(f"error: {error}")
        return _exit_code(error)
    except KeyboardInterrupt:
        _tell("interrupted; what was compiled and measured is kept, the same command continues")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; give the interpreter nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        _tell(f"error: {error}")
        return EXIT_ENVIRONMENT
    finally:
        signal.signal(signal.SIGTERM, previous)


def _tell(text: str) -> None:
    with suppress(OSError):  # nobody reads errors either; the exit code still says it
        say(f"cutegen: {text}", error=True)


def _exit_code(error: CutegenError) -> int:
    if isinstance(error, NoWinnerError):
        return EXIT_NO_WINNER
    return EXIT_USAGE if isinstance(error, _USAGE_ERRORS) else EXIT_ENVIRONMENT


def _stop(number: int, frame: FrameType | None) -> None:
    """Treat a request to terminate as Ctrl-C, so that child processes are ended and records kept."""
    raise KeyboardInterrupt
