"""The space of gates: defaults of all problems, rules with examples, those of gradients and activations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cutegen.arch import ARCHES
from cutegen.families import pointwise
from cutegen.families.activation.family import ACTIVATION, ACTIVATION_BACKWARD
from cutegen.families.declared import DeclaredFamily
from cutegen.families.gated.family import ACTIVATIONS, GATED, GATED_BACKWARD, LAYOUTS
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure.statistics import geometric_mean
from cutegen.search.defaults import default_config

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
HOPPER = find_space("gated", ARCHES["sm_90a"])
BACKWARD = find_space("gated_backward", ARCHES["sm_90a"])


def rows(m: int, n: int, **options: Any) -> Problem:
    return GATED.problem({"m": m, "n": n}, options)


EVERY = (ACTIVATION, ACTIVATION_BACKWARD, GATED, GATED_BACKWARD)
LARGE = rows(8192, 14336)
#: A problem, knobs that differ from its default config, and the one rule that they break.
REJECTED: tuple[tuple[Problem, dict[str, Any], str], ...] = (
    (
        GATED_BACKWARD.problem({"m": 8192, "n": 14336}, {}),
        {"access_bytes": 16, "threads": 512, "vectors_per_thread": 8},
        "loads_fit_registers",
    ),
    (rows(16, 4096), {"vectors_per_thread": 2}, "threads_have_work"),
    (rows(2**21, 2**12), {"access_bytes": 8}, "narrow_accesses_are_numbered_with_31_bits"),
    (rows(64, 4097), {"access_bytes": 8}, "accesses_of_single_elements_have_no_width"),
    (LARGE, {"threads": 512, "ctas_per_sm": 8, "vectors_per_thread": 1}, "persistent_ctas_fit"),
    (
        rows(256, 4096),
        {"threads": 128, "vectors_per_thread": 2, "ctas_per_sm": 8},
        "persistent_ctas_have_several_tiles",
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_problem_has_a_default(activation: str, layout: str) -> None:
    for family, space in ((GATED, HOPPER), (GATED_BACKWARD, BACKWARD)):
        for m in (1, 7, 64, 1000, 100_000):
            for n in (1, 8, 17, 2880, 14336, 53248):
                for dtype in ("bf16", "fp16", "fp32"):
                    options: dict[str, Any] = {"dtype": dtype, "activation": activation, "layout": layout}
                    problem = family.problem({"m": m, "n": n}, options)
                    assert not space.explain(problem, space.default(problem)), problem


@pytest.mark.parametrize("activation", pointwise.ACTIVATIONS)
def test_every_activation_has_a_default(activation: str) -> None:
    for family in (ACTIVATION, ACTIVATION_BACKWARD):
        space = find_space(family.name, HOPPER.arch)
        for m, n, dtype in ((1, 1, "fp32"), (7, 17, "bf16"), (1000, 2880, "fp16"), (100_000, 53248, "bf16")):
            problem = family.problem({"m": m, "n": n}, {"dtype": dtype, "activation": activation})
            assert not space.explain(problem, space.default(problem)), problem


@pytest.mark.parametrize(("problem", "changes", "rule"), REJECTED, ids=lambda value: str(value)[:40])
def test_a_rule_alone_rejects_its_example(problem: Problem, changes: dict[str, Any], rule: str) -> None:
    space = find_space(problem.family, HOPPER.arch)
    config = space.default(problem).replace(**changes)
    assert {violation.rule for violation in space.explain(problem, config)} == {rule}


def test_more_accesses_than_32_bits_count_are_refused() -> None:
    broken = {violation.rule for violation in HOPPER.explain(rows(2**30, 64), {})}
    assert broken == {"accesses_are_numbered_with_31_bits"}


def test_so_many_accesses_that_narrow_ones_are_too_many_are_wide_by_default() -> None:
    problem = GATED_BACKWARD.problem({"m": 2**21, "n": 2**12}, {})
    default = BACKWARD.default(problem)
    assert default["access_bytes"] == 16 and not BACKWARD.explain(problem, default)


def test_every_rule_has_an_example() -> None:
    assert {rule for _, _, rule in REJECTED} == {rule.name for rule in HOPPER.rules[1:]}


def test_single_elements_are_numbered_with_64_bits() -> None:
    problem = rows(2**22, 1001)
    assert problem.signature.unaligned and not HOPPER.explain(problem, HOPPER.default(problem))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("m", "n", "knobs"),
    [
        (2617, 551, {"vectors_per_thread": 4, "ctas_per_sm": 0}),
        (11780, 551, {"vectors_per_thread": 4, "ctas_per_sm": 8}),
        (30000, 551, {"vectors_per_thread": 4, "ctas_per_sm": 0}),
        (11000, 1023, {"vectors_per_thread": 4, "ctas_per_sm": 0}),
        (9000, 1175, {"vectors_per_thread": 8, "ctas_per_sm": 0}),
        (60000, 1175, {"vectors_per_thread": 8, "ctas_per_sm": 0}),
    ],
)
def test_rows_that_are_not_aligned_fill_their_tiles(m: int, n: int, knobs: dict[str, Any]) -> None:
    """Persistent where much of a tile has no elements; tiles of whole rows."""
    default = HOPPER.default(rows(m, n))
    assert {knob: default[knob] for knob in knobs} == knobs and not HOPPER.explain(rows(m, n), default)


@pytest.mark.parametrize("name", ARCHES)
@pytest.mark.parametrize("family", EVERY, ids=lambda f: f.name)
def test_every_target_has_the_same_space(family: DeclaredFamily, name: str) -> None:
    space = find_space(family.name, ARCHES[name])
    assert (space.domains, [rule.name for rule in space.rules]) == (
        HOPPER.domains,
        [rule.name for rule in HOPPER.rules],
    )
    problem = family.problem({"m": 8192, "n": 14336}, {})
    assert 1 <= len(list(space.configs(problem))) <= 200


#: Sizes whose default is known to be more than 12 % behind; untuned.md and earlier_runs.md say why.
BEHIND = {f"rope {size} bf16" for size in ("113x20x4x64x16x1", "455x5x1x64x16x1", "310x16x2x128x64x1")}
BEHIND |= {"rope 2721x8x1x80x20x1 bf16"}


#: Files of gates whose kernels have accesses of today's width; of older ones only single elements count.
TODAY = ("_1901",)
#: Files whose kernels begin with the last rows, and bytes that L2 holds of older ones.
LAST_ROWS_FIRST, IN_L2 = ("_1619_h100", "_1709", "_1801", *TODAY), 40_000_000


def _kernel(config: str) -> str:
    """Return what a config says of its kernel apart from overlap, without a knob that there is no more: its
    kernels took as long (190 pairs in untuned_gates_1709.json). Single elements have one width."""
    return re.sub(r"^access_bytes=16 | (streamed|pdl)=\w+", "", config)


@pytest.mark.parametrize("family", ["gated", "gated_backward", "activation", "activation_backward", "rope"])
def test_defaults_are_near_the_best_that_was_timed_on_sizes_drawn_at_random(family: str) -> None:
    """On an H200 and an H100, wherever it was among what was timed.

    Gates count only with today's kernels: older ones had fewer widths, and began with the first rows.
    """
    space, ratios = find_space(family, ARCHES["sm_90a"]), {}
    for path in (*RESULTS.glob("untuned_gates*.json"), *RESULTS.glob("untuned_activation.json")):
        old = family != "rope" and not path.stem.endswith(LAST_ROWS_FIRST)
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            problem: Any = parse_problem(row["problem"])
            if problem.family != family or (old and problem.min_bytes > IN_L2):
                continue
            if family != "rope" and not path.stem.endswith(TODAY) and not problem.signature.unaligned:
                continue
            default = _kernel(str(default_config(space, problem, 132)))
            us = [us for config, us in row["times"].items() if _kernel(config) == default]
            if us:
                ratios[path.name, row["problem"]] = min(row["times"].values()) / min(us)
    assert len(ratios) >= 40 and geometric_mean(ratios.values()) > 0.98
    behind = {problem for (_, problem), ratio in ratios.items() if ratio <= 0.88}
    assert behind == {problem for problem in BEHIND if problem.startswith(f"{family} ")}
