"""Replay a recorded sweep without a GPU: how good are search, model and default set on what was measured?

All are judged by regret, which is how far their answer is behind the best timed config of a shape:

- the search, after so many trials and seconds: candidates in the order of the model, re-ordered by what the
  trials so far teach about its errors, as a tuning does, beside the model's order alone and chance;
- the model: its first choice, and the best of its first three and eight;
- the default set: a perfect choice among the default kernels, and among as many that were chosen one by one;
- a range: the contenders at each second m of a matrix, and what answers the others.

    python tools/replay.py                                  # docs/results/gemm_sweep_h200.json.xz
    python tools/replay.py --calibration h200.json          # the model of a calibration
    python tools/replay.py --left-out --json out.json --svg plots/

The package's fit has seen this sweep; --left-out fits anew, leaving out each (n, k) once, in a minute.

exit codes: 0 replayed; 2 bad usage; 3 a file cannot be read
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.cli.args import Parser, file_path, positive_float, positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.families.gemm.perf_model.boosting import Boosting
from cutegen.families.gemm.perf_model.fitted import Fit, load_fit, read_fit
from cutegen.families.gemm.perf_model.judging import choices, folds, nearness, regret, regrets
from cutegen.families.gemm.perf_model.residuals import Lessons
from cutegen.families.gemm.perf_model.roofline import KernelColumns
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config
from tools.benchmark.line_plot import line_plot
from tools.benchmark.range_replay import Matrix, Recorded, range_regret
from tools.fit_gemm import DEPTH, SETTINGS, SWEEP, Points, load

#: Trials after which a search is looked at.
TRIALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: Trials between which the search looks at what it learned.
_BATCH = 8
#: Rows by which shapes are grouped: up to each of these.
_ROWS = (8, 32, 64, 128, 256, 512, 1024, 2048, 8192)

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What a trial costs, for regret against seconds.

    Attributes:
        start_s: Before the first trial: processes, imports, operands.
        build_s: Of one kernel on one core.
        trial_s: To check and time one config.
        workers: Kernels that are compiled at a time.
    """

    start_s: float
    build_s: float
    trial_s: float
    workers: int

    def seconds(self, trials: int) -> float:
        """Return the seconds of so many trials, each of another kernel; compiling overlaps with trials."""
        waves = -(-trials // self.workers)
        return self.start_s + max(waves * self.build_s, self.build_s + trials * self.trial_s)


@dataclass(frozen=True)
class Sweep:
    """What is replayed: shapes on which many kernels were timed.

    Attributes:
        points: Timed configs.
        configs: Of each point.
        predicted: Microseconds of each point by the model.
    """

    points: Points
    configs: Sequence[Config]
    predicted: Doubles

    def shapes(self) -> Iterator[tuple[tuple[int, int, int], NDArray[np.intp]]]:
        """Yield the sizes of each shape and its points, in the order of the model."""
        for places in choices(self.points.shape, self.predicted):
            yield self.points.sizes[self.points.shape[places[0]]], places


def read(path: Path, every: int) -> tuple[dict[str, Any], Points, list[Config]]:
    """Return a sweep's file, and its points of every so-manieth shape with their configs."""
    found, points = load(path)
    chosen = ~points.judge & (points.shape % every == 0)
    views, splits = [Config.parse(text) for text in found["kernels"]], found["points"]["split_k"]
    at = np.flatnonzero(chosen)
    configs = [views[points.kernel[i]].replace(split_k=splits[i]) for i in at]
    return found, points.only(chosen), configs


def by_fit(fit: Fit, points: Points, configs: Sequence[Config], sm_count: int) -> Doubles:
    """Return what a fit predicts of each point."""
    predicted = np.empty(len(points.us))
    for places in choices(points.shape, points.us):
        here = [configs[i] for i in places]
        columns = KernelColumns(here, sm_count, fit.rates)
        splits = np.array([config["split_k"] for config in here], np.float32)
        problem = Problem(*points.sizes[points.shape[places[0]]])
        predicted[places] = fit.times_us(problem, columns, splits)
    return predicted


def left_out(points: Points) -> Doubles:
    """Return predictions of trees that have not seen the (n, k) of a point."""
    boosting = Boosting(int(SETTINGS["iterations"]), DEPTH, SETTINGS["learning_rate"])
    fold, logs = folds(points.weights), np.log(points.roofline_us)
    wanted, weight = np.log(points.us) - logs, nearness(points.behind_best)
    for number in range(fold.max() + 1):
        there = fold == number
        trees = boosting.fit(points.features[~there], wanted[~there], weight[~there])
        rows = np.ascontiguousarray(points.features[there].T, np.float32)
        logs[there] += trees.sums(rows) + trees.base
    return np.asarray(np.exp(logs))


# --- the search ---


def searched(configs: Sequence[Config], predicted: Sequence[float], us: Sequence[float]) -> list[int]:
    """Return the order in which a tuning tries configs that the model has ordered: it learns from trials."""
    space = find_space("gemm", find_arch("sm_90a"))
    order, rest = list(range(min(_BATCH, len(configs)))), list(range(min(_BATCH, len(configs)), len(configs)))
    while rest:
        lessons = Lessons(space, [(configs[i], log(us[i] / predicted[i])) for i in order])
        rest.sort(key=lambda i: lessons.corrected(configs[i], predicted[i]))
        order += rest[:_BATCH]
        del rest[:_BATCH]
    return order


def search_regret(sweep: Sweep) -> dict[str, list[float]]:
    """Return the geometric mean of the regret after each of :data:`TRIALS`, by how configs were ordered."""
    logs: dict[str, list[list[float]]] = {"search": [], "model": [], "chance": []}
    for mnk, places in sweep.shapes():
        us = sweep.points.us[places].tolist()
        here = [sweep.configs[i] for i in places]
        shuffled = list(range(len(us)))
        Random(str(mnk)).shuffle(shuffled)
        learned = searched(here, sweep.predicted[places].tolist(), us)
        for name, order in (("search", learned), ("model", list(range(len(us)))), ("chance", shuffled)):
            so_far = np.minimum.accumulate([us[i] for i in order]) / min(us)
            logs[name].append([log(so_far[min(count, len(us)) - 1]) for count in TRIALS])
    return {name: (np.exp(np.mean(rows, 0)) - 1).tolist() for name, rows in logs.items()}


# --- the model, and the default set ---


def model_regret(sweep: Sweep, among: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the regret of the model's choice among some points: over all, by (n, k) and by rows."""
    points = sweep.points
    shape, us, predicted = points.shape[among], points.us[among], sweep.predicted[among]
    found = regrets(shape, us, predicted)
    sizes = [points.sizes[number] for number in np.unique(shape)]

    def grouped(name: Callable[[tuple[int, int, int]], str]) -> dict[str, Any]:
        groups: dict[str, list[int]] = {}
        for at, mnk in enumerate(sizes):
            groups.setdefault(name(mnk), []).append(at)
        return {key: {"shapes": len(rows), **regret(found[rows])} for key, rows in groups.items()}

    def rows_of(mnk: tuple[int, int, int]) -> str:
        return f"m to {next(most for most in _ROWS if mnk[0] <= most)}"

    order = {f"m to {most}": at for at, most in enumerate(_ROWS)}
    by_rows = grouped(rows_of)
    return {
        "shapes": len(sizes),
        **regret(found),
        "by_matrix": grouped(lambda mnk: f"{mnk[1]}x{mnk[2]}"),
        "by_rows": {key: by_rows[key] for key in sorted(by_rows, key=order.__getitem__)},
    }


def set_regret(points: Points, counts: Sequence[int]) -> dict[str, Any]:
    """Return how far a perfect choice within sets of kernels is behind the best of all.

    The default kernels; and of as many and fewer, those that were taken one by one, each time the one that
    helps most. A kernel that was not timed on a shape does not help there.
    """
    numbers, shape = np.unique(points.shape, return_inverse=True)
    times = np.full((int(points.kernel.max()) + 1, len(numbers)), np.inf)
    np.minimum.at(times, (points.kernel, shape), points.us)
    logs = np.log(times / times.min(0))
    defaults = np.unique(points.kernel[points.default])
    capped = np.minimum(logs, 1.0)
    taken, least, found = np.zeros(len(logs), bool), np.full(len(numbers), 1.0), {}
    for count in range(1, max(counts) + 1):
        gains = np.minimum(capped, least).mean(1)
        gains[taken] = np.inf
        best = int(gains.argmin())
        taken[best], least = True, np.minimum(least, capped[best])
        if count in counts:
            found[str(count)] = round(float(np.exp(least.mean()) - 1), 4)
    own = np.minimum(logs[defaults].min(0), 1.0)
    return {
        "defaults": {"kernels": len(defaults), "regret": round(float(np.exp(own.mean()) - 1), 4)},
        "greedy": found,
    }


# --- ranges ---


def matrices(sweep: Sweep) -> list[Matrix]:
    """Return what was timed of each (n, k), by m."""
    found: dict[tuple[int, int], dict[int, list[Recorded]]] = {}
    points = sweep.points
    for (m, n, k), places in sweep.shapes():
        found.setdefault((n, k), {})[m] = [
            Recorded(sweep.configs[i], points.us[i], sweep.predicted[i], bool(points.default[i]))
            for i in places
        ]
    return list(found.values())


# --- the command ---


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = Parser(
        prog="python tools/replay.py", description=(__doc__ or "").splitlines()[0],
        epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--sweep", type=file_path, default=SWEEP, metavar="FILE", help="file of a sweep")
    parser.add_argument("--calibration", type=file_path, metavar="FILE", help="whose model is judged")
    parser.add_argument("--left-out", action="store_true", help="judge a model that has not seen the (n, k)")
    parser.add_argument("--every", type=positive_int, default=1, metavar="N", help="of N shapes replay one")
    parser.add_argument("--start-s", type=positive_float, default=3.0, help="before the first trial (3)")
    parser.add_argument("--build-s", type=positive_float, default=0.9, help="to compile a kernel (0.9)")
    parser.add_argument("--trial-s", type=positive_float, default=0.05, help="to check and time one (0.05)")
    parser.add_argument("--workers", type=positive_int, default=16, help="kernels compiled at a time (16)")
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write all numbers")
    parser.add_argument("--svg", type=file_path, metavar="DIR", help="write plots")
    args = parser.parse_args(argv)
    if args.left_out and args.calibration is not None:
        parser.error("--left-out fits a model, --calibration names one; give one of them")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Replay, print and write."""
    if args.svg is not None:
        args.svg.mkdir(parents=True, exist_ok=True)  # before the minute that follows
    fit = read_fit(args.calibration) if args.calibration is not None else load_fit()
    found, points, configs = read(args.sweep, args.every)
    predicted = left_out(points) if args.left_out else by_fit(fit, points, configs, found["sm_count"])
    sweep = Sweep(points, configs, predicted)
    costs = Costs(args.start_s, args.build_s, args.trial_s, args.workers)
    results: dict[str, Any] = {
        "sweep": args.sweep.name,
        "gpu": found["gpu"],
        "model": "left out" if args.left_out else str(args.calibration or "shipped"),
        "trials": list(TRIALS),
        "seconds": [round(costs.seconds(count), 2) for count in TRIALS],
        "search": search_regret(sweep),
        "model_among_defaults": model_regret(sweep, points.default),
        "model_among_all": model_regret(sweep, np.ones(len(points.us), bool)),
        "sets": set_regret(points, (4, 8, 16, 32, 70)),
        "range": range_regret(matrices(sweep)),
    }
    print(summary(results))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.svg is not None:
        write_plots(results, args.svg)
    return EXIT_OK


def write_plots(results: Mapping[str, Any], folder: Path) -> None:
    """Write the regret of the search against trials and against seconds."""
    for name in ("trials", "seconds"):
        lines = {
            who: list(zip(results[name], [100 * value for value in curve], strict=True))
            for who, curve in results["search"].items()
        }
        text = line_plot(lines, x_label=name, y_label="% behind the best timed", title="Search, replayed")
        (folder / f"replay_{name}.svg").write_text(text, encoding="utf-8")


def summary(results: Mapping[str, Any]) -> str:
    """Return the results as text."""
    rows = [f"{results['sweep']} of {results['gpu']}, model: {results['model']}; % behind the best timed", ""]
    rows.append("trials   " + "".join(f"{count:>7}" for count in results["trials"]))
    rows.append("seconds  " + "".join(f"{value:>7.1f}" for value in results["seconds"]))
    for who, curve in results["search"].items():
        rows.append(f"{who:<9}" + "".join(f"{100 * value:>7.2f}" for value in curve))
    for among in ("defaults", "all"):
        judged = results[f"model_among_{among}"]
        rows += ["", f"model's choice among {among}, {judged['shapes']} shapes: {_shown(judged)}"]
        rows += [f"  {name:<12} {_shown(group)}" for name, group in judged["by_rows"].items()]
        matrices = sorted(judged["by_matrix"].items(), key=lambda item: -item[1]["first"])
        rows += [f"  {name:<12} {_shown(group)}" for name, group in matrices[:5]]
    own, greedy = results["sets"]["defaults"], results["sets"]["greedy"]
    rows += ["", f"perfect choice among the {own['kernels']} default kernels: {100 * own['regret']:.2f}"]
    rows.append("one by one: " + ", ".join(f"{n} kernels {100 * value:.2f}" for n, value in greedy.items()))
    for count, judged in results["range"].items():
        rows += [f"a range, {count} contenders: {_named(judged)}"]
    return "\n".join(rows)


def _named(judged: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ', ')} {100 * value:.2f}" for name, value in judged.items())


def _shown(judged: Mapping[str, float]) -> str:
    names = {"first": "first", "best_of_3": "of 3", "best_of_8": "of 8", "first_tenth": "a tenth above"}
    return ", ".join(f"{text} {100 * judged[name]:.2f}" for name, text in names.items())


if __name__ == "__main__":
    sys.exit(main())
