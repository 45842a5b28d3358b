"""The measuring process: takes requests on one pipe, answers on another, and alone touches the GPU.

Messages are single lines of JSON. A request ``{"op": ..., ...}`` is followed by any number of
``{"at": name}`` (about to run that entry: restarts the parent's clock and says whom to blame) and ends with
``{"result": ...}`` or ``{"error": {"kind", "message", "fatal"}}``. After a fatal error the process exits.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cutegen.errors import CheckError, CutegenError, LaunchError
from cutegen.families.registry import load_families, parse_problem
from cutegen.measure.candidate import Candidate, CheckResult
from cutegen.measure.engine import DEFAULT_ENGINE, Engine, EngineFactory
from cutegen.measure.policy import Policy
from cutegen.measure.rounds import BrokenDeviceError
from cutegen.measure.timed_rounds import time_in_rounds
from cutegen.system.pipes import write_all

__all__ = ["BROKEN_EXIT", "Responder", "main"]

#: Exit status after a launch that broke the device for this process.
BROKEN_EXIT = 86

Message = dict[str, Any]


class Responder:
    """Answers requests with an engine; knows nothing of pipes.

    Args:
        engine: Where candidates run.
        announce: Gets the name of each entry before it runs.
    """

    def __init__(self, engine: Engine, announce: Callable[[str], None]) -> None:
        self._engine = engine
        self._announce = announce
        self._reference = ""

    def answer(self, request: Mapping[str, Any]) -> Message:
        """Return the last message of the exchange that ``request`` starts."""
        operations = {"open": self._open, "check": self._check, "time": self._time}
        try:
            return {"result": operations[request["op"]](request)}
        except BrokenDeviceError as error:
            return _error(error, fatal=True)
        except CutegenError as error:
            return _error(error, fatal=isinstance(error, LaunchError) and not self._engine.healthy())

    def _open(self, request: Mapping[str, Any]) -> Message:
        for folder in request.get("families", ()):
            load_families(Path(folder))
        facts = self._engine.open(parse_problem(request["problem"]), request["seed"])
        self._reference = facts["reference"]
        return facts

    def _check(self, request: Mapping[str, Any]) -> Message:
        candidate = Candidate.from_json(request["candidate"])
        started = time.perf_counter()
        result = self._judge(candidate, request.get("repeats"))
        seconds = time.perf_counter() - started
        return {**result.to_json(), "seconds": seconds}

    def _judge(self, candidate: Candidate, repeats: int | None) -> CheckResult:
        verdict = tail = None
        try:
            self._announce(candidate.name)
            verdict = self._engine.check(candidate, candidate.problem, repeats)
            if verdict.ok and candidate.tail_problem is not None:
                self._announce(candidate.name)
                tail = self._engine.check(candidate, candidate.tail_problem, repeats)
        except LaunchError as error:
            if not self._engine.healthy():
                raise BrokenDeviceError(str(error)) from error
            return CheckResult("launch_failed", str(error), verdict)
        except CheckError as error:
            return CheckResult("wrong_result", str(error), verdict)
        return CheckResult.judged(verdict, tail)

    def _time(self, request: Mapping[str, Any]) -> Message:
        candidates = [Candidate.from_json(data) for data in request["candidates"]]
        policy = Policy.from_json(request["policy"])
        result = time_in_rounds(
            self._engine, candidates, policy, self._reference, self._announce, request.get("keep", ())
        )
        return result.to_json()


def _error(error: CutegenError, *, fatal: bool) -> Message:
    return {"error": {"kind": type(error).__name__, "message": str(error), "fatal": fatal}}


class _Pipes:
    """Both ends of the protocol. A thread reads, so that the parent's death ends even a hung process."""

    def __init__(self, requests: int, replies: int) -> None:
        self._replies = replies
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(requests,), daemon=True, name="requests").start()

    def _read(self, requests: int) -> None:
        with open(requests, "rb") as stream:
            for line in stream:
                self._queue.put(json.loads(line))
        os._exit(0)  # the parent closed the pipe, or died: no answer would be read

    def receive(self) -> Message:
        """Wait for the next request."""
        return self._queue.get()

    def send(self, message: Message) -> None:
        """Write one message as one line."""
        write_all(self._replies, json.dumps(message).encode() + b"\n")


def _load_factory(spec: str) -> EngineFactory:
    module, _, name = spec.partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module), name)
    return factory


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="started by cutegen; not meant to be run by hand")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--replies", type=int, required=True)
    parser.add_argument("--engine", default=DEFAULT_ENGINE)
    parser.add_argument("--device", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Serve requests until the parent closes the pipe; return the exit status after a fatal error."""
    options = _parse(arguments)
    pipes = _Pipes(options.requests, options.replies)
    try:
        engine = _load_factory(options.engine)(options.device)
    except CutegenError as error:
        pipes.send(_error(error, fatal=True))
        return BROKEN_EXIT
    pipes.send({"result": engine.describe()})
    responder = Responder(engine, lambda name: pipes.send({"at": name}))
    while True:
        message = responder.answer(pipes.receive())
        pipes.send(message)
        if message.get("error", {}).get("fatal"):
            sys.stderr.flush()
            os._exit(BROKEN_EXIT)  # tearing down a broken context can hang
