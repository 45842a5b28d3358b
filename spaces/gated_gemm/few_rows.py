"""Which kernels for gated GEMMs of few rows exist: those of the GEMM whose warps have pairs of columns.

A gated GEMM reads as many weights as the plain GEMM with all their rows, so rules, resources and knobs are
those of that GEMM. Of the columns of a warp every other one is a gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gated_gemm.plain_gemm import plain_gemm
from cutegen.space import Config, Launch, Rule, Space, Value

from ..gemm import few_rows as gemm
from .sm90 import of_gemm

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    **gemm.DOMAINS,
    "columns_per_warp": tuple(c for c in gemm.DOMAINS["columns_per_warp"] if c != 1),
}
"""Those of the GEMM, with an even number of columns: a gate and what it multiplies come to the same warp."""

DEFAULT_CANDIDATES: gemm.Candidates = {
    1: ((256, 2, 8, 2), (128, 4, 4, 2), (256, 2, 2, 2)),
    2: ((128, 2, 2, 2), (128, 2, 4, 4)),
    4: ((128, 4, 4, 2), (64, 2, 1, 8), (64, 2, 2, 2)),
}
"""As those of the GEMM, which has more that were not timed with gates. Source: what the GEMM's model chooses
among these and a kernel on tensor cores is at 0.986 of the fastest that was tried in the geometric mean of 98
gated GEMMs on an H200 (docs/results/untuned_products*.json), 0.84 at worst."""


def two_tensors_leave_registers(
    rows_per_cta: int, threads_per_cta: int, columns_per_warp: int, unroll: int, problem: Any, arch: Arch
) -> bool:
    """With layout=split the columns of a warp are of two tensors, and each has an address of its own, which
    takes about 3 registers: these must have room (8 columns of 4 rows in CTAs of 512 threads spill)."""
    if plain_gemm(problem) is problem or problem.layout != "split":
        return True
    room = min(arch.registers // threads_per_cta, arch.registers_per_thread)
    taken = gemm.registers(rows_per_cta, columns_per_warp, unroll) + 3 * columns_per_warp
    return taken <= room * 6 // 5


RULES = (*map(of_gemm, gemm.RULES), Rule.of(two_tensors_leave_registers))


def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
    """Return what the GEMM derives."""
    return gemm.derive(config, plain_gemm(problem), arch)


def default_candidates(problem: Any) -> Iterator[dict[str, Value]]:
    """Return those that were measured of gated GEMMs: one does well on problems of as many rows."""
    return gemm.candidates(problem.m, DEFAULT_CANDIDATES)


def build_space(arch: Arch) -> Space:
    """Return the space of gated GEMMs of few rows bound to ``arch``."""
    return Space(
        family="gated_gemm",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=gemm.choose_default,
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: config,
        default_candidates=default_candidates,
    )
