"""Kernels over rows on a real GPU: configs from all over a space, broken kernels, and the check of both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from hopper import GPU

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.candidate import CheckResult
from cutegen.space import Config, Value

__all__ = ["ARCH", "Broken", "Mutant", "cases", "check", "compiled", "mutants", "require_rejected"]

ARCH = find_arch("sm_90a")


class Broken(NamedTuple):
    """A text of a kernel, what takes its place, and what the check must say."""

    old: str
    new: str
    says: str


class Mutant(NamedTuple):
    """A broken kernel, and what the check must say of it."""

    source: Source
    problem: Problem
    config: Config
    says: str


def varied(problem: Problem, number: int) -> list[Config]:
    """The default config, and about so many from all over the space."""
    space = find_space(problem.family, ARCH)
    configs = list(space.configs(problem))
    every = max(1, len(configs) // number)
    # The last knob has three values: a multiple of three would always meet the same one.
    every += every % 3 == 0
    return list(dict.fromkeys([space.default(problem), *islice(configs, every // 2, None, every)]))


def cases(family: str, lines: Iterable[str], number: int) -> list[tuple[Problem, Config]]:
    """Problems with configs; none without a GPU."""
    problems = [parse_problem(f"{family} {line}") for line in lines] if GPU is not None else []
    return [(problem, config) for problem in problems for config in varied(problem, number)]


def mutants(
    line: str, knobs: Mapping[str, Value], broken: Mapping[str, Broken]
) -> Iterator[tuple[str, Mutant]]:
    """Yield the broken kernels of one config by what is wrong with them."""
    problem = parse_problem(line)
    config = find_space(problem.family, ARCH).default(problem).replace(**knobs)
    sound = render(problem, config, ARCH)
    for name, (old, new, says) in broken.items():
        assert sound.text.count(old) == 1, f"{name}: the kernel's text has changed"
        source = replace(sound, text=sound.text.replace(old, new))
        yield f"{name} ({config['row_in']})", Mutant(source, problem, config, says)


def compiled(
    store: Store, found: Iterable[tuple[Problem, Config]], broken: Iterable[Mutant]
) -> dict[Source, object]:
    """Compile all of them."""
    sources = {render(problem, config, ARCH) for problem, config in found}
    with Builder(store) as builder:
        return dict(builder.build(sources | {mutant.source for mutant in broken}))


def check(bench: Bench, result: object, problem: Problem, config: Config, seed: int = 0) -> CheckResult:
    """Run a compiled kernel on its problem and a few rows of it."""
    assert GPU is not None
    assert isinstance(result, Artifact), result
    bench.open(problem, seed)
    space = find_space(problem.family, ARCH)
    library, symbol = result.shared_object, result.symbol
    return bench.check(Candidate.of("kernel", library, symbol, space, config, problem, GPU.sm_count))


def require_rejected(bench: Bench, result: object, mutant: Mutant, seed: int) -> None:
    """The check must name the output and where. Each mutant has other operands: what an earlier kernel left
    in shared memory must not pass for what this one did not fetch."""
    found = check(bench, result, mutant.problem, mutant.config, seed)
    assert not found.ok
    assert re.search(mutant.says, found.error), found.error
