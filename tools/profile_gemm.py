"""Profile the vendor's call and cutegen's kernels with Nsight Compute: counters that explain a time.

Every shape is a process of its own under ``ncu``, with a time limit. Calls are made one at a time, with
empty caches and the GPU's clocks left alone, so times differ from the benchmark's; what the counters are for
is where the time goes. ``tools/results_table.py`` renders the file.

    python tools/profile_gemm.py --shape 16x28672x4096 --table TABLE.json --out docs/results/profile.json

exit codes: 0 everything was profiled; 1 some shape could not be; 2 bad usage; 3 no GPU, or no ncu;
130 interrupted (the shapes that were finished are kept)
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.args import add_problem_arguments, named_problems, positive_float, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.errors import DeviceError, UsageError
from cutegen.families.registry import find_space, space_of
from cutegen.family import Problem
from cutegen.measure.device import Device, present_device
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import look_up
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import ROOT, check_facts
from tools.benchmark.ours import short_config
from tools.benchmark.profile_child import MARK
from tools.benchmark.profile_table import METRICS, PROFILE, Kernel, Profile, Profiled, read_csv
from tools.benchmark.results import write_json

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(family="gemm")
    add_problem_arguments(parser)
    parser.add_argument("--table", type=Path, required=True, metavar="FILE.json", help="whose winners to run")
    parser.add_argument("--calls", type=positive_int, default=5, help="calls of each to profile (default 5)")
    parser.add_argument("--timeout", type=positive_float, default=120.0, metavar="SECONDS", help="per shape")
    add_out_argument(parser, required=True)
    add_commit_argument(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Profile, print, write the file after every shape, and return the exit code.

    Raises:
        DeviceError: There is no GPU, or no Nsight Compute.
        StoreError: The table cannot be read, or the file not written.
    """
    ncu = shutil.which("ncu")
    device = present_device()
    if ncu is None:
        raise DeviceError("ncu is not on the PATH; it comes with NVIDIA Nsight Compute")
    table = Table.load(args.table)
    facts = {**check_facts(PROFILE, device, args.commit), "ncu": _version(ncu)}
    profile, failed = Profile(facts), False
    for item in named_problems(args):
        try:
            kernels = profiled(ncu, item.problem, args.calls, args.table, args.timeout)
        except UsageError as error:
            print(f"{item.name}: {error}", file=sys.stderr)
            failed = True
            continue
        config = config_text(table, item.problem, device)
        row = Profiled(item.name, str(item.problem), config, tuple(kernels))
        profile = replace(profile, shapes=(*profile.shapes, row))
        write_json(args.out, profile.to_json())
        print(profile.summary()[-1], flush=True)
    return 1 if failed else 0


def _version(ncu: str) -> str:
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    number = next((row for row in said.splitlines() if row.startswith("Version")), "Version unknown")
    return f"ncu {number.split()[1]}"


def config_text(table: Table, problem: Problem, device: Device) -> str:
    """Return the config that ``cutegen.gemm`` runs with ``table``, for people."""
    space = find_space(problem.family, device.arch)
    config = look_up(table, problem, space, device.sm_count, "none").config
    return "torch" if config is None else short_config(space_of(config, problem.family, device.arch), config)


def profiled(ncu: str, problem: Problem, calls: int, table: Path, limit_s: float) -> list[Kernel]:
    """Return the kernels of the vendor's call and of ours, with their counters.

    Raises:
        UsageError: The child failed or took too long, or counters are missing.
    """
    with TemporaryFolder() as folder:
        log = folder.path / "ncu.csv"
        child = [sys.executable, "-m", "tools.benchmark.profile_child", str(problem), str(calls)]
        command = [*_profiler(ncu, log), *child, str(table.absolute())]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"took longer than {limit_s:g} s and was stopped") from None
        if done.returncode:
            raise UsageError(f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
        return read_csv(log.read_text(encoding="utf-8"))


def _profiler(ncu: str, log: Path) -> list[str]:
    """Return the command line up to the program: only launches inside of our ranges are counted."""
    return [
        *(ncu, "--nvtx", "--nvtx-include", f"regex:{MARK}.*/", "--clock-control", "none"),
        *("--cache-control", "all", "--metrics", ",".join(METRICS.values())),
        *("--csv", "--page", "raw", "--log-file", str(log)),
    ]


if __name__ == "__main__":
    sys.exit(main())
