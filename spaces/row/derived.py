"""What follows from a config of a kernel over rows: threads, steps, shared memory, CTAs at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from cutegen.arch import Arch, resident_clusters
from cutegen.space import Config, Value

from .left_in_l2 import left_in_l2
from .ring import ring_ctas, ring_stages
from .sizes import (
    ELEMENT_BYTES,
    WARP,
    access_elements,
    along_bytes,
    along_row,
    is_peeled,
    is_wide,
    part,
    slots,
    staged_bytes,
    steps,
    values_per_thread,
    values_registers,
    vectors,
)
from .traits import Registers

SUMS_BYTES = 2048
"""Shared memory of a CTA beside its part of a row, at most: sums, barriers, what the driver takes."""
SMEM_THREADS = 1536
"""Threads of a multiprocessor for rows in shared memory, at most, which leaves 40 registers to each."""
PEELED_REGISTERS = 24
"""Registers of a thread more where it reads the ends of rows element by element. Source: ptxas."""
SMEM_THREADS_WIDE = 1024
"""The same with 16-bit rows and a weight in fp32, whose loads need more, and for turns of so many values that
what is worked out of them does not fit."""


class _Memory(NamedTuple):
    """What is in the shared memory of a CTA.

    Attributes:
        rows: Bytes of rows, and of what comes along with every row.
        sums: Bytes of partial sums.
        barriers: How many.
        ring: What follows for rows that come through a ring.
    """

    rows: int
    sums: int
    barriers: int
    ring: Mapping[str, Value] = MappingProxyType({})


def _of_whole_rows(config: Config, problem: Any, sums: int) -> _Memory:
    """Rows in shared memory: those that a thread works on at a time, each with a barrier for each turn."""
    cluster_n, at_a_time = config.integer("cluster_n"), config.integer("rows_per_thread")
    turns = -(-steps(problem, config.integer("threads_per_row"), cluster_n) // config.integer("turn"))
    return _Memory(
        rows=staged_bytes(problem, cluster_n) * at_a_time,
        sums=sums * at_a_time,
        barriers=int(cluster_n > 1) * at_a_time + turns,
    )


def _of_ring(config: Config, problem: Any, arch: Arch, groups: int, sums: int) -> _Memory:
    """Rows that come through a ring: two sets of sums, so that a row need not wait for the one before."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    rows_per_cta, turn = config.integer("rows_per_cta"), config.integer("turn")
    held = config.get("prefetch_weight") is True
    stages = ring_stages(threads_per_row, rows_per_cta, cluster_n, held, turn, problem)
    ctas = ring_ctas(threads_per_row, rows_per_cta, cluster_n, held, problem)
    along = 0 if held else along_bytes(problem, cluster_n)
    return _Memory(
        rows=stages * groups * staged_bytes(problem, cluster_n) + along,
        sums=2 * sums,
        barriers=groups * (stages + 2 * int(cluster_n > 1)) + int(not held and bool(along_row(problem))),
        ring={
            "stages": stages,
            "clusters": ctas * resident_clusters(arch.nominal_sm_count, cluster_n),
            "weights_held": int(held),
            "rows_of_group": turn if turn > 1 else 0,
        },
    )


def derive(
    config: Config,
    problem: Any,
    arch: Arch,
    *,
    sums_of_row: int,
    registers: Registers,
) -> dict[str, Value]:
    """Return accesses per row, CTA and thread, groups, warps, and the exact shared memory (bytes)."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    groups = config.integer("rows_per_cta") // config.integer("rows_per_thread")
    sums = slots(threads_per_row, cluster_n) * 4 * groups * sums_of_row if threads_per_row > WARP else 0
    if config["row_in"] == "smem":
        memory = _of_whole_rows(config, problem, sums)
    elif config["row_in"] == "ring":
        memory = _of_ring(config, problem, arch, groups, sums)
    else:
        memory = _Memory(rows=0, sums=sums, barriers=int(cluster_n > 1))
    row_bytes = problem.n * ELEMENT_BYTES[problem.signature.dtype]
    return {
        **memory.ring,
        **left_in_l2(problem, arch, row_bytes, leaves=config["row_in"] == "registers"),
        "access_elements": access_elements(problem),
        "vectors": vectors(problem),
        "part": part(problem, cluster_n),
        "steps": steps(problem, threads_per_row, cluster_n),
        "whole_steps": _whole_steps(config, problem),
        "groups": groups,
        "threads": groups * threads_per_row,
        "warps_per_row": max(1, threads_per_row // WARP),
        "slots": slots(threads_per_row, cluster_n),
        "smem_bytes": memory.rows + memory.sums + 8 * memory.barriers,
        "min_blocks": min_blocks(config, problem, arch, registers),
    }


def _whole_steps(config: Config, problem: Any) -> int:
    """Return how many of a thread's accesses are inside every row, so that nothing is asked of them."""
    several_in_smem = config["row_in"] == "smem" and config.integer("rows_per_thread") > 1
    if config.integer("rows_per_cta") != 1 and config["row_in"] != "ring" and not several_in_smem:
        return 0
    cluster_n = config.integer("cluster_n")
    # Of a row that starts anywhere all accesses behind the first are whole but for the last two.
    most = problem.n // access_elements(problem) - 1 if is_peeled(problem) else vectors(problem)
    shortest = most - (cluster_n - 1) * part(problem, cluster_n)
    return max(0, shortest) // config.integer("threads_per_row")


def _is_hard(problem: Any, config: Config) -> bool:
    """Return whether a late weight needs more registers than its 32 values of 16 bits do, or the 160 warps
    and more of a cluster that do not all hold as much of a row. Source: ptxas."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    many = values_per_thread(problem, threads_per_row, cluster_n) > 32
    odd = cluster_n == 16 and threads_per_row > 256 and part(problem, cluster_n) % threads_per_row > 0
    return many or odd or is_wide(problem) or problem.signature.dtype == "fp32"


def _min_blocks_of_warps(
    config: Config, problem: Any, accesses: int, early: bool, values_of_warps: tuple[int, int]
) -> int:
    """Return how many CTAs must find room whose warps have whole rows: those of 1024 threads, where the
    compiler would take a few more than their 64 registers and needs none of them. Source: an H200: LayerNorm
    of 8192x768 takes 3 % less time, cross-entropy of 65536x1000 5 %; ptxas, the tests' kernels."""
    rows = config.integer("rows_per_thread")
    held = accesses * access_elements(problem) * rows
    fits = values_registers(problem, accesses * rows, rows, early) <= 2 * held
    fits &= problem.signature.dtype != "fp32"
    fits &= not is_peeled(problem)
    threads = config.integer("threads_per_row") * config.integer("rows_per_cta") // rows
    return 1024 // threads if values_of_warps[0] < held <= values_of_warps[1] and fits else 1


def min_blocks(config: Config, problem: Any, arch: Arch, registers: Registers) -> int:
    """Return how many CTAs must find room in the registers of a multiprocessor: as many as in shared memory,
    unless a thread has more values at a time than fit 40 registers; for rows in registers as many as its
    values, and the registers beside them, leave room for."""
    threads_per_row, cluster_n = config.integer("threads_per_row"), config.integer("cluster_n")
    if config["row_in"] == "registers":
        early = bool(config.get("prefetch_weight"))
        accesses = steps(problem, threads_per_row, cluster_n)
        if threads_per_row <= WARP and registers.values_of_warps is not None:
            return _min_blocks_of_warps(config, problem, accesses, early, registers.values_of_warps)
        if registers.beside_values is None or threads_per_row < 128:
            return 1
        taken = values_registers(problem, accesses, 1, early) + registers.beside_values[early]
        more = 0 if early or not _is_hard(problem, config) else 8  # registers come in steps of 8
        taken += PEELED_REGISTERS if is_peeled(problem) else 0
        taken += more + (8 + 3 * more if config["pdl"] == "late" else 0)  # what the end of the load must keep
        return max(1, arch.registers // (threads_per_row * taken))
    if config["row_in"] == "ring":
        held = config.get("prefetch_weight") is True
        return ring_ctas(threads_per_row, config.integer("rows_per_cta"), cluster_n, held, problem)
    several = config.integer("rows_per_thread")
    taken = staged_bytes(problem, cluster_n) * several + SUMS_BYTES
    wide = (
        several > 1
        or is_wide(problem)
        or config.integer("turn") * access_elements(problem) > registers.values_at_a_time
    )
    threads = SMEM_THREADS_WIDE if wide else SMEM_THREADS
    return max(1, min(arch.smem_bytes // taken, threads // threads_per_row))
