"""The parent's handle on the measuring process: start, exchange messages with a time limit, kill."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from cutegen.errors import MeasureError
from cutegen.system.interpreter import PACKAGE_ROOT, python_command, python_environment
from cutegen.system.pipes import write_all

__all__ = ["WorkerDiedError", "WorkerHungError", "WorkerProcess"]

#: Environment variables that would change timings.
_UNWANTED = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
#: Seconds that a killed process may take to end: the driver first tears down its context.
_DEATH_S = 60.0
_LOG_TAIL = 4096


class WorkerDiedError(MeasureError):
    """The measuring process ended by itself.

    Attributes:
        status: As of ``Popen.returncode``: negative for a signal.
    """

    def __init__(self, status: int, log: str) -> None:
        self.status = status
        cause = f"died of {_signal_name(-status)}" if status < 0 else f"exited with status {status}"
        last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
        detail = f": {last}" if last and status >= 0 else ""
        super().__init__(f"measuring process {cause}{detail}")

    @property
    def is_bug(self) -> bool:
        """Whether an uncaught exception of our own ended it, rather than a kernel."""
        return self.status in (0, 1, 2)


class WorkerHungError(MeasureError):
    """The measuring process did not answer in time."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class WorkerProcess:
    """One measuring process in a session of its own, so that a Ctrl-C at the terminal is ours to handle.

    Its standard output and error go to a file, requests and replies through two pipes of their own. It dies
    with this object, with this process, and when its request pipe closes.

    Args:
        engine: ``module:function`` that makes the engine.
        device: Index of the GPU.
        search_path: Folders to add to the module search path, for engines outside of cutegen.

    Raises:
        MeasureError: It cannot be started.
        ResourceError: This Python does not know its own executable.
    """

    def __init__(self, engine: str, device: int, search_path: Sequence[Path] = ()) -> None:
        arguments = ["--engine", engine, "--device", str(device)]
        command = python_command(
            "cutegen.measure.worker", arguments, first=search_path, options=["-X", "faulthandler"]
        )
        try:
            self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        except OSError as error:
            raise MeasureError(f"cannot start the measuring process: {error}") from error
        child_in, self._requests = os.pipe()
        self._replies, child_out = os.pipe()
        command += ["--requests", str(child_in), "--replies", str(child_out)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(child_in, child_out),
                start_new_session=True,
                cwd=PACKAGE_ROOT,
                env=_environment(),
            )
        except OSError as error:
            os.close(self._requests)
            os.close(self._replies)
            raise MeasureError(f"cannot start the measuring process: {error}") from error
        finally:
            os.close(child_in)
            os.close(child_out)
        self._buffer = b""
        self._stop = weakref.finalize(
            self, _stop, os.getpid(), self._process, (self._requests, self._replies), self._log
        )

    @property
    def running(self) -> bool:
        """Whether it lives and has not been stopped."""
        return self._stop.alive and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Write one request.

        Raises:
            WorkerDiedError: Nobody reads it.
        """
        try:
            write_all(self._requests, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            WorkerHungError: None came within ``timeout_s``.
            WorkerDiedError: None will come.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._buffer += self._read(deadline, timeout_s)
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self, deadline: float, timeout_s: float) -> bytes:
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise WorkerHungError(f"no answer within {timeout_s:g} s")
        data = os.read(self._replies, 1 << 16)
        if not data:
            raise self._died()
        return data

    def _died(self) -> WorkerDiedError:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            status = -signal.SIGKILL
        return WorkerDiedError(status, self.log())

    def log(self) -> str:
        """Return the end of what it printed."""
        if self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """End it and everything it started; calling it again does nothing.

        Raises:
            MeasureError: It does not end, because the driver holds it.
        """
        self._stop()


def _stop(owner: int, process: subprocess.Popen[bytes], pipes: tuple[int, int], log: IO[bytes]) -> None:
    if os.getpid() != owner:
        return  # a fork of the parent ends: the measuring process is not its own
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=_DEATH_S)
    except ProcessLookupError:
        process.wait(timeout=_DEATH_S)
    except subprocess.TimeoutExpired:
        message = f"measuring process {process.pid} cannot be killed; the GPU or its driver hangs"
        raise MeasureError(message) from None
    finally:
        for pipe in pipes:
            os.close(pipe)
        log.close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in python_environment().items() if name not in _UNWANTED}
