"""Measure the first calls of a warm process: host time of calls of shapes that it has not seen before.

``cutegen.warmup`` compiles and loads what untuned problems may need, into an empty cache or into one that has
all of it, as at the start of a server: the file says how long its parts took. Then every shape of a random
list is called for the first time, once, and for a second time, once. Calls are timed on the host
from entering ``cutegen.gemm(a, b, out=out)`` until it returns; the GPU is idle before each. The file says
what was compiled meanwhile, which should be nothing; how long calls took that a kernel answered, and that
torch did, whose library loads its own kernels when it first needs them; and of other shapes, where the time
of a first call goes.

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
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build.store import Store
from cutegen.cli.args import Parser, add_workers_argument, integer, positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure.device import Device, present_device
from cutegen.records.calibrations import packaged_arch
from cutegen.runtime import answer_lookup, warming
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.runtime.workspace import Workspaces
from cutegen.search.defaults import default_config
from cutegen.system.temporary import TemporaryFolder
from cutegen.torch_ops import gemm as operators
from cutegen.torch_ops import gemm_plan
from cutegen.torch_ops import warmup as warm_up
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import git_commit, session_facts, software
from tools.benchmark.host_child import random_shapes
from tools.benchmark.results import write_json
from tools.benchmark.stopwatch import Stopwatch

KIND = "first calls"
#: What is promised, in microseconds of host time: of the median of first calls.
LIMIT_US = 300.0
#: The same for the choice alone, which is a part of the first call.
CHOICE_LIMIT_US = 100.0
_DEVICE = "cuda"
#: Shapes that are called before any is timed: the first call imports modules.
_UNTIMED = 5
#: Parts of a first call, and what runs in each: checks of operands; the lookup and the choice; whether torch
#: is expected to be faster; the kernel; its arguments; scratch memory; what is left of making a plan.
_STEPS = {
    "operands": (gemm_plan, "describe"),
    "choice": (Dispatcher, "explain"),
    "torch": (answer_lookup, "_expected_slower"),
    "kernel": (Dispatcher, "_ask"),
    "arguments": (gemm_plan._Launchers, "bind"),
    "workspace": (Workspaces, "get"),
    "plan": (operators, "make_plan"),
}
#: Parts of a warm-up: what the store has; compiling what it lacks; the loops of the choice in C; loading
#: libraries; finding a kernel and launching it once, on small operands.
_WARM_STEPS = {
    "find": (warming, "_look"),
    "compile": (warm_up, "compile_wanted"),
    "choice": (warm_up, "prepare_choices"),
    "load": (Kernels, "_loaded_from"),
    "launch": (warm_up, "launch_once"),
}
#: The rest of it: which kernels are wanted, and the start of CUDA.
_BEGIN = "begin"
#: The rest: the probe of the plans, and the launch, of a kernel or by torch.
_LAUNCH = "launch"
#: First calls of torch.mm that are timed beside ours.
_OF_TORCH = 60
#: So many of the slowest calls are listed.
_SLOWEST = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = Parser(prog="python tools/bench_first_call.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=positive_int, default=200, metavar="N", help="how many (200)")
    parser.add_argument("--seed", type=integer, default=0, help="of the shapes (0)")
    add_workers_argument(parser)
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="artifact store (default: an empty one)"
    )
    add_out_argument(parser)
    add_commit_argument(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Warm up, time, print and write."""
    device = present_device()
    with TemporaryFolder() as scratch:
        results = measure(args, device, Store(args.cache_dir or scratch.path / "cache"))
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
    with Stopwatch().watching(_WARM_STEPS) as watch:
        warmed = watch.timed(cutegen.warmup, _BEGIN)(workers=args.workers)
        torch.cuda.synchronize()
        warm_parts = watch.take()
    warm_s = time.perf_counter() - began
    before = store.keys(device.arch.name)
    shapes = random_shapes(_UNTIMED + args.shapes, args.seed)
    times = [_calls(torch, cutegen.gemm, shape) for shape in shapes][_UNTIMED:]
    parts = _parts(torch, cutegen.gemm, random_shapes(args.shapes, args.seed + 2))
    of_torch = _firsts_of_torch(torch, random_shapes(_OF_TORCH, args.seed + 3))
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
        "compiled_by_warm_up": len(warmed.compiled),
        "warm_parts_s": {name: round(us / 1e6, 3) for name, us in warm_parts.items()},
        "compiled_by_calls": len(compiled),
        "first_us": _spread(first),
        "by_answer": _by_answer(shapes[_UNTIMED:], times),
        "torch_mm_first_us": _spread(of_torch),
        "parts_us": {
            part: _spread(sorted(each.get(part, 0.0) for _, each in parts)) for part in _names(parts)
        },
        "slowest": _slowest(parts),
        "second_us": _spread(second),
        "choice_us": _spread(choices),
        "limit_us": LIMIT_US,
        "choice_limit_us": CHOICE_LIMIT_US,
        "limit_kept": median(first) <= LIMIT_US and not compiled and median(choices) <= CHOICE_LIMIT_US,
    }


def _answerer(shape: tuple[int, int, int]) -> str:
    """Return what computes a shape: a kernel, or torch."""
    answer = operators.default_dispatcher().explain(Problem(*shape))
    return "torch" if answer.config is None else "kernel"


def _by_answer(
    shapes: Sequence[tuple[int, int, int]], times: Sequence[tuple[float, float]]
) -> dict[str, Json]:
    """Return the spread of first calls for each that answers."""
    found: dict[str, list[float]] = {}
    for shape, (first, _) in zip(shapes, times, strict=True):
        found.setdefault(_answerer(shape), []).append(first)
    return {name: {"shapes": len(us), **_spread(sorted(us))} for name, us in sorted(found.items())}


_Parts = tuple[tuple[int, int, int], dict[str, float]]


def _parts(torch: Any, gemm: Any, shapes: Sequence[tuple[int, int, int]]) -> list[_Parts]:
    """Return the microseconds of each part of first calls."""
    found = []
    operators.drop_plans()
    with Stopwatch().watching(_STEPS) as watch:
        call = watch.timed(gemm, _LAUNCH)
        for shape in shapes:
            a, b, out = _operands(torch, shape)
            torch.cuda.synchronize()
            watch.take()
            call(a, b, out=out)
            found.append((shape, watch.take()))
    torch.cuda.synchronize()
    return found


def _names(parts: Sequence[_Parts]) -> list[str]:
    """Return the names of parts, the longest in the mean first."""
    total: dict[str, float] = {}
    for _, each in parts:
        for name, us in each.items():
            total[name] = total.get(name, 0.0) + us
    return sorted(total, key=lambda name: -total[name])


def _slowest(parts: Sequence[_Parts]) -> list[Json]:
    """Return the slowest calls: shape, who answers, and the parts of at least a tenth."""
    slow = sorted(parts, key=lambda each: -sum(each[1].values()))[:_SLOWEST]
    found: list[Json] = []
    for shape, each in slow:
        us = sum(each.values())
        large = {name: round(part, 1) for name, part in each.items() if part >= 0.1 * us}
        found.append(
            {"shape": list(shape), "by": _answerer(shape), "us": round(us, 1), "parts_us": {**large}}
        )
    return found


def _choices(device: Device, shapes: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return microseconds of the choice among default kernels, of shapes that were not asked for before."""
    space, times = find_space("gemm", packaged_arch(device)), []
    for shape in shapes:
        problem = Problem(*shape)
        began = time.perf_counter()
        default_config(space, problem, device.sm_count)
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _calls(torch: Any, gemm: Any, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Return microseconds of host time of the first and the second call of a shape."""
    a, b, out = _operands(torch, shape)
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        gemm(a, b, out=out)
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return times[0], times[1]


def _operands(torch: Any, shape: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """Return A, B and a place for the result of a shape."""
    m, n, k = shape
    a = torch.zeros(m, k, device=_DEVICE, dtype=torch.bfloat16)
    b = torch.zeros(n, k, device=_DEVICE, dtype=torch.bfloat16).t()
    return a, b, torch.empty(m, n, device=_DEVICE, dtype=torch.bfloat16)


def _firsts_of_torch(torch: Any, shapes: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return sorted microseconds of first calls of torch.mm itself."""
    times = []
    for shape in shapes:
        a, b, out = _operands(torch, shape)
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append((time.perf_counter() - began) * 1e6)
    return sorted(times)


def _spread(times: Sequence[float]) -> dict[str, Json]:
    """Return median, 95th percentile and largest of sorted times."""
    at = round(0.95 * (len(times) - 1))
    return {"median": round(median(times), 1), "p95": round(times[at], 1), "most": round(times[-1], 1)}


def summary(results: dict[str, Json]) -> str:
    """Return the results in one line."""
    first: Any = results["first_us"]
    second: Any = results["second_us"]
    choice: Any = results["choice_us"]
    parts: Any = results["parts_us"]
    torch_us: Any = results["torch_mm_first_us"]
    longest = ", ".join(f"{name} {us['median']}" for name, us in parts.items())
    return (
        f"{results['kernels']} kernels warm after {results['warm_s']} s ({results['warm_parts_s']}, "
        f"{results['compiled_by_warm_up']} compiled); first calls of {results['shapes']} "
        f"shapes: median {first['median']} us, 95 % within {first['p95']}, most {first['most']}; second "
        f"calls: {second['median']} us; the choice alone: {choice['median']} us; "
        f"{results['compiled_by_calls']} kernels compiled by calls; parts of a first call: {longest}; "
        f"first calls of torch.mm: {torch_us['median']} us, 95 % within {torch_us['p95']}"
    )


if __name__ == "__main__":
    sys.exit(main())
