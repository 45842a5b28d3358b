"""Ranks the kernels of some problems in a process of its own: what :func:`~.parallel_rank.rank_all` starts.

The only argument is a JSON object; standard input has a problem on each line. What it prints last is one JSON
document: promising configs by problem.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cutegen.arch import Calibration, find_arch, with_calibration
from cutegen.families.registry import find_space, load_families, parse_problem
from cutegen.search.parallel_rank import rank_algorithms
from cutegen.space import Config

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Rank and print."""
    asked = json.loads(arguments[0])
    for folder in asked["families"]:
        load_families(Path(folder))
    arch, found = find_arch(asked["arch"]), {}
    if asked["calibration"]:
        arch = with_calibration(arch, Calibration(*asked["calibration"]))
    fixed = {
        knob: tuple(Config.from_json({knob: v})[knob] for v in values)
        for knob, values in asked["fixed"].items()
    }
    for line in sys.stdin.read().splitlines():
        problem = parse_problem(line)
        space = find_space(problem.family, arch)
        configs = rank_algorithms(space, problem, asked["sm_count"], asked["limit"], fixed or None)
        found[line] = [config.to_json() for config in configs]
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0
