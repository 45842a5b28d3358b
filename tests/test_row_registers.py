"""What kernels over rows are expected to take of registers, and how many CTAs and clusters find room."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.families.registry import find_space, parse_problem
from cutegen.space import Config
from spaces.row.defaults import kernel_of
from spaces.row.expected import counts_of
from spaces.row.registers import RegistersTaken, ctas_with
from spaces.row.sizes import sums_of_lane
from tools import fit_row_registers
from tools.fit_rows import registers_of

ARCH = find_arch("sm_90a")


@pytest.mark.parametrize(
    ("threads", "cluster_n", "sums"),
    [(32, 1, 0), (64, 1, 2), (256, 1, 8), (320, 1, 1), (160, 4, 1), (512, 16, 8)],
)
def test_a_lane_reads_all_of_few_sums_and_every_32nd_of_many(threads: int, cluster_n: int, sums: int) -> None:
    assert sums_of_lane(threads, cluster_n) == sums


def test_registers_are_the_larger_of_two_numbers() -> None:
    taken = RegistersTaken(working=4, per_value=2, per_weight=0.5, reading=14, per_sum=4, shared=8)
    assert taken.of(values=32, weights=0, sums=1, is_shared=False) == 68  # while values are worked on
    assert taken.of(values=16, weights=0, sums=8, is_shared=False) == 62  # while sums are read beside them
    assert taken.of(values=16, weights=4, sums=8, is_shared=True) == 72


@pytest.mark.parametrize(
    ("registers", "threads", "ctas"),
    [(64.0, 256, 4), (64.1, 256, 3), (8, 32, 32), (16, 1024, 2), (255, 512, 1)],
)
def test_ctas_find_room_in_registers_and_threads(registers: float, threads: int, ctas: int) -> None:
    assert ctas_with(registers, threads, ARCH) == ctas


def test_clusters_have_eight_ctas_on_a_multiprocessor_and_fit_gpcs() -> None:
    """137 rows for clusters of 8 take two waves, as measured, though registers are there for ten CTAs."""
    problem, space = parse_problem("cross_entropy 137x16360 bf16 gradient"), find_space("cross_entropy", ARCH)
    config = space.default(problem).replace(threads_per_row=128, cluster_n=8, row_in="registers", turn=1)
    kernel = kernel_of(space, problem, config, registers_of("cross_entropy"))
    assert kernel.resident == 8
    assert counts_of(kernel, problem.sizes["m"], problem.min_bytes, ARCH).waves > 1.5
    assert counts_of(kernel, 124, problem.min_bytes, ARCH).waves == 1


@pytest.mark.dsl
@pytest.mark.parametrize("family", ["cross_entropy", "softmax"])
def test_compiled_kernels_take_about_as_many_registers(family: str, tmp_path: Path) -> None:
    """Of eight kernels from all over those that were timed, seven have the CTAs that are expected."""
    known = fit_row_registers.kernels(family)
    sources = [*known][:: len(known) // 8][:8]
    registers = fit_row_registers.compiled(sources, Store(tmp_path), 2)
    by = registers_of(family)
    equal = 0
    for source, found in registers.items():
        one = known[source]
        expected = by.of(one.values, one.weights, one.sums, one.is_shared)
        assert abs(expected - found) < 16, (expected, found)
        equal += ctas_with(expected, one.threads, ARCH) == ctas_with(found, one.threads, ARCH)
    assert len(registers) == 8 and equal >= 7


@pytest.mark.dsl
@pytest.mark.parametrize(
    ("line", "words", "ctas"),
    [
        (
            "rmsnorm 64x16384 bf16",
            "threads_per_row=128 cluster_n=4 prefetch_weight=true row_in=registers turn=1",
            7,
        ),
        (
            "rmsnorm 64x8192 bf16",
            "threads_per_row=128 cluster_n=4 prefetch_weight=true row_in=registers turn=1",
            12,
        ),
        ("rmsnorm_quantized 64x7168 bf16", "threads_per_row=256 cluster_n=1 row_in=registers turn=1", 4),
    ],
)
def test_addresses_leave_room_for_ctas(line: str, words: str, ctas: int, tmp_path: Path) -> None:
    """With a CTA less on each multiprocessor, 16384 rows of the first took 5 % longer on an H200."""
    config = Config.parse(f"{words} rows_per_cta=1 rows_per_thread=1 pdl=off")
    [registers] = fit_row_registers.compiled(
        [render(parse_problem(line), config, ARCH)], Store(tmp_path), 1
    ).values()
    assert ctas_with(registers, config.integer("threads_per_row"), ARCH) >= ctas
