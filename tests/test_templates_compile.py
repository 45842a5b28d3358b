"""Templates through the real compiler: every choice with every other compiles, fits, and is what it says.

Needs the compiler but no GPU; takes about half a minute on two cores.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from covering import covering_set, reads_c_in_pairs
from disassembly import disassembled

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import render
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.space import Config, Value

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
LISTED = 32
"""Kernels that are disassembled: those that the covering set begins with hold most pairs."""


@dataclass(frozen=True)
class Kernel:
    """One member of the covering set, compiled."""

    problem: Problem
    config: Config
    derived: Mapping[str, Value]
    artifact: Artifact

    @property
    def plain(self) -> bool:
        # Adding 8-bit products up in order of arrival is an epilogue too, which may spill.
        arrival = self.config["reduction"] == "arrival" and self.problem.ab_dtype == "int8"
        return self.problem.epilogue == Epilogue() and not arrival

    @property
    def reads_c_in_pairs(self) -> bool:
        return reads_c_in_pairs(self.problem, self.config)

    @property
    def takes_c_by_tma(self) -> bool:
        return self.staged and self.problem.epilogue.beta and not self.config["stream_k"]

    @property
    def staged(self) -> bool:
        """Whether its results leave through shared memory."""
        return self.config["use_tma_store"] is True and self.config["split_k"] == 1

    def __str__(self) -> str:
        return f"{self.problem} | {self.config}"


@pytest.fixture(scope="module")
def kernels(compiler: Builder) -> list[Kernel]:
    """The covering set, compiled; whatever fails to compile fails every test with its reason."""
    pairs = {render(problem, config, ARCH): (problem, config) for problem, config in covering_set(SPACE)}
    built, failed = [], []
    for source, result in compiler.build(pairs):
        problem, config = pairs[source]
        if isinstance(result, Artifact):
            built.append(Kernel(problem, config, SPACE.derive(config, problem, ARCH), result))
        else:
            failed.append(f"{problem} | {config}: {result.outcome} {result.message}\n{result.log[-800:]}")
    assert not failed, "\n".join(failed)
    order = list(pairs.values())
    return sorted(built, key=lambda kernel: order.index((kernel.problem, kernel.config)))


def test_every_choice_compiles_with_every_other(kernels: list[Kernel]) -> None:
    """The set holds each pair of choices that can be legal, and each reachable tile width and cluster."""
    assert len(kernels) > 50
    reachable = {n for _, n in SPACE.domains["tile_shape_mn"]}  # type: ignore[misc]
    assert {kernel.config["tile_shape_mn"][1] for kernel in kernels} == reachable  # type: ignore[index]
    assert {kernel.config["cluster_shape_mn"] for kernel in kernels} == set(SPACE.domains["cluster_shape_mn"])


def test_shared_memory_is_exactly_as_predicted(kernels: list[Kernel]) -> None:
    """The space's number is what the compiler allocates, so no launch can fail for it."""
    wrong = [
        f"{kernel}: {kernel.artifact.resources.smem_bytes} not {kernel.derived['smem_bytes']}"
        for kernel in kernels
        if kernel.artifact.resources.smem_bytes != kernel.derived["smem_bytes"]
    ]
    assert wrong == []


def test_plain_products_keep_everything_in_registers(kernels: list[Kernel]) -> None:
    """No stack and no spills; what a fused epilogue spills is for measurements to judge."""
    spilled = [
        f"{kernel}: {kernel.artifact.resources}"
        for kernel in kernels
        if kernel.plain
        and (kernel.artifact.resources.spill_store_bytes or kernel.artifact.resources.stack_bytes)
    ]
    assert spilled == []


def test_the_assembler_has_nothing_to_complain_about(kernels: list[Kernel]) -> None:
    """No C75xx note: no serialised MMA, no ignored setmaxnreg."""
    notes = [f"{kernel}: {note}" for kernel in kernels for note in kernel.artifact.resources.notes]
    assert notes == []


def test_threads_and_registers_fit_a_multiprocessor(kernels: list[Kernel]) -> None:
    """As many threads as predicted, with an entry allocation that the hardware can give them."""
    for kernel in kernels:
        main = next(k for k in kernel.artifact.resources.kernels if "_k0" in k.name)
        assert main.threads == kernel.derived["threads"], str(kernel)
        assert main.registers <= ARCH.registers_per_thread
        assert main.registers * main.threads <= ARCH.registers, str(kernel)
        if kernel.derived["reg_mma"]:
            assert main.registers == ARCH.registers // main.threads // 8 * 8, str(kernel)
        assert main.barriers <= 16


# --- the instructions ---


@pytest.fixture(scope="module")
def listings(kernels: list[Kernel], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, str]]:
    """The instructions of each kernel."""
    listed = kernels[:LISTED] + [kernel for kernel in kernels[LISTED:] if kernel.reads_c_in_pairs]
    texts = disassembled([kernel.artifact for kernel in listed], tmp_path_factory.mktemp("cubin"))
    return list(zip(listed, texts, strict=True))


def test_tiles_are_multicast_exactly_along_the_cluster(listings: list[tuple[Kernel, str]]) -> None:
    """A cluster shares A along its n and B along its m; nobody shares C, if TMA loads it, too."""
    for kernel, listing in listings:
        loads = re.findall(r"UTMALDG\.\dD(\S*)", listing)
        shared = {"MULTICAST" in flags for flags in loads}
        across = {size > 1 for size in kernel.config["cluster_shape_mn"]}  # type: ignore[union-attr]
        assert shared == across | ({False} if kernel.takes_c_by_tma else set()), str(kernel)


def test_c_by_tma_is_read_from_shared_memory(listings: list[tuple[Kernel, str]]) -> None:
    """By ldmatrix in 16 bits, and never from global memory."""
    found = [(kernel, listing) for kernel, listing in listings if kernel.takes_c_by_tma]
    assert len(found) > 1
    for kernel, listing in found:
        if kernel.problem.out_dtype != "fp32":
            assert "LDSM" in listing, str(kernel)
        if not kernel.problem.epilogue.bias and not kernel.problem.epilogue.scale:
            assert "LDG" not in listing, str(kernel)


def test_results_leave_by_tma_exactly_when_the_config_says_so(listings: list[tuple[Kernel, str]]) -> None:
    """One store instruction per piece of every 64-row slab, none otherwise."""
    for kernel, listing in listings:
        assert ("UTMASTG" in listing) == kernel.staged, str(kernel)


def test_the_mma_has_the_width_of_the_tile_and_runs_asynchronously(
    listings: list[tuple[Kernel, str]],
) -> None:
    """The instructions that fill one k tile follow each other without a wait in between."""
    kinds = {"bf16": "F32.BF16", "fp16": "F32", "int8": "S8.S8.SAT"}
    for kernel, listing in listings:
        tile = kernel.config["tile_shape_mn"]
        assert isinstance(tile, tuple)
        found = re.findall(r"[HQI]GMMA\.64x(\d+)x\d+\.(\S+)", listing)
        ab = kernel.problem.ab_dtype
        kind = kinds.get(ab, f"F32.{ab.upper()}.{ab.upper()}")
        assert set(found) == {(str(tile[1]), kind)}, str(kernel)
        marks = re.findall(r"GMMA\.|WARPGROUP\.DEPBAR", listing)
        slabs = tile[0] // (64 * int(str(kernel.config["mma_warpgroups"])))
        assert marks.index("WARPGROUP.DEPBAR") >= 4 * slabs, str(kernel)


def test_plain_products_touch_no_local_memory(listings: list[tuple[Kernel, str]]) -> None:
    """Spills would show as local loads and stores."""
    touched = [str(k) for k, listing in listings if k.plain and re.search(r"\b(LDL|STL)\b", listing)]
    assert touched == []


def test_registers_move_between_warpgroups_exactly_when_planned(
    listings: list[tuple[Kernel, str]],
) -> None:
    """One warpgroup gives, the others take; a lone one leaves everything as it is."""
    for kernel, listing in listings:
        planned = bool(kernel.derived["reg_mma"])
        assert ("USETMAXREG.TRY_ALLOC" in listing) == ("USETMAXREG.DEALLOC" in listing) == planned, str(
            kernel
        )


def test_partial_sums_travel_16_bytes_at_a_time(listings: list[tuple[Kernel, str]]) -> None:
    """A pointer that lost its alignment would make four accesses of one, and only the clock would tell."""
    cut = [
        (k, text) for k, text in listings if (k.config["split_k"] != 1 or k.config["stream_k"]) and k.plain
    ]
    second = [(k, text) for k, text in cut if k.config["reduction"] == "fixed"]
    assert second
    for kernel, listing in cut:
        assert "LDG.E.128" in listing and "STG.E.128" in listing, str(kernel)
    for kernel, listing in second:
        parts = re.split(r"^\s*\.section\s+\.text\.", listing, flags=re.MULTILINE)[1:]
        reduction = next(part for part in parts if "_reduce_kernel" in part.split(",", 1)[0])
        assert re.findall(r"LDG\.E(\S*)", reduction).count("") == 0, str(kernel)


def test_c_is_read_in_pairs_like_d_is_written(listings: list[tuple[Kernel, str]]) -> None:
    """Two elements of 16 bits at a time wherever rows are aligned and contiguous along a thread's columns."""
    found = [
        (kernel, listing)
        for kernel, listing in listings
        if kernel.reads_c_in_pairs and not kernel.takes_c_by_tma
    ]
    assert len(found) > 1
    for kernel, listing in found:
        assert "LDG.E.U16" not in listing, str(kernel)
