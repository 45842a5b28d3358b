"""Kernels of families on a real GPU: configs from all over a space, broken kernels, and the check of both.

A module lists ``CASES`` and ``MUTANTS`` and takes over the two checks as its tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from hopper import GPU

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.families.registry import find_space, parse_problem, space_of
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.candidate import CheckResult
from cutegen.runtime.dispatch import Dispatcher
from cutegen.space import Config, Value

__all__ = [
    "ARCH",
    "Broken",
    "Mutant",
    "broken_kernel_is_rejected",
    "cases",
    "compile_together",
    "config_is_right",
    "listed_cases",
    "mutants",
]

ARCH = find_arch("sm_90a")
Case = tuple[Problem, Config]


class Broken(NamedTuple):
    """A text of a kernel, what takes its place, and what the check must say."""

    old: str
    new: str
    says: str


class Mutant(NamedTuple):
    """A broken kernel, what the check must say of it, and the seed of its operands."""

    source: Source
    problem: Problem
    config: Config
    says: str
    seed: int


def _varied(problem: Problem, number: int, fixed: Mapping[str, Sequence[Value]] | None) -> list[Config]:
    """About so many configs from all over the space, or what is ``fixed`` of it; else the default, too."""
    space = find_space(problem.family, ARCH)
    configs = list(space.configs(problem, fixed))
    every = max(1, len(configs) // number)
    # A multiple of the values of the last knob would always meet the same one.
    every += every % len(list(space.domains.values())[-1]) == 0
    first = [] if fixed else [space.default(problem)]
    return list(dict.fromkeys([*first, *islice(configs, every // 2, None, every)]))


def cases(
    lines: Iterable[str], number: int, fixed: Mapping[str, Sequence[Value]] | None = None
) -> dict[str, Case]:
    """Problems with configs, by their text; none without a GPU."""
    problems = map(parse_problem, lines) if GPU is not None else ()
    return {f"{p} | {config}": (p, config) for p in problems for config in _varied(p, number, fixed)}


def listed_cases(cases_of: Mapping[str, Iterable[Mapping[str, Value]]]) -> dict[str, Case]:
    """Problems with their default and the kernels that are listed for them; none without a GPU."""
    found: dict[str, Case] = {}
    for line, kernels in cases_of.items() if GPU is not None else ():
        problem = parse_problem(line)
        space = find_space(problem.family, ARCH)
        for config in dict.fromkeys([space.default(problem), *map(Config, kernels)]):
            space.require(problem, config)
            found[f"{problem} | {config}"] = problem, config
    return found


def mutants(*groups: tuple[str, Mapping[str, Value], Mapping[str, Broken]]) -> dict[str, Mutant]:
    """Broken kernels by what is wrong with them: of a problem, with knobs that differ from its default."""
    found: dict[str, Mutant] = {}
    for line, knobs, broken in groups:
        problem = parse_problem(line)
        space = find_space(problem.family, ARCH, algorithm=str(knobs.get("algorithm", "")))
        config = space.default(problem).replace(**knobs)
        sound = render(problem, config, ARCH)
        for name, (old, new, says) in broken.items():
            assert sound.text.count(old) == 1, f"{name}: the kernel's text has changed"
            source = replace(sound, text=sound.text.replace(old, new))
            found[f"{problem}: {name}"] = Mutant(source, problem, config, says, 1 + len(found))
    return found


def _check(bench: Bench, result: object, problem: Problem, config: Config) -> CheckResult:
    assert GPU is not None
    assert isinstance(result, Artifact), result
    space = space_of(config, problem.family, ARCH)
    library, symbol = result.shared_object, result.symbol
    return bench.check(Candidate.of("kernel", library, symbol, space, config, problem, GPU.sm_count))


def config_is_right(case: Case, kernels: dict[Source, object], bench: Bench) -> None:
    """The problem and a few rows of it, awkward ones among them, agree with fp64, apart and in place where
    that is allowed, and again with the same bits."""
    problem, config = case
    if bench.opened != problem:
        bench.open(problem)
    result = _check(bench, kernels[render(problem, config, ARCH)], problem, config)
    assert result.ok, result.error
    assert result.verdict is not None and result.verdict.compared > 0


def broken_kernel_is_rejected(mutant: Mutant, kernels: dict[Source, object], bench: Bench) -> None:
    """The check names the output and where. Each mutant has other operands: what an earlier kernel left in
    shared memory must not pass for what this one did not fetch."""
    bench.open(mutant.problem, mutant.seed)
    result = _check(bench, kernels[mutant.source], mutant.problem, mutant.config)
    assert not result.ok
    assert re.search(mutant.says, result.error), result.error


def compile_together(dispatcher: Dispatcher, problems: Iterable[Problem]) -> None:
    """Compile the kernels that answer problems, side by side, into the store of a dispatcher."""
    answers = [dispatcher.explain(problem) for problem in problems]
    sources = {render(each.problem, each.config, ARCH) for each in answers if each.config is not None}
    with Builder(dispatcher.kernels.store) as builder:
        for _ in builder.build(sources):
            pass
