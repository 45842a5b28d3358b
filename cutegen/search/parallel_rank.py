"""Promising configs for many problems: ranking one takes a second of a core, so processes share them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from cutegen.arch import Arch
from cutegen.build.parallelism import default_workers
from cutegen.digest import Json
from cutegen.families.registry import find_space, loaded_folders, parse_problem, spaces_beside
from cutegen.family import Problem
from cutegen.search.strategies import likely, rank
from cutegen.space import Config, Space, Value
from cutegen.system.interpreter import python_command, python_environment

__all__ = ["rank_algorithms", "rank_all"]

#: Each further algorithm of a family proposes this fraction of what the general one does.
_FURTHER_SHARE = 4
#: So many candidates of each algorithm come first.
_LEAD = 2

#: Fewer problems than this are not worth a process, which takes a third of a second to start.
_WORTH_A_CHILD = 2
#: Seconds that a child gets; ranking takes one or two for each problem.
_LIMIT_S = 300.0


def rank_algorithms(
    space: Space,
    problem: Problem,
    sm_count: int,
    limit: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
) -> list[Config]:
    """Return the most promising kernels of a problem, and fewer of each further algorithm.

    The best of each algorithm come before the further ones of any. Of the general one they are those that are
    known at once, where there are any; else the whole space is ranked.

    Args:
        space: That of the family's general algorithm.
        problem: What is to be computed.
        sm_count: SMs of the GPU.
        limit: Most kernels of the general algorithm.
        fixed: Knobs restricted to some values; an algorithm that lacks one of them proposes nothing.

    Raises:
        ConfigError: ``fixed`` names a knob or a value that does not exist.
    """
    known = likely(space, problem, sm_count, limit, fixed, everywhere=True)
    found = [known or rank(space, problem, sm_count, limit, fixed)]
    for other in spaces_beside(space):
        has = all(set(values) <= set(other.domains.get(knob, ())) for knob, values in (fixed or {}).items())
        if has and not other.explain(problem, {}):
            found.append(rank(other, problem, sm_count, max(1, limit // _FURTHER_SHARE), fixed))
    lead = [config for configs in found for config in configs[:_LEAD]]
    return list(dict.fromkeys([*lead, *(config for configs in found for config in configs)]))


def rank_all(
    problems: Sequence[Problem],
    arch: Arch,
    sm_count: int,
    limit: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    *,
    workers: int | None = None,
) -> dict[Problem, list[Config]]:
    """Return what :func:`rank_algorithms` answers to each of ``problems``.

    Args:
        problems: What is to be computed.
        arch: The target.
        sm_count: SMs of the GPU.
        limit: Most kernels of each.
        fixed: Knobs restricted to some values.
        workers: Most processes at a time; by default as many as compile.

    Raises:
        ConfigError: ``fixed`` names a knob or a value that does not exist.
        ProblemError: No config computes a problem.
    """
    count = min(workers or default_workers(), -(-len(problems) // _WORTH_A_CHILD))
    asked: dict[str, Json] = {
        "arch": arch.name,
        "calibration": None if arch.calibration is None else list(arch.calibration),
        "sm_count": sm_count,
        "limit": limit,
        "fixed": {
            k: [list(v) if isinstance(v, tuple) else v for v in values] for k, values in (fixed or {}).items()
        },
        "families": [str(folder) for folder in loaded_folders()],
    }
    shares = [problems[at::count] for at in range(count)] if count > 1 else []
    found: dict[Problem, list[Config]] = {}
    if shares:
        with ThreadPoolExecutor(count, thread_name_prefix="cutegen-rank") as threads:
            for answer in threads.map(lambda share: _ask(share, asked), shares):
                found.update(answer)
    # What a child could not say is worked out here, where an error is seen.
    for problem in problems:
        if problem not in found:
            space = find_space(problem.family, arch)
            found[problem] = rank_algorithms(space, problem, sm_count, limit, fixed)
    return {problem: found[problem] for problem in problems}


def _ask(share: Sequence[Problem], asked: Json) -> dict[Problem, list[Config]]:
    """Return the answers of one child; none if it fails."""
    command = python_command("cutegen.search.rank_child", [json.dumps(asked)])
    lines = "".join(f"{problem}\n" for problem in share)
    try:
        done = subprocess.run(
            command,
            input=lines,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env=python_environment(),
            check=False,
        )
        answers = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return {}
    return {parse_problem(line): [Config.from_json(c) for c in found] for line, found in answers.items()}
