"""Measure the first calls of a warm process: host time of calls of shapes that it has not seen before.

``cutegen.warmup`` compiles and loads what untuned problems may need into an empty cache. Then every shape of
a random list is called for the first time, once, and for a second time, once. Calls are timed on the host
from entering ``cutegen.gemm(a, b, out=out)`` until it returns; the GPU is idle before each. The file says
what was compiled meanwhile, which should be nothing.

    python tools/bench_first_call.py --shapes 200 --out docs/results/first_call.json

exit codes: 0 measured (limits kept or not, the file says); 2 bad usage; 3 environment
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build.store import Store
from cutegen.cli.args import Parser, integer, positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure.device import Device, present_device
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.search.defaults import default_config
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.environment import git_commit, session_facts, software
from tools.benchmark.results import write_json

KIND = "first calls"
#: What is promised, in microseconds of host time: of the median of first calls.
LIMIT_US = 300.0
#: The same for the choice alone, which is a part of the first call.
CHOICE_LIMIT_US = 100.0
#: Products of up to so many rows; columns and depth are multiples of 64 up to the second number.
_MOST_ROWS, _MOST = 8192, 8192
#: Shapes that are called before any is timed: the first call imports modules.
_UNTIMED = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = Parser(prog="python tools/bench_first_call.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=positive_int, default=200, metavar="N", help="how many (200)")
    parser.add_argument("--seed", type=integer, default=0, help="of the shapes (0)")
    parser.add_argument("--workers", type=positive_int, metavar="N", help="compilations at a time")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where results go")
    parser.add_argument("--commit", default="", help="of the checkout, where git cannot tell")
    return parser.parse_args(argv)


def random_shapes(count: int, seed: int) -> list[tuple[int, int, int]]:
    """Return different (m, n, k): m log-uniform and any integer, n and k multiples of 64."""
    generator = Random(seed)
    found: dict[tuple[int, int, int], None] = {}
    while len(found) < count:
        m = int(_MOST_ROWS ** generator.random())
        n, k = (64 * int((_MOST // 64) ** generator.random()) for _ in range(2))
        found[m, n, k] = None
    return list(found)


def run(args: argparse.Namespace) -> int:
    """Warm up, time, print and write."""
    device = present_device()
    with TemporaryFolder() as scratch:
        results = measure(args, device, Store(scratch.path / "cache"))
    print(summary(results))
    if args.out is not None:
        write_json(args.out, results)
    return EXIT_OK


def measure(args: argparse.Namespace, device: Device, store: Store) -> dict[str, Json]:
    """Return what the file holds."""
    import torch

    import cutegen

    cutegen.use(Dispatcher(kernels=Kernels(store)))
    began = time.perf_counter()
    warmed = cutegen.warmup(workers=args.workers)
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - began
    before = store.keys(device.arch.name)
    shapes = random_shapes(_UNTIMED + args.shapes, args.seed)
    times = [_calls(torch, cutegen.gemm, shape) for shape in shapes][_UNTIMED:]
    cutegen.wait_for_kernels()
    compiled = sorted(set(store.keys(device.arch.name)) - set(before))
    first, second = (sorted(column) for column in zip(*times, strict=True))
    choices = sorted(_choices(device, random_shapes(args.shapes, args.seed + 1)))
    return {
        "schema": 1,
        "kind": KIND,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": args.commit or git_commit(),
        "software": software(),
        "session": session_facts(device),
        "device": device.to_json(),
        "shapes": len(times),
        "seed": args.seed,
        "kernels": len(warmed.wanted),
        "warm_s": round(warm_s, 2),
        "compiled_by_calls": len(compiled),
        "first_us": _spread(first),
        "second_us": _spread(second),
        "choice_us": _spread(choices),
        "limit_us": LIMIT_US,
        "choice_limit_us": CHOICE_LIMIT_US,
        "limit_kept": median(first) <= LIMIT_US and not compiled and median(choices) <= CHOICE_LIMIT_US,
    }


def _choices(device: Device, shapes: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return microseconds of the choice among default kernels, of shapes that were not asked for before."""
    space, times = find_space("gemm", device.arch), []
    for shape in shapes:
        problem = Problem(*shape)
        began = time.perf_counter()
        default_config(space, problem, device.sm_count)
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _calls(torch: Any, gemm: Any, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Return microseconds of host time of the first and the second call of a shape."""
    m, n, k = shape
    a = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16).t()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        gemm(a, b, out=out)
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return times[0], times[1]


def _spread(times: Sequence[float]) -> dict[str, Json]:
    """Return median, 95th percentile and largest of sorted times."""
    at = round(0.95 * (len(times) - 1))
    return {"median": round(median(times), 1), "p95": round(times[at], 1), "most": round(times[-1], 1)}


def summary(results: dict[str, Json]) -> str:
    """Return the results in one line."""
    first: Any = results["first_us"]
    second: Any = results["second_us"]
    choice: Any = results["choice_us"]
    return (
        f"{results['kernels']} kernels warm after {results['warm_s']} s; first calls of {results['shapes']} "
        f"shapes: median {first['median']} us, 95 % within {first['p95']}, most {first['most']}; second "
        f"calls: {second['median']} us; the choice alone: {choice['median']} us; "
        f"{results['compiled_by_calls']} kernels compiled by calls"
    )


if __name__ == "__main__":
    sys.exit(main())
