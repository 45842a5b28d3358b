"""Which few configs of a family are enough for some shapes, by times that were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegen.arch import Arch
from cutegen.digest import Json
from cutegen.errors import ConfigError, StoreError, UsageError
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.measure.statistics import TIE_BAND, geometric_mean
from cutegen.search.short_list import DEFAULT, FORMAT
from cutegen.search.twins import overlapping_like
from cutegen.space import Config
from cutegen.system.documents import read_json
from cutegen.system.publish import publish

__all__ = ["Covered", "Shrunk", "Times", "read_results", "relative", "shrink", "write_list"]

#: The default of a problem, and for each config that was timed beside it its time over the default's.
Times = tuple[Config, Mapping[Config, float]]
#: A config joins the list if the geometric mean of all times falls by more than this. Source: judgement.
_WORTH = 0.0005


@dataclass(frozen=True)
class Covered:
    """How well the list covers one shape.

    Attributes:
        problem: The shape.
        choice: The config of the list that answers it; None for its default.
        best: The fastest config of all that were timed.
        regret: By how much ``choice`` takes longer than ``best``, as a fraction.
        default_regret: The same for the default.
        timed: How many configs were timed.
    """

    problem: Problem
    choice: Config | None
    best: Config
    regret: float
    default_regret: float
    timed: int


@dataclass(frozen=True)
class Shrunk:
    """A short list and how well it covers each shape.

    Attributes:
        configs: The list without the default, the most useful first.
        shapes: The coverage of each shape.
    """

    configs: tuple[Config, ...]
    shapes: tuple[Covered, ...]

    @property
    def mean(self) -> tuple[float, float]:
        """How much longer than the best the list takes, in the geometric mean, and the default."""
        list_regret = geometric_mean([1 + each.regret for each in self.shapes]) - 1
        return list_regret, geometric_mean([1 + each.default_regret for each in self.shapes]) - 1

    @property
    def worst(self) -> tuple[float, float]:
        """The largest regret of the list, and of the default."""
        return max(e.regret for e in self.shapes), max(e.default_regret for e in self.shapes)


def shrink(times: Mapping[Problem, Times], most: int) -> Shrunk:
    """Return the list of at most ``most`` configs, the default counted, that covers ``times`` best.

    Configs join one after another: each time the one that takes most off the geometric mean of all shapes'
    times. Less than half a percent off a shape's time counts for nothing.
    """
    chosen: list[Config] = []
    now = dict.fromkeys(times, 1.0)
    candidates = dict.fromkeys(config for _, timed in times.values() for config in timed)
    while len(chosen) < most - 1:
        gains = {
            config: sum(_gain(now[problem], timed.get(config)) for problem, (_, timed) in times.items())
            for config in candidates
            if config not in chosen
        }
        best = max(gains, key=lambda config: gains[config], default=None)
        if best is None or gains[best] <= _WORTH * len(times):
            break
        chosen.append(best)
        for problem, (_, timed) in times.items():
            now[problem] *= math.exp(-_gain(now[problem], timed.get(best)))
    return Shrunk(tuple(chosen), tuple(_covered(p, *found, chosen) for p, found in times.items()))


def _gain(now: float, then: float | None) -> float:
    return math.log(now / then) if then is not None and then < now * (1 - TIE_BAND) else 0.0


def _covered(
    problem: Problem, default: Config, timed: Mapping[Config, float], chosen: Sequence[Config]
) -> Covered:
    known = {**timed, default: 1.0}
    best = min(known, key=lambda config: known[config])
    listed = min((c for c in chosen if c in known), key=lambda config: known[config], default=default)
    choice = listed if _gain(1.0, known[listed]) else None
    regret = known[listed if choice else default] / known[best] - 1
    return Covered(problem, choice, best, regret, 1.0 / known[best] - 1, len(known))


def read_results(path: Path) -> tuple[dict[str, Mapping[str, float]], dict[str, Json]]:
    """Return what a results file of tools/bench_family.py tried, and where it was measured.

    Returns:
        Microseconds by the line of a problem and the text of a config; GPU, commit and date of the file.

    Raises:
        UsageError: The file cannot be read, or is no such file.
    """
    document: Any = read_json(path, "results file", malformed=UsageError, unreadable=UsageError)
    try:
        found: dict[str, Mapping[str, float]] = {
            row["problem"]: dict(row.get("tried") or {}) for row in document["rows"]
        }
        made: dict[str, Json] = {
            "results": path.name,
            "gpu": document["gpu"],
            "commit": document["commit"],
            "date": document["measured_at"],
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"results file {path} is none of tools/bench_family.py: {type(error).__name__}: {error}"
        ) from error
    return found, made


def relative(
    problem: Problem, times: Mapping[str, float], default: Config, arch: Arch
) -> Mapping[Config, float]:
    """Return times over the default's; empty if the default was not timed. Configs that are invalid today,
    and times that are none, are left out.

    How launches overlap is up to what runs before and after: of kernels that differ in that alone, the list
    has the one that does as the default. Its time is over that of a default that overlapped as it did, in the
    geometric mean where there are several.
    """
    space = find_space(problem.family, arch)
    found: dict[Config, dict[Config, float]] = {}
    for text, us in times.items():
        try:
            timed = Config.parse(text)
            config = overlapping_like(timed, default)
            space.require(problem, config)
        except ConfigError:
            continue
        if isinstance(us, (int, float)) and us > 0:
            found.setdefault(config, {})[overlapping_like(default, timed)] = float(us)
    base = found.get(default, {})
    ratios = {
        config: [us / base[overlap] for overlap, us in each.items() if overlap in base]
        for config, each in found.items()
    }
    return {config: geometric_mean(each) for config, each in ratios.items() if each}


def write_list(path: Path, arch: Arch, family: str, found: Shrunk, made_of: Mapping[str, Json]) -> None:
    """Put the list of ``arch`` into the file ``path``, beside those of other architectures.

    Raises:
        UsageError: The file holds something else.
        StoreError: It cannot be read or written.
    """
    document: Any = {"format": FORMAT, "family": family, "lists": {}}
    if path.exists():
        document = read_json(path, "short list", malformed=UsageError, unreadable=StoreError)
        kind = document if isinstance(document, dict) else {}
        if [kind.get("format"), kind.get("family")] != [FORMAT, family] or type(
            kind.get("lists")
        ) is not dict:
            raise UsageError(f"{path} is no short list of {family}; name another file with --out")
    knobs = find_space(family, arch).domains
    numbers: dict[Config | None, int] = {config: at for at, config in enumerate((None, *found.configs))}
    shapes: list[Json] = [
        {
            "problem": str(each.problem),
            "choice": numbers[each.choice],
            "regret": round(each.regret, 4),
            "default_regret": round(each.default_regret, 4),
            "timed": each.timed,
        }
        for each in found.shapes
    ]
    configs: list[Json] = [
        DEFAULT,
        *(str(Config({knob: config[knob] for knob in knobs})) for config in found.configs),
    ]
    document["lists"][arch.name] = {"configs": configs, "shapes": shapes, "made_of": dict(made_of)}
    publish(path, (json.dumps(document, indent=1) + "\n").encode(), "short list")
