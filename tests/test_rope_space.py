"""The space of rotary embeddings: a default for every problem, rules with examples, accesses that fit."""

from __future__ import annotations

from typing import Any

import pytest

from cutegen.arch import ARCHES
from cutegen.families.registry import find_space
from cutegen.families.rope.family import ROPE

HOPPER = find_space("rope", ARCHES["sm_90a"])


def heads(m: int, hq: int, hk: int, d: int, pairs: int, **options: Any) -> Any:
    sizes = {"m": m, "hq": hq, "hk": hk, "d": d, "pairs": pairs, "p": 1}
    return ROPE.problem(sizes, options)


LARGE = heads(8192, 32, 8, 128, 64)
#: A problem, knobs that differ from its default config, and the one rule that they break.
REJECTED: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (heads(8192, 1, 1, 128, 64), {"heads_per_thread": 2}, "heads_fill_threads"),
    (heads(64, 32, 8, 128, 64), {"heads_per_thread": 4}, "several_heads_leave_threads"),
)
#: Problems that no config computes, and the rule that says so.
REFUSED: tuple[tuple[Any, str], ...] = (
    (heads(8, 4, 4, 64, 33), "rotated_elements_are_of_a_head"),
    (heads(8, 4, 4, 33, 8, norm=True), "heads_to_norm_are_even"),
    (heads(8, 4, 4, 1024, 64, norm=True), "a_warp_holds_a_head_to_norm"),
    (heads(2**22, 64, 8, 128, 64), "threads_are_numbered_with_31_bits"),
)


@pytest.mark.parametrize("d", [16, 50, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("norm", [False, True])
def test_every_problem_has_a_default(d: int, norm: bool) -> None:
    for hq, hk in ((1, 1), (7, 1), (32, 8), (128, 1)):
        for pairs in {d // 2, d // 4, 1}:
            for m in (1, 64, 1000, 100_000):
                for dtype in ("bf16", "fp32"):
                    problem = heads(m, hq, hk, d, pairs, norm=norm, dtype=dtype)
                    if pairs == 1 and m > 1000:
                        continue  # more single elements than 31 bits count
                    if norm and d > 64 and (pairs == 1 or dtype == "fp32"):
                        continue  # small accesses, of which a warp does not hold a head
                    assert not HOPPER.explain(problem, HOPPER.default(problem)), problem


@pytest.mark.parametrize(("problem", "changes", "rule"), REJECTED, ids=lambda value: str(value)[:40])
def test_a_rule_alone_rejects_its_example(problem: Any, changes: dict[str, Any], rule: str) -> None:
    config = HOPPER.default(problem).replace(**changes)
    assert {violation.rule for violation in HOPPER.explain(problem, config)} == {rule}


@pytest.mark.parametrize(("problem", "rule"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_no_kernel_computes_is_refused(problem: Any, rule: str) -> None:
    assert {violation.rule for violation in HOPPER.explain(problem, {})} == {rule}


def test_every_rule_has_an_example() -> None:
    names = {rule for _, _, rule in REJECTED} | {rule for _, rule in REFUSED}
    assert names == {rule.name for rule in HOPPER.rules}


@pytest.mark.parametrize(
    ("d", "pairs", "options", "elements", "lanes"),
    [
        (128, 64, {}, 8, 8),
        (128, 64, {"dtype": "fp32"}, 4, 16),
        (192, 32, {}, 8, 4),
        (192, 32, {"norm": True}, 8, 16),
        (80, 40, {"norm": True}, 8, 8),
        (96, 44, {}, 4, 11),
        (50, 13, {}, 1, 13),
        (128, 64, {"unaligned": True}, 1, 64),
    ],
)
def test_accesses_divide_what_is_turned_and_the_rest(
    d: int, pairs: int, options: dict[str, Any], elements: int, lanes: int
) -> None:
    problem = heads(1000, 32, 8, d, pairs, **options)
    derived = HOPPER.derive(HOPPER.default(problem), problem, HOPPER.arch)
    assert (derived["access_elements"], derived["lanes"]) == (elements, lanes)
    assert derived["tail_vectors"] == (d - 2 * pairs) / elements


def test_every_target_has_the_same_space() -> None:
    for arch in ARCHES.values():
        space = find_space("rope", arch)
        assert space.domains == HOPPER.domains
        assert len(list(space.configs(LARGE))) == len(list(HOPPER.configs(LARGE))) == 24
