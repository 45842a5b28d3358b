"""Run the tests that need a GPU, in processes side by side, and write down what came of each file.

Compiling takes most of their time, so one GPU serves as many processes as there are cores. Tests marked
``alone`` tune, or look at time, energy or other processes: they run afterwards, one after the other.

    python tools/run_gpu_tests.py                                  # all of tests/gpu
    python tools/run_gpu_tests.py tests/gpu/test_softmax_gpu.py    # files, folders or node ids
    python tools/run_gpu_tests.py --again results.json             # what failed, or was cut off, in that run
    python tools/run_gpu_tests.py --sanitize tests/gpu/test_rope_gpu.py    # under compute-sanitizer: slow

Long files are cut in slices and begin first, where docs/results/gpu_tests.json tells how long they take.

exit codes: 0 all passed or were skipped; 1 some did not, or were cut off; 2 bad usage; 3 no usable GPU;
130 interrupted: results are written, and --again goes on
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutegen.cli.args import positive_int
from cutegen.cli.exit_codes import EXIT_INTERRUPTED, run_command
from cutegen.errors import StoreError, UsageError
from cutegen.measure.device import Device, present_device
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import ROOT, check_facts
from tools.benchmark.results import write_json
from tools.gpu_test_parts.outcomes import Ended, file_of
from tools.gpu_test_parts.plan import Part, slices
from tools.gpu_test_parts.processes import Processes
from tools.gpu_test_parts.sanitizer import Sanitizer
from tools.gpu_test_parts.summary import GPU_TESTS, counts, seconds_of_tests, summary

#: Where the times of files are looked up.
RESULTS = ROOT / "docs" / "results" / "gpu_tests.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options = parse(arguments)
    return run_command(lambda: run(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="files, folders or node ids; default: tests/gpu")
    parser.add_argument("--again", type=Path, help="results file: only what failed or did not finish in it")
    parser.add_argument("--processes", type=positive_int, help="side by side; default: one less than cores")
    parser.add_argument(
        "--limit", type=positive_int, default=1800, help="seconds, then all end; default 1800"
    )
    parser.add_argument(
        "--no-alone", action="store_true", help="leave out those that need the GPU for themselves"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="run under compute-sanitizer, which must be there"
    )
    parser.add_argument("--kernels", type=Path, help="keep compiled kernels in this folder, for further runs")
    parser.add_argument("--logs", type=Path, help="keep what each process printed in this folder")
    add_out_argument(parser)
    add_commit_argument(parser)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Run the tests, print and write what came of them, and return the exit code.

    Raises:
        DeviceError: There is no GPU.
        UsageError: pytest cannot read the tests, or there are none.
        StoreError: The results of an earlier run cannot be read.
    """
    began, device = time.monotonic(), present_device()
    count = options.processes or max(1, len(os.sched_getaffinity(0)) - 1)
    wanted = {entry["test"] for entry in _read(options.again)["bad"]} if options.again else None
    named = sorted({file_of(test) for test in wanted or () if (ROOT / file_of(test)).exists()})
    paths = options.paths or named or ["tests/gpu"]
    with tempfile.TemporaryDirectory(prefix="cutegen_gpu_tests_", ignore_cleanup_errors=True) as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        sanitizer = Sanitizer.find() if options.sanitize else None
        processes = Processes(Path(scratch), folder, began + options.limit, sanitizer, options.kernels)
        found = {
            test: alone
            for test, alone in processes.collect(paths).items()
            if (wanted is None or test in wanted) and not (alone and options.no_alone)
        }
        if not found:
            raise UsageError(f"there is no such test in {' '.join(paths)}")
        known = seconds_of_tests(_read(RESULTS)) if RESULTS.exists() else {}
        ended: list[Ended] = []
        with _stopped_by_signals(processes) as signals:
            for alone, side_by_side, suffix in ((False, count, ""), (True, 1, ".alone")):
                parts = slices([t for t, a in found.items() if a is alone], known, side_by_side, suffix)
                for part, results in processes.run(parts, side_by_side):
                    ended += results
                    _tell(part, results, time.monotonic() - began)
        facts = _facts(options, device, count, time.monotonic() - began)
    status = _finish(options.out, {**facts, **summary(ended)}, ended)
    return EXIT_INTERRUPTED if signals else status


@contextmanager
def _stopped_by_signals(processes: Processes) -> Iterator[list[int]]:
    """Ctrl-C, and the signal of a time limit, end the tests, but not before their results are written."""
    seen: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        processes.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _facts(options: argparse.Namespace, device: Device, count: int, seconds: float) -> dict[str, Any]:
    return {
        **check_facts(GPU_TESTS, device, options.commit),
        "processes": count,
        "kernels_kept": options.kernels is not None,
        "sanitizer": options.sanitize,
        "seconds": round(seconds, 1),
    }


def _finish(out: Path | None, facts: Mapping[str, Any], ended: Iterable[Ended]) -> int:
    print(f"{facts['seconds']:.0f} s: {counts(ended)}")
    if out is not None:
        write_json(out, facts)
    return 1 if facts["bad"] else 0


def _tell(part: Part, results: Sequence[Ended], seconds: float) -> None:
    """Print how a part ended, and its errors."""
    print(f"{seconds:6.1f} s  {part.name}: {counts(results)}", flush=True)
    for result in results:
        if result.is_bad:
            print(f"{result.outcome}: {result.test}\n{result.message}", flush=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"results file {path} cannot be read: {error}") from error
    if found.get("kind") != GPU_TESTS:
        raise StoreError(f"{path} was not written by tools/run_gpu_tests.py")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
