"""Blackwell kernels through the real compiler: they compile, fit, and hold the instructions they should.

Compiled and inspected, never run by us. Needs the compiler but no GPU; takes about a minute. All that a
space can make is compiled by ``tools/sweep_compile.py``.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from covering import cover
from fake_gpu import build_driver, run_with_driver
from test_templates_compile import cubins, nvdisasm
from walk import BLACKWELL_DTYPES, random_config, random_pairs

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.artifact import KernelResources
from cutegen.catalog import find_space
from cutegen.problem import Epilogue, Problem
from cutegen.render import render
from cutegen.space import Config, Value
from cutegen.store import Store

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
B200, B300 = find_arch("sm_100a"), find_arch("sm_103a")
SPACE = find_space("gemm", B200)
KERNELS = 72
"""Most kernels that this module compiles, so that it stays within its time."""
FOR_B300 = 5
"""Kernels of the set that are compiled for sm_103a as well: they differ in the name of the target only."""


STEERS: tuple[Mapping[str, Sequence[Value]], ...] = (
    {"swap_ab": (True,)},
    {"split_k": (2, 3, 4)},
    {"use_clc": (True,), "use_tma_store": (True,)},
)


@dataclass(frozen=True)
class Kernel:
    """One member of the covering set, compiled."""

    problem: Problem
    config: Config
    derived: Mapping[str, Value]
    artifact: Artifact
    arch: Arch

    @property
    def main(self) -> KernelResources:
        """Resources of the kernel that multiplies; split_k has another that adds up."""
        return next(k for k in self.artifact.resources.kernels if "_k0" in k.name)

    @property
    def staged(self) -> bool:
        """Whether its results leave through shared memory."""
        return self.config["use_tma_store"] is True

    @property
    def plain(self) -> bool:
        return self.problem.epilogue == Epilogue()

    @property
    def sharing(self) -> tuple[bool, bool]:
        """Whether other blocks, or pairs of blocks, of the cluster want the same tiles of A, of B."""
        return shared(self.config)

    def __str__(self) -> str:
        return f"{self.problem} | {self.config} | {self.arch}"


#: A product with odd edges in every direction, and how it is to be launched.
ODD = Problem(1000, 520, 1032, layout="nn")
LAUNCHED = (
    "mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=4x2",
    "cluster_shape_mn=2x8",
    "mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=4x2 use_clc=true use_pdl=true",
    "mma_tiler_mn=64x40 cluster_shape_mn=1x2 use_tma_store=false split_k=3",
    "mma_tiler_mn=128x64 cluster_shape_mn=2x1 use_tma_store=false split_k=2 use_clc=true",
)
LAUNCH = """
from pathlib import Path
import tvm_ffi
from cutegen.loader import load_kernel
from fake_gpu import FakeTensor
shapes = (1000, 1032), (1032, 520), (1000, 520)
a, b, d = (tvm_ffi.from_dlpack(FakeTensor(*shape, code=4, bits=16)) for shape in shapes)
scratch = [tvm_ffi.from_dlpack(FakeTensor({elements}))] if {elements} else []
load_kernel(Path({library!r}), {symbol!r})(a, b, d, *scratch, *{scalars!r})
"""


def pair(value: Value) -> tuple[int, int]:
    assert isinstance(value, tuple)
    return value[0], value[1]


def shared(config: Config) -> tuple[bool, bool]:
    along_m, along_n = pair(config["cluster_shape_mn"])
    return along_n > 1, along_m > (2 if config["use_2cta_instrs"] else 1)


def choices(problem: Problem, config: Config) -> dict[str, object]:
    """What was chosen, in classes: what one class does for the code, its other members do too."""
    epilogue = problem.epilogue
    derived = SPACE.derive(config, problem, B200)
    return {
        "mma": (pair(config["mma_tiler_mn"])[0], config["use_2cta_instrs"]),
        "epi_n": derived["epi_n"],
        "shared": shared(config),
        "swap_ab": config["swap_ab"],
        "store": "tma" if config["use_tma_store"] else derived["vector"],
        "scheduler": "clc" if config["use_clc"] else "static",
        "pdl": config["use_pdl"],
        "split": config["split_k"] != 1,
        "ab": problem.ab_dtype,
        "out": problem.out_dtype,
        "layout": problem.layout,
        "batched": problem.batch > 1,
        "beta": epilogue.beta,
        "bias": epilogue.bias,
    }


def held(problem: Problem, config: Config) -> list[object]:
    """Pairs of choices, and what each kernel has of the values that do not come in pairs."""
    epilogue = problem.epilogue
    tile_n = pair(config["mma_tiler_mn"])[1]
    alone = [("n", tile_n), ("cluster", config["cluster_shape_mn"])]
    alone += [("plain", problem.out_dtype if epilogue == Epilogue() else "")]
    alone += [("act", epilogue.activation), ("alpha", epilogue.alpha), ("scale", epilogue.scale)]
    return [*alone, *combinations(choices(problem, config).items(), 2)]


def draws() -> Iterator[tuple[Problem, Config]]:
    """Random problems, most of them of extents at which every choice can be had."""
    generator = Random(0)
    yield from random_pairs(SPACE, seed=0, count=300, per_problem=2, dtypes=BLACKWELL_DTYPES)
    for problem, _ in random_pairs(SPACE, seed=1, count=500, dtypes=BLACKWELL_DTYPES):
        rows = generator.choice((min(problem.m, 512) // 16 * 16 or 16, 512))
        few = problem.with_extents(rows, 2048, 4096, min(problem.batch, 2))
        for fixed in STEERS:
            config = random_config(SPACE, few, generator, fixed)
            if config is not None:
                yield few, config


def chosen() -> list[tuple[Problem, Config, Arch]]:
    """The covering set for one target, and some of it for the other."""
    found = cover(list(draws()), held)
    odd = [(ODD, SPACE.default(ODD).replace(**Config.parse(words)), B200) for words in LAUNCHED]
    again = [one for one in found if one[0].ab_dtype != "int8"]  # sm_103a has no MMA for it
    return [(*one, B200) for one in found] + [(*one, B300) for one in again[:FOR_B300]] + odd


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The covering set, compiled; whatever fails to compile fails every test with its reason."""
    cases = {render(*case): case for case in chosen()}
    assert len(cases) <= KERNELS
    built, failed = [], []
    with Builder(Store(tmp_path_factory.mktemp("cache"))) as builder:
        for source, result in builder.build(cases):
            problem, config, arch = cases[source]
            if isinstance(result, Artifact):
                derived = SPACE.derive(config, problem, arch)
                built.append(Kernel(problem, config, derived, result, arch))
            else:
                failed.append(f"{problem} | {config}: {result.outcome} {result.message}\n{result.log[-800:]}")
    assert not failed, "\n".join(failed)
    return built


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
            library=str(kernel.artifact.library),
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


#: What goes round between warps, and who gives it back; each is filled by one arrival.
RINGS = (("stages", "empty_arrivals"), ("acc_stages", "acc_arrivals"), ("answers", "answer_arrivals"))


def barrier_arrivals(listing: str) -> Counter[int]:
    """How many mbarriers are initialised with each count of arrivals.

    A count is moved to a register, negated into another and shifted by one into the pair that is stored.
    """
    counts: dict[str, int] = {}
    found: Counter[int] = Counter()
    move = re.compile(r"UMOV (UR\d+), 0x([0-9a-f]+) ")
    negate = re.compile(r"UIADD3 (UR\d+), UPT, UPT, -(UR\d+), 0x100000, URZ")
    shift = re.compile(r"USHF\.L\.U32 (UR\d+), (UR\d+), 0x1, URZ")
    for line in listing.splitlines():
        if match := move.search(line):
            counts[match[1]] = int(match[2], 16)
        elif match := (negate.search(line) or shift.search(line)):
            counts[match[1]] = counts.get(match[2], 0)
        elif match := re.search(r"SYNCS\.EXCH\.64 URZ, \[\S+\], (UR\d+) ", line):
            found[counts[match[1]]] += 1
    return found


@pytest.fixture(scope="module")
def listings(kernels: list[Kernel], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, str]]:
    """The instructions of each kernel that multiplies."""
    tool = nvdisasm()
    if tool is None:
        pytest.skip("needs nvidia-cuda-nvdisasm")
    path = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
    found = []
    for kernel in kernels:
        [image] = cubins(kernel.artifact.object.read_bytes())
        path.write_bytes(image)
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True)
        parts = re.split(r"^\s*\.section\s+\.text\.", done.stdout, flags=re.MULTILINE)[1:]
        found.append((kernel, next(part for part in parts if "_k0" in part.split(",", 1)[0])))
    return found


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


def test_registers_stay_where_they_are(listings: list[tuple[Kernel, str]]) -> None:
    """No warpgroup asks for more: all threads together can have as many as one may hold."""
    for kernel, listing in listings:
        assert kernel.derived["max_registers"] == B200.registers_per_thread, str(kernel)
        assert "USETMAXREG" not in listing, str(kernel)


def test_nothing_touches_local_memory(listings: list[tuple[Kernel, str]]) -> None:
    """Spills would show as local loads and stores."""
    assert [str(k) for k, listing in listings if re.search(r"\b(LDL|STL)\b", listing)] == []
