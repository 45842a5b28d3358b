"""Measure what a call costs on the host: cutegen.gemm, torch.mm, the dispatch lookup alone, a pinned folder.

Of linear layers, calls are timed with and without gradients; beside a GEMM, a call of a kernel that a user
declares; and of some calls, what ``cutegen.record`` and ``cutegen.freeze`` add, each round with and without.

Statements take turns, a few hundred calls each before the GPU is waited for, so that the launch queue never
fills and drifting CPU clocks hit all alike. The shape is small, so the GPU keeps up; what is timed is Python,
torch and the driver. The first call of a deployment folder is timed in processes of their own, after torch
was imported and the GPU is in use. With ``--against``, the calls of another checkout take turns with ours.

    python tools/bench_dispatch.py --out results/dispatch.json --against ../checkout-of-a-release

exit codes: 0 measured; 2 bad usage; 3 no GPU, or an unusable file; 130 interrupted
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build.store import Store
from cutegen.cli.args import add_cache_argument, positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.deploy import pin_table
from cutegen.digest import Json
from cutegen.errors import CheckError, UsageError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Problem
from cutegen.measure.device import Device, present_device
from cutegen.measure.statistics import median_interval, ratio_interval
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import ROOT, git_commit, session_facts, software
from tools.benchmark.results import write_json
from tools.benchmark.turns import take_turns

__all__ = ["STATEMENTS", "host_times", "main"]

#: What is timed, in the words of a user; names are set by :func:`names`.
STATEMENTS = {
    "gemm": "gemm(a, b, out=c)",
    "torch": "mm(a, b, out=c)",
    "kernel": "kernel(a, b, c, *scratch, *scalars)",
    "gemm_new": "gemm(a, b)",
    "torch_new": "mm(a, b)",
    "linear": "linear(a, w)",
    "torch_linear": "torch_linear(a, w)",
    "linear_grad": "linear(a, weight)",  # autograd records it
    "torch_linear_grad": "torch_linear(a, weight)",
    "step": "gradients(linear(x, weight), (x, weight), c)",  # forward and backward: three GEMMs
    "torch_step": "gradients(torch_linear(x, weight), (x, weight), c)",
    "fused": "gemm(a, b, out=c, bias=bias, activation='relu')",
    "lookup": "plans.get(key)",
    "declared": "norm(c, bias, 1e-6, y=y)",  # the kernel of a user's that examples/own_kernel declares
    "declared_new": "norm(c, bias)",
}
#: Those of them of which it is timed what recording and freezing add.
IN_MODES = ("gemm", "linear", "linear_grad")
#: Calls that come before those that are timed wherever a mode has changed: they look up kernels again.
_SETTLING = 3
#: Those of them that every checkout has.
COMMON = ("gemm", "gemm_new", "linear", "fused", "lookup", "torch")
FIRST_CALL = """
import sys, time
import torch
a = torch.randn({m}, {k}, device="cuda").to(torch.bfloat16)
b = torch.randn({n}, {k}, device="cuda").to(torch.bfloat16).t()
c = torch.empty({m}, {n}, device="cuda", dtype=torch.bfloat16)
sys.path.insert(0, {folder!r})
torch.cuda.synchronize()
start = time.perf_counter()
import pinned
pinned.gemm(a, b, out=c)
print(1e3 * (time.perf_counter() - start))
torch.testing.assert_close(c, a @ b, rtol=2e-2, atol=2e-2 * {k} ** 0.5)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", default="256x256x256", metavar="MxNxK", help="default 256x256x256, bf16 kk"
    )
    parser.add_argument("--rounds", type=positive_int, default=100)
    parser.add_argument("--calls", type=positive_int, default=200, help="per statement and round")
    parser.add_argument("--processes", type=positive_int, default=7, help="for a deployment's first call")
    add_cache_argument(parser, "compiled kernels")
    add_out_argument(parser)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="whose calls take turns with ours")
    parser.add_argument("--against-commit", default="", metavar="COMMIT", help="where git cannot tell")
    parser.add_argument("--turns-only", action="store_true", help="with --against: measure nothing else")
    add_commit_argument(parser)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    device = present_device()
    problem = GEMM.problem(GEMM.parse_shape(args.shape), {})
    if args.turns_only:
        return run_turns(args, device, problem)
    kernels = Kernels(Store.at(args.cache_dir), build="allow")
    namespace, wait = names(problem, Dispatcher(kernels=kernels))
    times = host_times(STATEMENTS, namespace, wait, args.rounds, args.calls)
    added = {
        name: added_times(mode, namespace, wait, args.rounds, args.calls)
        for name, mode in (("recording", recording), ("freezing", freezing))
    }
    first = first_calls(problem, device, kernels, args.processes)
    results = report(problem, device, times, added, first, args)
    if args.against is not None:
        results["against"] = against(args, problem)
    for line in summary(results):
        print(line)
    if args.out is not None:
        write_json(args.out, results)
    return EXIT_OK


def run_turns(args: argparse.Namespace, device: Device, problem: Problem) -> int:
    """Measure only what takes turns with another checkout, print and write.

    Raises:
        UsageError: None is given.
    """
    if args.against is None:
        raise UsageError("--turns-only needs a checkout to take turns with; give --against")
    results = {**conditions(device, problem, args), "against": against(args, problem)}
    print("\n".join(of_other(results)))
    if args.out is not None:
        write_json(args.out, results)
    return EXIT_OK


def names(problem: Problem, dispatcher: Dispatcher) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return what the statements refer to, checked once, and a function that waits for the GPU.

    Raises:
        CheckError: cutegen and torch disagree about the result.
        UsageError: cutegen does not compute it.
    """
    import torch

    import cutegen
    import cutegen.torch_ops.gemm

    gemm, linear = cutegen.gemm, cutegen.linear
    cutegen.use(dispatcher)
    torch.manual_seed(0)
    a = torch.rand(problem.m, problem.k, device="cuda").sub(0.5).to(torch.bfloat16)
    w = torch.rand(problem.n, problem.k, device="cuda").sub(0.5).to(torch.bfloat16)
    bias = torch.rand(problem.n, device="cuda").to(torch.bfloat16)
    b, c = w.t(), torch.empty(problem.m, problem.n, device="cuda", dtype=torch.bfloat16)
    gemm(a, b, out=c)
    error = (c.float() - a.float() @ b.float()).abs().max().item()
    if not error <= 0.02 * problem.k**0.5:
        raise CheckError(f"cutegen and torch differ by {error} on {problem}")
    plans = cutegen.torch_ops.gemm._plans
    choice = dispatcher.kernel(problem)
    if choice is None:
        raise UsageError(f"the dispatch table gives {problem} to torch; measure another shape")
    elements = choice.launch.workspace_bytes // 4
    found: dict[str, Any] = {
        "plans": plans,
        "key": next(iter(plans)),
        "kernel": choice.function,
        "scratch": (torch.zeros(elements, device="cuda"),) if elements else (),
        "scalars": choice.launch.scalars,
        "mm": torch.mm,
        "torch_linear": torch.nn.functional.linear,
    }
    found.update(gemm=gemm, linear=linear, a=a, b=b, c=c, w=w, bias=bias, weight=torch.nn.Parameter(w))
    found.update(x=a.clone().requires_grad_(), gradients=torch.autograd.grad)
    norm = cutegen.load(ROOT / "examples" / "own_kernel" / "my_norm_kernel.py")
    found.update(norm=norm, y=norm(c, bias))
    return found, torch.cuda.synchronize


def host_times(
    statements: Mapping[str, str],
    namespace: Mapping[str, Any],
    wait: Callable[[], None],
    rounds: int,
    calls: int,
) -> dict[str, list[float]]:
    """Return microseconds per call of every statement, one sample per round, all in turn.

    Args:
        statements: Python text by name.
        namespace: What it refers to.
        wait: Empties the launch queue.
        rounds: Samples; one further round warms up.
        calls: Calls per sample, fewer than the launch queue holds (1024 on present drivers).
    """
    timers = {name: timeit.Timer(text, globals=dict(namespace)) for name, text in statements.items()}
    times: dict[str, list[float]] = {name: [] for name in statements}
    for number in range(rounds + 1):
        for name, timer in timers.items():
            wait()
            sample = timer.timeit(calls) / calls * 1e6
            if number:
                times[name].append(sample)
    wait()
    return times


Mode = Callable[[], AbstractContextManager[object]]


def added_times(
    mode: Mode, namespace: Mapping[str, Any], wait: Callable[[], None], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return microseconds that a mode adds to a call of each statement of :data:`IN_MODES`, by round.

    Args:
        mode: Makes the context of it.
        namespace: What statements refer to.
        wait: Empties the launch queue.
        rounds: Differences of each; in every one of them the statement is timed without and with the mode.
        calls: Calls per sample.
    """
    timers = {name: timeit.Timer(STATEMENTS[name], globals=dict(namespace)) for name in IN_MODES}
    added: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples = []
            for context in (nullcontext, mode):
                with context():
                    timer.timeit(_SETTLING)
                    wait()
                    samples.append(timer.timeit(calls) / calls * 1e6)
            added[name].append(samples[1] - samples[0])
    wait()
    return added


@contextmanager
def recording() -> Iterator[None]:
    """Let calls be recorded."""
    import cutegen

    with cutegen.record():
        yield


@contextmanager
def freezing() -> Iterator[None]:
    """Let the operators compile and load nothing, and count what answers."""
    import cutegen
    from cutegen.torch_ops.gemm import default_dispatcher

    before = default_dispatcher()
    cutegen.freeze(on_miss="error")
    try:
        yield
    finally:
        cutegen.use(before)


def first_calls(problem: Problem, device: Device, kernels: Kernels, processes: int) -> list[float]:
    """Return the milliseconds that a new process needs to import a deployment's loader and launch once."""
    with TemporaryFolder() as scratch:
        config = Dispatcher(kernels=kernels).explain(problem).config
        table, folder = scratch.path / "table.json", scratch.path / "deploy"
        Table(Fingerprint.of(device, kernels.toolchain), [Entry(problem, config)]).save(table)
        pin_table(table, folder, kernels=kernels)
        code = FIRST_CALL.format(m=problem.m, n=problem.n, k=problem.k, folder=str(folder))
        command = [sys.executable, "-c", code]
        return [
            float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
            for _ in range(processes)
        ]


def against(args: argparse.Namespace, problem: Problem) -> dict[str, Json]:
    """Return our host time over that of another checkout, by statement."""
    other, sizes = args.against.resolve(), (problem.m, problem.n, problem.k)
    common = {name: STATEMENTS[name] for name in COMMON}
    times = take_turns(ROOT, other, sizes, common, args.rounds, args.calls)
    found: dict[str, Json] = {}
    for name, (ours, theirs) in times.items():
        ratio = ratio_interval(ours, theirs)
        found[name] = {
            "statement": STATEMENTS[name],
            "us": round(statistics.median(ours), 3),
            "other_us": round(statistics.median(theirs), 3),
            "ratio": round(ratio.mid, 4),
            "interval": [round(ratio.low, 4), round(ratio.high, 4)],
        }
    return {"commit": args.against_commit or git_commit(other), "statements": found}


def conditions(device: Device, problem: Problem, args: argparse.Namespace) -> dict[str, Json]:
    """Return what was measured, where and how."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": args.commit or git_commit(),
        "device": device.to_json(),
        "software": software(),
        "session": session_facts(device),
        "problem": str(problem),
        "rounds": args.rounds,
        "calls": args.calls,
    }


def report(
    problem: Problem,
    device: Device,
    times: Mapping[str, list[float]],
    added: Mapping[str, Mapping[str, list[float]]],
    first: list[float],
    args: argparse.Namespace,
) -> dict[str, Json]:
    """Return everything worth keeping as JSON data."""
    own = ratio_interval(times["torch"], times["gemm"])
    layer = ratio_interval(times["linear_grad"], times["torch_linear_grad"])
    step = ratio_interval(times["step"], times["torch_step"])
    declared = [own - gemm for own, gemm in zip(times["declared"], times["gemm"], strict=True)]
    medians: dict[str, Json] = {}
    for name, samples in times.items():
        interval = median_interval(samples)
        medians[name] = {
            "statement": STATEMENTS[name],
            "median": round(interval.mid, 3),
            "interval": [round(interval.low, 3), round(interval.high, 3)],
        }
    return {
        **conditions(device, problem, args),
        "host_us": medians,
        "torch_over_gemm": {"median": round(own.mid, 3), "interval": [round(own.low, 3), round(own.high, 3)]},
        "linear_grad_over_torch": {
            "median": round(layer.mid, 3),
            "interval": [round(layer.low, 3), round(layer.high, 3)],
        },
        "step_over_torch": {
            "median": round(step.mid, 3),
            "interval": [round(step.low, 3), round(step.high, 3)],
        },
        "declared_adds_us": _difference(declared),
        **{f"{mode}_adds_us": {n: _difference(v) for n, v in found.items()} for mode, found in added.items()},
        "pinned_first_call_ms": {
            "median": round(statistics.median(first), 2),
            "samples": [round(sample, 2) for sample in first],
        },
    }


def _difference(samples: list[float]) -> Json:
    """Return what is kept of microseconds that one thing takes more than another."""
    found = median_interval(samples)
    return {"median": round(found.mid, 2), "interval": [round(found.low, 2), round(found.high, 2)]}


def summary(results: Mapping[str, Any]) -> list[str]:
    """Return the results as lines for people."""
    lines = [f"host time per call on {results['device']['name']}, {results['problem']}:"]
    for found in results["host_us"].values():
        low, high = found["interval"]
        lines.append(f"  {found['median']:7.2f} us  [{low:.2f}, {high:.2f}]  {found['statement']}")
    ratio, first = results["torch_over_gemm"], results["pinned_first_call_ms"]
    lines.append(f"torch.mm / cutegen.gemm, both with out=: {ratio['median']:.3f}")
    layer, declared = results["linear_grad_over_torch"], results["declared_adds_us"]
    lines.append(f"linear with gradients, cutegen / torch: {layer['median']:.3f}")
    lines.append(f"its forward and backward pass: {results['step_over_torch']['median']:.3f}")
    low, high = declared["interval"]
    lines.append(
        f"a declared kernel takes {declared['median']:.2f} us [{low:.2f}, {high:.2f}] more than cutegen.gemm"
    )
    for mode in ("recording", "freezing"):
        most = max(found["median"] for found in results[f"{mode}_adds_us"].values())
        lines.append(f"{mode} adds at most {most:.2f} us to a call")
    lines += of_other(results)
    lines.append(f"first call of a pinned folder after import of torch: {first['median']:.1f} ms")
    return lines


def of_other(results: Mapping[str, Any]) -> list[str]:
    """Return our times over those of another checkout as lines for people, if there is one."""
    lines = []
    for one in results.get("against", {}).get("statements", {}).values():
        low, high = one["interval"]
        lines.append(
            f"  {one['ratio']:.3f} [{low:.3f}, {high:.3f}] of the other checkout: {one['statement']}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
