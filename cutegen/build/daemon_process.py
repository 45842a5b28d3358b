"""The compile daemon as its parent sees it: a process that takes jobs and sends lines back."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from cutegen.build.artifact import LOG
from cutegen.digest import Json
from cutegen.errors import StoreError
from cutegen.system.interpreter import python_command, python_environment
from cutegen.system.temporary import TemporaryFolder

__all__ = ["SHUTDOWN_S", "DaemonProcess"]

#: Seconds the daemon gets to end by itself.
SHUTDOWN_S = 5.0
#: Size of the pipe to the daemon in bytes, where the system allows it: a job takes 20 kB, and the daemon
#: reads none while it imports the compiler, which takes a second or more. Source: Linux allows 1 MiB.
_PIPE_BYTES = 2**20


class DaemonProcess:
    """A running daemon.

    Args:
        arguments: For :func:`cutegen.build.daemon.main`, less its scratch folder.

    Attributes:
        ready: Whether it has reported that it is ready.

    Raises:
        StoreError: It cannot be started.
    """

    def __init__(self, arguments: Mapping[str, Json]) -> None:
        self.ready = False
        self._received = bytearray()
        self._scratch = TemporaryFolder()
        folder = self._scratch.path
        environment = {n: v for n, v in python_environment().items() if not n.startswith("CUTE_DSL_")}
        # The daemon forks, so it must neither look for a device nor start a pool of threads.
        environment.update(CUDA_VISIBLE_DEVICES="", CUTE_DSL_ARCH="sm_100a")
        environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        # The C compiler and the DSL look for files in the working directory, and under predictable names in
        # the temporary directory. This folder is new and private, and what they leave in it is removed.
        environment["TMPDIR"] = str(folder)
        command = python_command("cutegen.build.daemon", [json.dumps({**arguments, "scratch": str(folder)})])
        try:
            with (folder / LOG).open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=folder,
                    pass_fds=(self._scratch.lock,),  # the folder is in use while either of the two lives
                    start_new_session=True,  # Ctrl-C is for this process, which then ends the daemon
                )
        except OSError as error:
            self._scratch.close()
            raise StoreError(f"cannot start the compile daemon: {error}") from error
        assert self._process.stdin is not None
        with suppress(OSError):  # with the usual size, writing many jobs blocks
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @property
    def output(self) -> IO[bytes]:
        """What the daemon writes to."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def send(self, job: Mapping[str, Json]) -> None:
        """Hand over a job."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the next read finds the end of its output and tells why
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> list[dict[str, Json]] | None:
        """Return the messages that have arrived, of which there must be some; None at the end of them."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            return None
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        self.ready = self.ready or any(message["status"] == "ready" for message in messages)
        return messages

    def died(self) -> tuple[int, str]:
        """Return the exit status of a daemon whose output has ended, and what it wrote to its log."""
        status = self._process.wait()
        words = (self._scratch.path / LOG).read_text(encoding="utf-8", errors="replace").strip()
        self.close()
        return status, words

    def close(self) -> None:
        """End it and everything that it runs."""
        try:
            _close_quietly(self._process.stdin)
            with suppress(subprocess.TimeoutExpired):
                # Before it is ready it has no children to kill.
                self._process.wait(SHUTDOWN_S if self.ready else 0.0)
        finally:
            _kill(self._process)
            _close_quietly(self._process.stdout)
            self._scratch.close()


def _close_quietly(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with suppress(BrokenPipeError):
            stream.close()


def _kill(daemon: subprocess.Popen[bytes]) -> None:
    if daemon.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
