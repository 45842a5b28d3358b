"""The space that kernels over rows share, for a family of them to bind to its target."""

from __future__ import annotations

from functools import partial
from typing import Literal

from cutegen.arch import Arch
from cutegen.space import Launch, Rule, Space

from .defaults import choose_default, fastest_expected
from .derived import derive
from .rules import BARE_RULES, DOMAINS, RULES, RULES_OF_RINGS, RULES_OF_SMEM
from .traits import DefaultByTerms, Registers, RowsInSmem

_REGISTERS, _IN_SMEM = Registers(), RowsInSmem()


def row_space(
    family: str,
    arch: Arch,
    *,
    weight: bool = True,
    sums_of_row: int = 1,
    registers: Registers = _REGISTERS,
    in_smem: RowsInSmem = _IN_SMEM,
    ring: Literal["", "stays", "leaves"] = "",
    default: DefaultByTerms | None = None,
) -> Space:
    """Return the space of a family of kernels over rows, bound to ``arch``.

    Args:
        family: Its name.
        arch: The target.
        weight: Whether there is something along a row to load, so that ``prefetch_weight`` is a knob.
        sums_of_row: How many numbers the warps of a row exchange.
        registers: What the compiler takes for a thread.
        in_smem: Which rows may wait in shared memory.
        ring: Whether rows may come through a ring: to CTAs whose default ``stays`` to the end, or ``leaves``.
        default: How the default is chosen by what kernels are expected to take; None for a choice by the
            sizes alone.
    """
    domains = {k: v for k, v in DOMAINS.items() if weight or k != "prefetch_weight"}
    domains["row_in"] = domains["row_in"] if ring else ("registers", "smem")
    known = RULES if ring else [rule for rule in RULES if rule not in RULES_OF_RINGS]
    functions = known if weight else [BARE_RULES.get(rule, rule) for rule in known]
    rules = (
        Rule.of(function, in_smem=in_smem) if function in RULES_OF_SMEM else Rule.of(function)
        for function in functions
        if function is not None
    )
    return Space(
        family=family,
        arch=arch,
        domains=domains,
        rules=tuple(rules),
        derive=partial(derive, sums_of_row=sums_of_row, registers=registers),
        choose_default=choose_default
        if default is None
        else partial(fastest_expected, by=default, ring=ring),
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
    )
