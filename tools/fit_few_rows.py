"""Fit the model of the kernels for few rows to measured times, and say how well it chooses.

python tools/fit_few_rows.py            # fit and print, with what choices cost at (n, k) that were left out
python tools/fit_few_rows.py --write    # write cutegen/families/gemm/perf_model/few_rows.json
python tools/fit_few_rows.py --check    # exit 1 if that file does not follow from the results files

Measured are 1 to 4 rows, bf16, behind another kernel; fp16, batches, epilogues and launches without
``use_pdl`` are not, and hardly any clusters.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.families.gemm.perf_model.boosting import Boosting
from cutegen.families.gemm.perf_model.few_rows import FILE, Constants, FewRowsEstimator, FewRowsFit
from cutegen.families.gemm.perf_model.judging import folds, matrices, numbered, regret, regrets
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_spaces
from cutegen.space import Config, as_integer
from tools.fit_gemm import lines

_FOLDER = Path(__file__).parent.parent / "docs" / "results"
RESULTS = tuple(_FOLDER / f"untuned_few_rows_{seed}.json.xz" for seed in (1601, 1602, 1609, 1613))
ARCH, SM_COUNT = find_arch("sm_90a"), 132
#: So much longer than the model of the general algorithm says do its kernels take behind another kernel, in
#: microseconds: it is fitted to launches back to back, and the two models compete. Source: 848 times of the
#: same files that are predicted to be less than 6 us, 0.52 in the mean.
BEHIND_US = 0.5
#: Where the search begins: counted instructions, a few tenths of a microsecond each.
_START = Constants(1.0, 0.5, 2.0, 4.0, 4.0, 1.0, 0.1, 0.5)
#: Steps of the search, and of how many times it looks at one: the trees are fitted to all of them.
_STEPS, _EVERY = 800, 6
_FAST = 3
"""Weight of a kernel: its share of the fastest one's speed, to this power; what is slow may be far off."""
#: 200 trees of depth 5 choose as well, within 0.1 %, and take longer to look at.
_TREES = Boosting(trees=220, depth=4, rate=0.1, asked=0.7, sampled=0.8)
#: What the file holds of these, which is not printed.
_OF_TREES = ("asked", "limits", "leaves")

Doubles = NDArray[np.float64]


class Time(NamedTuple):
    """A kernel's time.

    Attributes:
        problem: What it computed.
        config: Its knobs.
        us: Microseconds of a launch behind another kernel.
        weight: In the fit.
        registers: Of one thread.
    """

    problem: Problem
    config: Config
    us: float
    weight: float
    registers: int

    @property
    def wanted_us(self) -> float:
        """What the model should say."""
        return self.us - BEHIND_US


def read_rows() -> list[dict[str, Any]]:
    """Return the records of all problems: ``problem``, and ``times`` by config, of both algorithms."""
    documents = (json.loads(lzma.decompress(path.read_bytes())) for path in RESULTS)
    return [row for document in documents for row in document["rows"]]


def measured() -> list[Time]:
    """Return the times of the kernels for few rows."""
    found, space = [], find_spaces("gemm", ARCH)[1]
    for row in read_rows():
        problem = Problem.parse(row["problem"])
        times = {Config.parse(words): us for words, us in row["times"].items()}
        own = {config: us for config, us in times.items() if config.algorithm == space.algorithm}
        fastest = min(own.values())
        for config, us in own.items():
            registers = as_integer(space.derive(config, problem, ARCH)["registers"])
            found.append(Time(problem, config, us, (fastest / us) ** _FAST, registers))
    return found


def predicted(model: FewRowsFit, times: Iterable[Time]) -> Doubles:
    """Return what a model says of kernels, in microseconds."""
    found: list[float] = []
    for problem, some in groupby(times, attrgetter("problem")):
        estimator = FewRowsEstimator(problem, ARCH, SM_COUNT, model)
        found += estimator.times_us([(time.config, time.registers) for time in some])
    return np.array(found)


def error(found: Doubles, times: Sequence[Time]) -> float:
    """Return the weighted root mean square of the logarithms of predicted over wanted."""
    logs, weight = np.log(found / np.array([t.wanted_us for t in times])), _weights(times)
    return math.sqrt(float((weight * logs**2).sum() / weight.sum()))


def fit_constants(times: Sequence[Time]) -> Constants:
    """Return the constants of least error that a random walk with ever smaller steps comes to."""
    some, rng, best, step = times[::_EVERY], random.Random(0), _START, 0.3
    least = error(predicted(FewRowsFit(best, None), some), some)
    for _ in range(_STEPS):
        changed = {
            name: value * math.exp(rng.gauss(0, step)) if rng.random() < 0.35 else value
            for name, value in asdict(best).items()
        }
        tried = replace(best, **changed)
        found = error(predicted(FewRowsFit(tried, None), some), some)
        if found < least:
            best, least = tried, found
        else:
            step = max(0.01, step * 0.99)
    return replace(best, **{name: float(f"{value:.3g}") for name, value in asdict(best).items()})


def fit(times: Sequence[Time]) -> tuple[FewRowsFit, Doubles]:
    """Return the model, and what models say of each time that have not seen its (n, k)."""
    rough = FewRowsFit(fit_constants(times), None)
    features = np.concatenate([_features(rough, *each) for each in groupby(times, attrgetter("problem"))])
    said, weight = predicted(rough, times), _weights(times)
    wanted = np.log(np.array([t.wanted_us for t in times]) / said)
    fold = folds(matrices(time.problem for time in times))
    left_out = _TREES.left_out(features, wanted, weight, fold)
    return rough._replace(trees=_TREES.fit(features, wanted, weight)), said * np.exp(left_out)


def document() -> dict[str, Any]:
    """Return what the file holds."""
    times = measured()
    model, left_out = fit(times)
    assert model.trees is not None
    shape = numbered(time.problem for time in times)
    behind = regrets(shape, np.array([time.us for time in times]), left_out)
    return {
        "arch": ARCH.name,
        "gpu": "NVIDIA H200",
        "results": [path.name for path in RESULTS],
        "problems": int(shape.max()) + 1,
        "kernels": len(times),
        "left_out": {"error": round(error(left_out, times), 3), "regret": {**regret(behind)}},
        "constants": asdict(model.constants),
        **model.trees.to_json(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    found = document()
    text = lines(found)
    print(json.dumps({name: value for name, value in found.items() if name not in _OF_TREES}, indent=1))
    if args.write:
        FILE.write_text(text, encoding="utf-8")
    return int(args.check and text != FILE.read_text(encoding="utf-8"))


def _features(model: FewRowsFit, problem: Problem, times: Iterable[Time]) -> Doubles:
    """Return what the trees are told of some kernels of one problem, a row for each."""
    estimator = FewRowsEstimator(problem, ARCH, SM_COUNT, model)
    return np.array([estimator.describe(time.config, time.registers) for time in times])


def _weights(times: Sequence[Time]) -> Doubles:
    return np.array([time.weight for time in times])


if __name__ == "__main__":
    sys.exit(main())
