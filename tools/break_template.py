"""Break the Hopper kernel on purpose and see whether a GPU does what the model of its schedule predicts.

Every edit of tools/schedule/breaks.py is applied to the rendered text of a kernel, which is then compiled and
checked like any candidate: in a child process, on poisoned outputs, with a limit of time.

    python tools/break_template.py --out results/breaks.json
    python tools/break_template.py --only turn --repeats 50
    python tools/break_template.py --compile-only        (no GPU: see that the edits apply and compile)

exit codes: 0 all as expected; 1 something else was seen; 2 bad usage; 3 no usable GPU, or no compiler
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Builder, Failure
from cutegen.build.render import Source, render
from cutegen.cli.args import positive_float, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.digest import Json
from cutegen.errors import DeviceError, UsageError
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.device import Device, present_device
from cutegen.space import Config
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import check_facts
from tools.benchmark.kernel_store import kernel_store
from tools.benchmark.results import write_json
from tools.schedule import protocol_of, simulate_cluster
from tools.schedule.breaks import BREAKS, CASES, OUTCOMES, Break, broken_source, case_of
from tools.schedule.sm90 import HopperProtocol

ARCH = "sm_90a"


@dataclass(frozen=True)
class Trial:
    """One kernel to try: a broken one, or one as it should be.

    Attributes:
        name: What it is called.
        problem: What it computes.
        config: Its config.
        source: Its text.
        expected: What the GPU should do; ``ok`` for a kernel that is not broken.
        model: What the simulation says of it.
    """

    name: str
    problem: Problem
    config: Config
    source: Source
    expected: str
    model: str

    @property
    def outcomes(self) -> frozenset[str]:
        """The outcomes that agree with that."""
        return OUTCOMES.get(self.expected, frozenset({"ok"}))


def trials(arch: Arch, only: str = "") -> Iterator[Trial]:
    """Yield, case by case, the kernel as it is and then broken in every way whose name has ``only`` in it."""
    for case in CASES:
        breaks = [each for each in BREAKS if each.case == case and only in each.name]
        problem, config = case_of(case, arch)
        if breaks:
            yield Trial(f"{case}, not broken", problem, config, render(problem, config, arch), "ok", "clean")
        for each in breaks:
            yield Trial(
                each.name, problem, config, broken_source(each, arch), each.expected, kinds_of(each, arch)
            )


def kinds_of(each: Break, arch: Arch) -> str:
    """Return the kinds of violation that the simulation of a broken kernel reports."""
    protocol = protocol_of(*case_of(each.case, arch), arch)
    assert isinstance(protocol, HopperProtocol)
    return " ".join(sorted(simulate_cluster(each.model(protocol)).kinds)) or "clean"


@contextmanager
def compiled(chosen: Sequence[Trial]) -> Iterator[dict[str, Artifact | Failure]]:
    """Compile all kernels; their artifacts, by digest of the source, live as long as the context."""
    with kernel_store() as store, Builder(store) as builder:
        sources = list({trial.source.digest: trial.source for trial in chosen}.values())
        yield {source.digest: result for source, result in builder.build(sources)}


def check(trial: Trial, artifact: Artifact, bench: Bench, device: Device, repeats: int) -> dict[str, Json]:
    """Return how one kernel did on the GPU."""
    space = find_space(trial.problem.family, device.arch)
    candidate = Candidate.of(
        "broken", artifact.shared_object, artifact.symbol, space, trial.config, trial.problem, device.sm_count
    )
    bench.open(trial.problem)  # anew each time: a broken kernel may have written anywhere
    result = bench.check(candidate, repeats)
    return {"outcome": result.outcome, "error": result.error[:500]}


def run(
    chosen: Sequence[Trial], device: Device | None, repeats: int, timeout_s: float
) -> list[dict[str, Json]]:
    """Return one record per kernel; without a device they are compiled only."""
    records = []
    with compiled(chosen) as built, Bench(timeout_s=timeout_s) as bench:
        for trial in chosen:
            record: dict[str, Json] = {
                "name": trial.name,
                "problem": str(trial.problem),
                "config": str(trial.config),
                "model": trial.model,
                "expected": trial.expected,
            }
            artifact = built[trial.source.digest]
            if isinstance(artifact, Failure):
                record |= {"outcome": "build_failed", "error": artifact.message, "agrees": False}
            elif device is None:
                record |= {"outcome": "compiled", "error": "", "agrees": True}
            else:
                record |= check(trial, artifact, bench, device, repeats)
                record["agrees"] = record["outcome"] in trial.outcomes
            print(describe(record), flush=True)
            records.append(record)
    return records


def describe(record: Mapping[str, Json]) -> str:
    """Return one line about a kernel."""
    mark = "  " if record["agrees"] else "! "
    seen = f"{record['outcome']} {record['error']}".rstrip()
    return f"{mark}{record['name']}: model {record['model']}; expected {record['expected']}; seen {seen}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options = parse(arguments)
    return run_command(lambda: try_all(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the names of the breaks to try")
    parser.add_argument(
        "--repeats", type=positive_int, default=20, help="further runs that must give the same bits"
    )
    parser.add_argument("--timeout", type=positive_float, default=10.0, help="seconds for one check")
    parser.add_argument("--compile-only", action="store_true", help="no GPU: see that the edits compile")
    add_out_argument(parser)
    add_commit_argument(parser)
    return parser.parse_args(arguments)


def try_all(options: argparse.Namespace) -> int:
    """Try every kernel that was asked for, write the file, and return the exit code.

    Raises:
        DeviceError: There is no GPU, or the kernels are not for it.
        UsageError: No break has such a name.
    """
    chosen = list(trials(find_arch(ARCH), options.only))
    if not chosen:
        names = ", ".join(each.name for each in BREAKS)
        raise UsageError(f"--only {options.only!r} is in the name of no break; there are: {names}")
    device = None if options.compile_only else present_device()
    if device is not None and device.arch.name != ARCH:
        raise DeviceError(f"the kernels are for {ARCH}, the GPU is {device.name}")
    records = run(chosen, device, options.repeats, options.timeout)
    agreeing = sum(record["agrees"] is True for record in records)
    print(f"{agreeing} of {len(records)} as expected")
    if options.out is not None:
        summary = {
            **check_facts("broken kernels", device, options.commit),
            "repeats": options.repeats,
            "timeout_s": options.timeout,
            "trials": records,
        }
        write_json(options.out, summary)
    return 0 if agreeing == len(records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
