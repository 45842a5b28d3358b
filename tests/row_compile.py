"""Kernels over rows through the real compiler, beside what their space says of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import render
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.space import Config

__all__ = ["REGISTERS", "Compiled", "build", "require_predicted", "ring", "texts_of_targets"]


#: Knobs of a kernel with one row, all of it in registers.
REGISTERS: Mapping[str, Any] = {"rows_per_cta": 1, "row_in": "registers", "turn": 1}


def ring(threads_per_row: int, rows_per_cta: int, cluster_n: int, **knobs: Any) -> Mapping[str, Any]:
    """Return the knobs of a kernel whose rows come through a ring."""
    shape = {"threads_per_row": threads_per_row, "rows_per_cta": rows_per_cta, "cluster_n": cluster_n}
    return {"rows_per_thread": 1, "row_in": "ring", "turn": 1, "pdl": "early", **shape, **knobs}


def texts_of_targets(problem: Problem) -> set[str]:
    """Return the texts of the default kernel for all targets, without names and what follows from L2."""
    config = find_space(problem.family, find_arch("sm_90a")).default(problem)
    texts = {name: render(problem, config, find_arch(name)).text for name in ("sm_90a", "sm_100a", "sm_103a")}
    assert texts["sm_100a"] != texts["sm_90a"].replace("sm_90a", "sm_100a")  # L2 is larger
    of_l2 = re.compile(r"^(?:ROWS_HELD|PASSING_FROM, PASSING_TO) = [\d, ]+", re.MULTILINE)
    return {of_l2.sub("", text.replace(name, "TARGET")) for name, text in texts.items()}


class Compiled(NamedTuple):
    """A kernel, what it is of, and its text."""

    artifact: Artifact
    problem: Problem
    config: Config
    text: str


def build(
    family: str, kernels: Iterable[tuple[str, str, Mapping[str, Any]]], compiler: Builder
) -> list[Compiled]:
    """Compile kernels: the target, a problem of the family, and knobs that differ from its default config.

    Without a family problems name their own.
    """
    asked = {}
    for target, line, changes in kernels:
        arch, problem = find_arch(target), parse_problem(f"{family} {line}".strip())
        space = find_space(problem.family, arch)
        config = space.default(problem).replace(**changes)
        assert not space.explain(problem, config), f"{problem}: {config}"
        asked[render(problem, config, arch)] = (problem, config)
    done, failed = [], []
    for source, result in compiler.build(asked):
        if isinstance(result, Artifact):
            done.append(Compiled(result, *asked[source], source.text))
        else:
            failed.append(f"{source.arch} {source.config}: {result.message}\n{result.log[-800:]}")
    assert not failed, "\n".join(failed)
    return done


def require_predicted(kernels: Iterable[Compiled]) -> None:
    """Shared memory and threads are what the space derives, and nothing is spilled or remarked on."""
    for artifact, problem, config, _ in kernels:
        arch = find_arch(artifact.arch)
        derived = find_space(problem.family, arch).derive(config, problem, arch)
        resources = artifact.resources
        assert resources.smem_bytes == derived["smem_bytes"], (problem, config)
        assert resources.threads == derived["threads"], (problem, config)
        found = (resources.stack_bytes, resources.spill_store_bytes, resources.notes)
        assert found == (0, 0, ()), (problem, config)
