"""Measure how good the answers of a tuned range are, beside the baseline and beside exact tuning.

Sizes are taken at random, evenly over the doublings. Those that may meet the power limit come first, one
after the other, so that the GPU stays loaded and its clock settles; then they are timed again in short
bursts, at full clock. At some sizes the single size is tuned as a user would tune it, and both configs are
then timed in the same rounds: that is the regret. The kernel that answers is timed at every size; where
calls with default settings leave a size to the baseline, that is noted beside it.

    python tools/check_range.py --table TABLE.json --range 'gemm 1..8192x7168x2048 bf16 kk' --out check.json

Render the file with tools/results_table.py.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build.store import Store
from cutegen.cli.args import add_cache_argument, file_path, positive_float, positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError, UsageError
from cutegen.families.ranges import Range, parse_range
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.context import CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.measure.statistics import geometric_mean
from cutegen.records.calibrations import packaged_arch
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import DEFAULT_FALLBACK, Answer, look_up
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config
from cutegen.tuning import EFFORTS, AutoTuner
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.compiled import compiled_candidate
from tools.benchmark.environment import check_facts
from tools.benchmark.range_table import RANGE_CHECK
from tools.benchmark.results import write_json

__all__ = ["Row", "main", "random_sizes", "summary"]

#: A check that is cut short loses so many sizes at most.
_WRITTEN_EVERY = 10
#: Floating-point operations for each byte from which on the power limit may decide.
_INTENSITY = 200
#: Rounds that load an idle GPU, and microseconds of an entry in each: 1.5 s in all. Source: an H200 drew 850
#: to 900 W at 1900 MHz for more than half a second before its clock fell, and looked settled until then.
_BURN_ROUNDS, _BURN_US = 60, 10_000.0
#: Seconds of idling after which a burst runs at full clock. Source: as for bursts of the tuning.
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Row:
    """One size.

    Attributes:
        size: Which.
        how: The rule of lookup that answered.
        time_us: Microseconds of the answer.
        ratio: The baseline's time over it, paired.
        exact_us: Microseconds of what tuning that size alone found, in the same rounds; None if it was not.
        config: The answer.
        exact: What tuning that size alone found.
        by_baseline: Whether calls with default settings leave the size to the baseline.
        clock_mhz: Median SM clock while the answer ran; None where it cannot be read.
        burst_ratio: As ``ratio``, in short bursts; None for sizes that never meet the power limit.
        burst_clock_mhz: As ``clock_mhz``, in these bursts.
    """

    size: int
    how: str
    time_us: float
    ratio: float | None
    exact_us: float | None = None
    config: str = ""
    exact: str = ""
    by_baseline: bool = False
    clock_mhz: float | None = None
    burst_ratio: float | None = None
    burst_clock_mhz: float | None = None

    @property
    def regret(self) -> float | None:
        """How far the answer is behind exact tuning, as a fraction."""
        return None if self.exact_us is None else self.time_us / self.exact_us - 1

    @property
    def served_ratio(self) -> float | None:
        """The baseline's time over that of a call with default settings: 1 where this is the baseline."""
        return 1.0 if self.by_baseline else self.ratio

    @property
    def ratio_at_full_clock(self) -> float | None:
        """The ratio in bursts where there is one, else the ratio."""
        return self.ratio if self.burst_ratio is None else self.burst_ratio

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            "size": self.size,
            "how": self.how,
            "time_us": self.time_us,
            "ratio": self.ratio,
            "exact_us": self.exact_us,
            "regret": self.regret,
            "config": self.config,
            "exact": self.exact,
            "by_baseline": self.by_baseline,
            "clock_mhz": self.clock_mhz,
            "burst_ratio": self.burst_ratio,
            "burst_clock_mhz": self.burst_clock_mhz,
        }


def random_sizes(whole: Range, count: int, seed: int) -> list[int]:
    """Return ``count`` sizes of a range, even over the doublings; fewer if it has fewer."""
    rng = random.Random(f"check {whole} {seed}")
    found: dict[int, None] = {}
    for _ in range(50 * count):
        problem = whole.at_most(round(whole.first * (whole.last / whole.first) ** rng.random()))
        if problem is not None and len(found) < count:
            found[problem.sizes[whole.size]] = None
    return list(found)


def summary(rows: Sequence[Row]) -> str:
    """Return the geometric means and worst cases in a line."""
    ratios = sorted(row.ratio for row in rows if row.ratio is not None)
    regrets = sorted(row.regret for row in rows if row.regret is not None)
    words = []
    if ratios:
        under = sum(ratio < 1 for ratio in ratios)
        words.append(
            f"{len(ratios)} sizes beside the baseline: geometric mean {geometric_mean(ratios):.3f}, smallest "
            f"{ratios[0]:.3f}, {under} under 1"
        )
    in_bursts = [row.ratio_at_full_clock for row in rows if row.burst_ratio is not None]
    if in_bursts:
        full = [ratio for row in rows if (ratio := row.ratio_at_full_clock) is not None]
        words.append(
            f"{len(in_bursts)} of them in bursts: geometric mean of all {geometric_mean(full):.3f}, smallest "
            f"{min(full):.3f}"
        )
    left = sum(row.by_baseline for row in rows)
    if left:
        served = [ratio for row in rows if (ratio := row.served_ratio) is not None]
        words.append(
            f"as served by default, {left} left to the baseline: geometric mean "
            f"{geometric_mean(served):.3f}, smallest {min(served):.3f}"
        )
    if regrets:
        mean = geometric_mean(1 + regret for regret in regrets) - 1
        words.append(
            f"{len(regrets)} beside exact tuning: regret {mean:.2%} in the geometric mean, "
            f"{regrets[-1]:.2%} at worst"
        )
    return "; ".join(words)


@dataclass(frozen=True)
class Measured:
    """What timing a config came to: microseconds without drift, the ratio to the baseline, the SM clock."""

    time_us: float
    ratio: float | None
    clock_mhz: float | None


class Checker:
    """Times configs of one GPU: those that meet its power limit under it, as a program that runs on would."""

    def __init__(self, device: Device, kernels: Kernels, context: str) -> None:
        self._device = device
        self._kernels = kernels
        self._loaded = False
        self.policy = Policy(rounds=9, min_rounds=7, round_us=2000.0, settle_s=0.2, context=context)
        self.loaded_policy = replace(self.policy, round_us=4000.0, settle_s=1.2)
        self.burst_policy = replace(self.policy, clock="burst", round_us=1500.0, settle_s=0.05)

    def candidate(self, name: str, problem: Problem, config: Config, known_key: str = "") -> Candidate:
        """Return a config as something to time."""
        return compiled_candidate(self._kernels, self._device, name, problem, config, known_key)

    def time(self, bench: Bench, candidates: Sequence[Candidate]) -> dict[str, Measured]:
        """Return what was measured by name. A GPU that was idle before a loaded size is loaded first."""
        problem = candidates[0].problem
        bench.open(problem)
        loaded = meets_power_limit(problem)
        if loaded and not self._loaded:
            bench.time(candidates, self._burn_in)
        self._loaded = loaded
        return self._times(bench, candidates, self.loaded_policy if loaded else self.policy)

    def time_in_bursts(self, bench: Bench, candidates: Sequence[Candidate]) -> dict[str, Measured]:
        """Return what was measured by name after a pause, too briefly for the power limit."""
        bench.open(candidates[0].problem)
        time.sleep(_PAUSE_S)
        self._loaded = False
        return self._times(bench, candidates, self.burst_policy)

    @property
    def _burn_in(self) -> Policy:
        return replace(
            self.policy, rounds=_BURN_ROUNDS, min_rounds=_BURN_ROUNDS, round_us=_BURN_US, precision=0
        )

    def _times(self, bench: Bench, candidates: Sequence[Candidate], policy: Policy) -> dict[str, Measured]:
        run = bench.time(candidates, policy)
        return {n: Measured(t.paired.mid, t.ratio, t.sm_clock_mhz) for n, t in run.items()}


def meets_power_limit(problem: Problem) -> bool:
    """Return whether the power limit may hold the clock down while ``problem`` is computed over and over.

    Source: GEMMs of 256x6144x4096 settled at 1560 MHz on an H200, those with half of that intensity at 1980.
    """
    return problem.flops >= _INTENSITY * problem.min_bytes


def answer_of(table: Table, problem: Problem, device: Device) -> Answer:
    """Return what the table answers, whatever the baseline takes."""
    return look_up(table, problem, find_space(problem.family, packaged_arch(device)), device.sm_count, "none")


def is_left(table: Table, problem: Problem, device: Device) -> bool:
    """Return whether calls with default settings leave ``problem`` to the baseline."""
    space = find_space(problem.family, packaged_arch(device))
    return look_up(table, problem, space, device.sm_count, table.fallback or DEFAULT_FALLBACK).config is None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=file_path, required=True)
    parser.add_argument("--range", help="its line; by default the table's first")
    parser.add_argument("--random", type=positive_int, default=100, help="sizes beside the baseline")
    parser.add_argument("--exact", type=int, default=10, help="of these, sizes that are tuned alone")
    parser.add_argument("--effort", choices=EFFORTS, default="standard", help="of that tuning")
    parser.add_argument("--context", choices=CONTEXTS, default=DEFAULT_CONTEXT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=positive_float, default=3600.0, help="begin nothing after so many seconds"
    )
    parser.add_argument("--tuned-s", type=positive_float, help="seconds that tuning the range took")
    add_commit_argument(parser)
    add_cache_argument(parser, "compiled kernels")
    add_out_argument(parser, required=True)
    return parser


def _range_of(table: Table, args: argparse.Namespace) -> Range:
    """Return the range that is named, or the first one of the table."""
    wanted = None if args.range is None else parse_range(args.range)
    found = next((entry.range for entry in table.ranges if wanted in (None, entry.range)), None)
    if found is None:
        there = "; ".join(str(entry.range) for entry in table.ranges) or "none"
        raise UsageError(f"table {args.table} lacks the range {wanted or ''}; it has {there}")
    return found


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    begun, device = time.monotonic(), present_device()
    table = Table.load(args.table)
    whole = _range_of(table, args)
    kernels = Kernels(Store.at(args.cache_dir), build="allow")
    checker = Checker(device, kernels, args.context)

    def late() -> bool:
        return time.monotonic() - begun > float(args.limit)

    rows: dict[int, Row] = {}
    about: dict[str, Json] = {
        **check_facts(RANGE_CHECK, device, args.commit),
        "range": str(whole),
        "tuned_s": args.tuned_s,
        "policy": checker.policy.to_json(),
        "loaded_policy": checker.loaded_policy.to_json(),
        "burst_policy": checker.burst_policy.to_json(),
        "effort": args.effort,
    }

    def write() -> None:
        write_json(args.out, {**about, "rows": [row.to_json() for row in rows.values()]})

    sizes = random_sizes(whole, args.random, args.seed)
    problems = {size: problem for size in sizes if (problem := whole.at(size)) is not None}
    loaded = [size for size, problem in problems.items() if meets_power_limit(problem)]
    answers = {size: answer_of(table, problem, device) for size, problem in problems.items()}

    def candidate(size: int) -> Candidate:
        answer = answers[size]
        assert answer.config is not None
        return checker.candidate("range", problems[size], answer.config, answer.known_key)

    with Bench() as bench:
        for size in [*loaded, *(size for size in problems if size not in loaded)]:
            if late():
                break
            own = checker.time(bench, [candidate(size)])["range"]
            left, answer = is_left(table, problems[size], device), answers[size]
            rows[size] = Row(
                size, answer.how, own.time_us, own.ratio, config=str(answer.config),
                by_baseline=left, clock_mhz=own.clock_mhz,
            )  # fmt: skip
            who = "baseline" if left else answer.how
            print(
                f"{size:6} {who:8} {own.time_us:9.2f} us  {own.ratio or 0:.3f}  {answer.config}", flush=True
            )
            if len(rows) % _WRITTEN_EVERY == 0:
                write()
        for size in loaded:
            if size not in rows or late():
                break
            own = checker.time_in_bursts(bench, [candidate(size)])["range"]
            rows[size] = replace(rows[size], burst_ratio=own.ratio, burst_clock_mhz=own.clock_mhz)
            print(f"{size:6} in bursts  {own.time_us:9.2f} us  {own.ratio or 0:.3f}", flush=True)
    write()
    print(summary(list(rows.values())), flush=True)
    _beside_exact(args, table, whole, rows, checker, device, late)
    write()
    print(summary(list(rows.values())))
    return EXIT_OK


def _beside_exact(
    args: argparse.Namespace,
    table: Table,
    whole: Range,
    rows: dict[int, Row],
    checker: Checker,
    device: Device,
    late: Callable[[], bool],
) -> None:
    """Tune some of the sizes alone, then time what that found beside the answers."""
    place = args.out.with_suffix(".exact.json")
    chosen = sorted(rows)[:: max(1, len(rows) // max(1, args.exact))][: args.exact]
    exact: dict[int, Config] = {}
    tuner = AutoTuner(
        device=device, cache_dir=args.cache_dir, table=place, effort=args.effort, context=args.context
    )
    with tuner:
        for size in chosen:
            problem = whole.at(size)
            assert problem is not None
            if late():
                break
            begun = time.monotonic()
            try:
                result = tuner.tune_problem(problem)
            except CutegenError as error:
                print(f"{size:6} {error}", file=sys.stderr)
                continue
            exact[size] = result.config
            print(f"{size:6} tuned alone in {time.monotonic() - begun:.1f} s", flush=True)
    with Bench() as bench:
        for size, config in exact.items():
            problem = whole.at(size)
            assert problem is not None
            answer = answer_of(table, problem, device)
            assert answer.config is not None
            pair = [checker.candidate("range", problem, answer.config, answer.known_key)]
            pair += [checker.candidate("exact", problem, config)] if config != answer.config else []
            times = checker.time(bench, pair)
            own = times["range"]
            best_us = times.get("exact", own).time_us
            rows[size] = replace(
                rows[size], time_us=own.time_us, ratio=own.ratio, exact_us=best_us, exact=str(config),
                clock_mhz=own.clock_mhz,
            )  # fmt: skip
            print(f"{size:6} regret {own.time_us / best_us - 1:+.2%}  {config}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
