"""Blackwell kernels through the real compiler: they compile, fit, and hold the instructions they should.

Compiled and inspected, untested on hardware. Needs the compiler but no GPU; takes about a minute. All that a
space can make is compiled by ``tools/sweep_compile.py``.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
from blackwell import (
    B200,
    B300,
    LAUNCHED,
    ODD,
    RINGS,
    SPACE,
    Kernel,
    barrier_arrivals,
    chosen,
    compiled,
    instruction_descriptor,
    pair,
)
from disassembly import disassembled
from fake_gpu import build_driver, run_with_driver

from cutegen.build import Builder
from cutegen.build.render import render
from cutegen.dtypes import DTYPE_BYTES

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
KERNELS = 68
"""Most kernels that this module compiles, so that it stays within its time."""
LISTED, LISTED_B300 = 32, 5
"""Kernels of each target that are disassembled: those that the covering set begins with hold most pairs."""


LAUNCH = """
from pathlib import Path
import tvm_ffi
from cutegen.build.loader import load_kernel
from fake_gpu import FakeTensor
shapes = (1000, 1032), (1032, 520), (1000, 520)
a, b, d = (tvm_ffi.from_dlpack(FakeTensor(*shape, code=4, bits=16)) for shape in shapes)
scratch = [tvm_ffi.from_dlpack(FakeTensor({elements}))] if {elements} else []
load_kernel(Path({library!r}), {symbol!r})(a, b, d, *scratch, *{scalars!r})
"""


@pytest.fixture(scope="module")
def kernels(compiler: Builder) -> list[Kernel]:
    """The covering set, compiled; whatever fails to compile fails every test with its reason."""
    cases = {render(*case): case for case in chosen()}
    assert len(cases) <= KERNELS
    order = list(cases.values())
    built = compiled(cases, SPACE, compiler)
    return sorted(built, key=lambda kernel: order.index((kernel.problem, kernel.config, kernel.arch)))


def test_the_set_holds_every_tile_width_and_cluster(kernels: list[Kernel]) -> None:
    """Beside every pair of choices, on both targets."""
    assert {kernel.arch for kernel in kernels} == {B200, B300}
    widths = {pair(tiler)[1] for tiler in SPACE.domains["mma_tiler_mn"]}
    assert {pair(kernel.config["mma_tiler_mn"])[1] for kernel in kernels} == widths
    assert {k.config["cluster_shape_mn"] for k in kernels} == set(SPACE.domains["cluster_shape_mn"])
    assert any(kernel.plain for kernel in kernels)


def test_shared_memory_is_exactly_as_predicted(kernels: list[Kernel]) -> None:
    """The space's number is what the compiler allocates, so no launch can fail for it."""
    wrong = [
        f"{kernel}: {kernel.artifact.resources.smem_bytes} not {kernel.derived['smem_bytes']}"
        for kernel in kernels
        if kernel.artifact.resources.smem_bytes != kernel.derived["smem_bytes"]
    ]
    assert wrong == []


def test_nothing_spills_and_the_assembler_has_nothing_to_complain_about(kernels: list[Kernel]) -> None:
    """No stack, no spills, no note, whatever is fused; as many threads as predicted, which fit."""
    for kernel in kernels:
        found, main = kernel.artifact.resources, kernel.main
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0), str(kernel)
        assert found.notes == (), str(kernel)
        assert main.threads == kernel.derived["threads"], str(kernel)
        assert main.registers <= int(str(kernel.derived["max_registers"])), str(kernel)
        for part in found.kernels:
            assert part.registers * part.threads <= B200.registers and part.barriers <= 16, str(kernel)


def test_split_products_have_a_second_kernel(kernels: list[Kernel]) -> None:
    """Which adds up the parts, in groups of 128 threads; other products have one kernel only."""
    for kernel in kernels:
        others = [k.threads for k in kernel.artifact.resources.kernels if "_k0" not in k.name]
        adders = int(str(kernel.derived["adders"]))
        assert others == ([128 * adders] if kernel.config["split_k"] != 1 else []), str(kernel)


def test_odd_problems_are_launched_as_planned(kernels: list[Kernel], tmp_path: Path) -> None:
    """Grid, block, cluster and shared memory, seen by a driver that records; large clusters are asked for."""
    driver = build_driver(tmp_path)
    found = [kernel for kernel in kernels if kernel.problem == ODD]
    assert len(found) == len(LAUNCHED)
    for kernel in found:
        (cm, cn), (tile_m, tile_n) = (
            pair(kernel.config["cluster_shape_mn"]),
            pair(kernel.config["mma_tiler_mn"]),
        )
        tile_m //= 2 if kernel.config["use_2cta_instrs"] else 1
        splits = int(str(kernel.config["split_k"]))
        clusters = -(-1000 // (tile_m * cm)) * -(-520 // (tile_n * cn))
        launch = SPACE.launch(kernel.config, ODD, 148)
        code = LAUNCH.format(
            library=str(kernel.artifact.shared_object),
            symbol=kernel.artifact.symbol,
            scalars=launch.scalars,
            elements=launch.workspace_bytes // 4,
        )
        _, log = run_with_driver(driver, code, tmp_path / kernel.artifact.symbol)
        line, *second = [line for line in log if line.startswith("cuLaunchKernelEx")]
        units = clusters * splits
        grid = f"{cm} {cn} {min(units, launch.scalars[0])}"
        if kernel.config["use_clc"]:
            grid = f"{cm * units} {cn} 1"
        threads, smem = kernel.derived["threads"], kernel.derived["smem_bytes"]
        assert f" grid {grid} block {threads} 1 1 smem {smem} " in line, line
        assert f" attribute 4 {cm} {cn} 1 " in line, line
        assert (" attribute 6 1 " in line) == kernel.config["use_pdl"], line
        assert any(line.startswith("cuKernelSetAttribute 14 1 ") for line in log)
        assert len(second) == (splits > 1)
        if second:
            sums = tile_m * tile_n // (128 * int(str(kernel.derived["reduced"])))
            assert f" grid {clusters * cm * cn} {sums} 1 block 128 4 1 " in second[0], second
            assert " attribute 6 1 " in second[0], second


# --- the instructions ---


@pytest.fixture(scope="module")
def sections(
    kernels: list[Kernel], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Kernel, dict[bool, str]]]:
    """The instructions of kernels: of what multiplies (True) and of what adds up parts (False)."""
    by_arch = {arch: [kernel for kernel in kernels if kernel.arch == arch] for arch in (B200, B300)}
    listed = [*by_arch[B200][:LISTED], *by_arch[B300][:LISTED_B300]]
    listed += [kernel for kernel in kernels if kernel.problem == ODD and kernel not in listed]
    texts = disassembled([kernel.artifact for kernel in listed], tmp_path_factory.mktemp("cubin"))
    found = []
    for kernel, text in zip(listed, texts, strict=True):
        parts = re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]
        found.append((kernel, {"_k0" in part.split(",", 1)[0]: part for part in parts}))
    return found


@pytest.fixture(scope="module")
def listings(sections: list[tuple[Kernel, dict[bool, str]]]) -> list[tuple[Kernel, str]]:
    """The instructions of each kernel that multiplies."""
    return [(kernel, parts[True]) for kernel, parts in sections]


def test_the_mma_is_of_one_block_or_of_two_as_the_config_says(listings: list[tuple[Kernel, str]]) -> None:
    """Four instructions for each k tile, all of the kind of the operands; loads signal the pair's leader."""
    kinds = {"e4m3": "UTCQMMA", "e5m2": "UTCQMMA", "int8": "UTCIMMA"}
    for kernel, listing in listings:
        found = re.findall(r"(UTC[A-Z]+MMA)(\S*)", listing)
        assert found and len(found) % 4 == 0, str(kernel)
        assert {name for name, _ in found} == {kinds.get(kernel.problem.ab_dtype, "UTCHMMA")}, str(kernel)
        assert {"2CTA" in flag for _, flag in found} == {kernel.config["use_2cta_instrs"]}, str(kernel)
        loads = re.findall(r"UTMALDG\.\dD(\S*)", listing)
        assert {"2CTA" in flag for flag in loads} == {kernel.config["use_2cta_instrs"]}, str(kernel)


def test_the_mma_is_told_types_sizes_and_orders_of_its_operands(listings: list[tuple[Kernel, str]]) -> None:
    """Its descriptor is one constant, but for signs that are never turned; the other width's is not there."""
    for kernel, listing in listings:
        constants = {int(number, 16) for number in re.findall(r"\b0x[0-9a-f]{6,8}\b", listing)}
        wanted = instruction_descriptor(kernel)
        assert wanted in constants, f"{kernel}: {wanted:#x} {sorted(map(hex, constants))}"
        assert not {wanted ^ 1 << bit for bit in (4, 7, 10, 15, 16, 18, 25)} & constants, str(kernel)


def test_barriers_await_as_many_arrivals_as_the_space_counts(listings: list[tuple[Kernel, str]]) -> None:
    """One full and one empty barrier for each stage of each ring; the allocator of a pair has one more."""
    for kernel, listing in listings:
        wanted: Counter[int] = Counter()
        for stages, arrivals in RINGS:
            wanted[1] += int(str(kernel.derived[stages]))
            wanted[int(str(kernel.derived[arrivals]))] += int(str(kernel.derived[stages]))
        wanted[32] += bool(kernel.config["use_2cta_instrs"])
        assert +wanted == barrier_arrivals(listing), str(kernel)


def test_work_is_asked_for_exactly_when_the_config_says_so(listings: list[tuple[Kernel, str]]) -> None:
    """One request, for all blocks of the cluster."""
    for kernel, listing in listings:
        asked = re.findall(r"UGETNEXTWORKID(\S*)", listing)
        assert asked == ([".BROADCAST"] if kernel.config["use_clc"] else []), str(kernel)


def test_kernels_take_turns_exactly_when_the_config_says_so(listings: list[tuple[Kernel, str]]) -> None:
    """A kernel waits for the one before it only with use_pdl, and lets the next begin if anything waits."""
    for kernel, listing in listings:
        waits, lets = "ACQBULK" in listing, "PREEXIT" in listing
        assert waits == kernel.config["use_pdl"], str(kernel)
        assert lets == (kernel.config["use_pdl"] or kernel.config["split_k"] != 1), str(kernel)


def test_tiles_are_multicast_exactly_along_the_cluster(listings: list[tuple[Kernel, str]]) -> None:
    """Pairs count as one block along m; without sharers nothing is multicast."""
    for kernel, listing in listings:
        loads = re.findall(r"UTMALDG\.\dD(\S*)", listing)
        assert {"MULTICAST" in flags for flags in loads} == set(kernel.sharing), str(kernel)


def test_results_leave_by_tma_exactly_when_the_config_says_so(listings: list[tuple[Kernel, str]]) -> None:
    """Otherwise they leave from registers, each write behind a test of its place."""
    for kernel, listing in listings:
        assert ("UTMASTG" in listing) == kernel.staged, str(kernel)
        assert bool(re.search(r"\bSTG\.", listing)) != kernel.staged, str(kernel)
        assert "LDTM" in listing, str(kernel)


def test_partial_sums_travel_16_bytes_at_a_time(sections: list[tuple[Kernel, dict[bool, str]]]) -> None:
    """A pointer that lost its alignment would make four accesses of one."""
    cut = [(kernel, parts) for kernel, parts in sections if kernel.config["split_k"] != 1]
    assert any(kernel.plain for kernel, _ in cut)
    for kernel, parts in cut:
        assert set(re.findall(r"\bSTG\.E(\S*)", parts[True])) == {".128"}, str(kernel)
        assert "LDG.E.128" in parts[False], str(kernel)
        if kernel.plain:
            assert set(re.findall(r"\bLDG\.E(\S*)", parts[False])) == {".128"}, str(kernel)


def test_rows_are_read_and_written_16_bytes_at_a_time_where_threads_hold_as_many(
    sections: list[tuple[Kernel, dict[bool, str]]],
) -> None:
    """Results that leave from registers, and C wherever it is added and nothing else is read."""
    seen = Counter[str]()
    for kernel, parts in sections:
        problem, split = kernel.problem, kernel.config["split_k"] != 1
        if int(str(kernel.derived["vector"])) * DTYPE_BYTES[problem.out_dtype] != 16:
            continue
        listing = parts[not split]
        if split or not kernel.staged:
            seen["D"] += 1
            assert set(re.findall(r"\bSTG\.E(\S*)", listing)) == {".128"}, str(kernel)
        if problem.epilogue.beta and not (problem.epilogue.bias or problem.epilogue.scale):
            seen["C"] += 1
            assert set(re.findall(r"\bLDG\.E(\S*)", listing)) == {".128"}, str(kernel)
    assert min(seen["D"], seen["C"]) > 0, seen


def test_registers_stay_where_they_are(listings: list[tuple[Kernel, str]]) -> None:
    """No warpgroup asks for more: all threads together can have as many as one may hold."""
    for kernel, listing in listings:
        assert kernel.derived["max_registers"] == B200.registers_per_thread, str(kernel)
        assert "USETMAXREG" not in listing, str(kernel)


def test_nothing_touches_local_memory(listings: list[tuple[Kernel, str]]) -> None:
    """Spills would show as local loads and stores."""
    assert [str(k) for k, listing in listings if re.search(r"\b(LDL|STL)\b", listing)] == []
