"""The space that kernels over rows share, for a family of them to bind to its target."""

from __future__ import annotations

from functools import partial

from cutegen.arch import Arch
from cutegen.space import Launch, Rule, Space

from .defaults import choose_default, fastest_expected
from .derived import derive
from .expected import Terms
from .rules import BARE_RULES, DOMAINS, RULES, RULES_OF_RINGS


def row_space(
    family: str,
    arch: Arch,
    *,
    weight: bool = True,
    sums_of_row: int = 1,
    values_at_a_time: int = 32,
    beside_values: tuple[int, int] | None = None,
    values_of_warps: tuple[int, int] | None = None,
    terms: Terms | None = None,
    turn: int = 2,
    ring: str = "",
) -> Space:
    """Return the space of a family of kernels over rows, bound to ``arch``.

    Args:
        family: Its name.
        arch: The target.
        weight: Whether there is something along a row to load, so that ``prefetch_weight`` is a knob.
        sums_of_row: How many numbers the warps of a row exchange.
        values_at_a_time: With how many values of a row in shared memory, at most, a thread gets along with 40
            registers. Source: ptxas, the tests' kernels.
        beside_values: Registers of a thread beside its values and weights, where these are loaded late, and
            early by 128 threads: the compiler gets no more. None where it takes few enough. Source: ptxas.
        values_of_warps: More values of a thread than the first, and up to the second, fit 64 registers where
            a warp has whole rows, though the compiler takes more. Source: ptxas.
        terms: What its kernels are expected to take, by which its default is chosen; else it follows from the
            sizes alone.
        turn: Of rows in shared memory, by that default.
        ring: Whether rows may come through a ring: to CTAs whose default ``stays`` to the end, or ``leaves``.
    """
    domains = {k: v for k, v in DOMAINS.items() if weight or k != "prefetch_weight"}
    domains["row_in"] = domains["row_in"] if ring else ("registers", "smem")
    known = RULES if ring else [rule for rule in RULES if rule not in RULES_OF_RINGS]
    rules = known if weight else [BARE_RULES.get(rule, rule) for rule in known]
    return Space(
        family=family,
        arch=arch,
        domains=domains,
        rules=tuple(Rule.of(rule) for rule in rules if rule is not None),
        derive=partial(
            derive,
            sums_of_row=sums_of_row,
            values_at_a_time=values_at_a_time,
            beside_values=beside_values,
            values_of_warps=values_of_warps,
        ),
        choose_default=choose_default
        if terms is None
        else partial(fastest_expected, terms=terms, turn=turn, ring=ring),
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
    )
