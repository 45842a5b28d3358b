"""Blackwell kernels through the real compiler: they compile, fit, and hold the instructions they should.

Compiled and inspected, never run by us. Needs the compiler but no GPU; takes about half a minute.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from covering import cover
from fake_gpu import build_driver, run_with_driver
from test_templates_compile import cubins, nvdisasm
from walk import random_config, random_pairs

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Builder
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
KERNELS = 40
"""Most kernels that this module compiles, so that it stays within its time."""
FOR_B300 = 5
"""Kernels of the set that are compiled for sm_103a as well: they differ in the name of the target only."""


@dataclass(frozen=True)
class Kernel:
    """One member of the covering set, compiled."""

    problem: Problem
    config: Config
    derived: Mapping[str, Value]
    artifact: Artifact
    arch: Arch

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
ODD = Problem(1000, 520, 72, layout="nn")
LAUNCHED = ("mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=4x2", "cluster_shape_mn=2x8")
LAUNCH = """
from pathlib import Path
import tvm_ffi
from cutegen.loader import load_kernel
from fake_gpu import FakeTensor
a, b, d = (tvm_ffi.from_dlpack(FakeTensor(*s, code=4, bits=16)) for s in ((1000, 72), (72, 520), (1000, 520)))
load_kernel(Path({library!r}), {symbol!r})(a, b, d, *{scalars!r})
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
    alone = [("n", tile_n), ("cluster", config["cluster_shape_mn"]), ("ab", problem.ab_dtype)]
    alone += [("plain", problem.out_dtype if epilogue == Epilogue() else "")]
    alone += [("act", epilogue.activation), ("alpha", epilogue.alpha), ("scale", epilogue.scale)]
    return [*alone, *combinations(choices(problem, config).items(), 2)]


def chosen() -> list[tuple[Problem, Config, Arch]]:
    """The covering set for one target, and some of it for the other."""
    generator = Random(0)
    draws = list(random_pairs(SPACE, seed=0, count=600, per_problem=2))
    for problem, _ in random_pairs(SPACE, seed=1, count=200):
        narrow = problem.with_extents(min(problem.m, 512) // 8 * 8 or 8, 2048, 1024, min(problem.batch, 2))
        swapped = random_config(SPACE, narrow, generator, {"swap_ab": (True,)})
        if swapped is not None:
            draws.append((narrow, swapped))
    found = cover(draws, held)
    odd = [(ODD, SPACE.default(ODD).replace(**Config.parse(words)), B200) for words in LAUNCHED]
    return [(*one, B200) for one in found] + [(*one, B300) for one in found[:FOR_B300]] + odd


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
        found = kernel.artifact.resources
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0), str(kernel)
        assert found.notes == (), str(kernel)
        assert found.threads == kernel.derived["threads"], str(kernel)
        assert found.registers * found.threads <= B200.registers and found.barriers <= 16, str(kernel)


def test_odd_problems_are_launched_as_planned(kernels: list[Kernel], tmp_path: Path) -> None:
    """Grid, block, cluster and shared memory, seen by a driver that records; large clusters are asked for."""
    driver = build_driver(tmp_path)
    found = [kernel for kernel in kernels if kernel.problem == ODD]
    assert len(found) == len(LAUNCHED)
    for kernel in found:
        (cm, cn), tile_n = pair(kernel.config["cluster_shape_mn"]), pair(kernel.config["mma_tiler_mn"])[1]
        units = -(-1000 // (128 * cm)) * -(-520 // (tile_n * cn))
        launch = SPACE.launch(kernel.config, ODD, 148)
        code = LAUNCH.format(
            library=str(kernel.artifact.library), symbol=kernel.artifact.symbol, scalars=launch.scalars
        )
        _, log = run_with_driver(driver, code, tmp_path / kernel.artifact.symbol)
        [line] = [line for line in log if line.startswith("cuLaunchKernelEx")]
        grid = f" grid {cm} {cn} {min(units, launch.scalars[0])} block 192 1 1 "
        assert f"{grid}smem {kernel.derived['smem_bytes']} " in line, line
        assert f" attribute 4 {cm} {cn} 1 " in line, line
        assert any(line.startswith("cuKernelSetAttribute 14 1 ") for line in log)


# --- the instructions ---


@pytest.fixture(scope="module")
def listings(kernels: list[Kernel], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, str]]:
    """The instructions of each kernel."""
    tool = nvdisasm()
    if tool is None:
        pytest.skip("needs nvidia-cuda-nvdisasm")
    path = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
    found = []
    for kernel in kernels:
        [image] = cubins(kernel.artifact.object.read_bytes())
        path.write_bytes(image)
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True)
        found.append((kernel, done.stdout))
    return found


def test_the_mma_is_of_one_block_or_of_two_as_the_config_says(listings: list[tuple[Kernel, str]]) -> None:
    """Four instructions for each k tile, all of the same kind; loads signal the pair's leader."""
    for kernel, listing in listings:
        flags = re.findall(r"UTCHMMA(\S*)", listing)
        assert flags and len(flags) % 4 == 0, str(kernel)
        assert {"2CTA" in flag for flag in flags} == {kernel.config["use_2cta_instrs"]}, str(kernel)
        loads = re.findall(r"UTMALDG\.\dD(\S*)", listing)
        assert {"2CTA" in flag for flag in loads} == {kernel.config["use_2cta_instrs"]}, str(kernel)


def test_tiles_are_multicast_exactly_along_the_cluster(listings: list[tuple[Kernel, str]]) -> None:
    """Pairs count as one block along m; without sharers nothing is multicast."""
    for kernel, listing in listings:
        loads = re.findall(r"UTMALDG\.\dD(\S*)", listing)
        assert {"MULTICAST" in flags for flags in loads} == set(kernel.sharing), str(kernel)


def test_results_leave_by_tma_exactly_when_the_config_says_so(listings: list[tuple[Kernel, str]]) -> None:
    """Otherwise they leave from registers, each write behind a test of its place."""
    for kernel, listing in listings:
        staged = kernel.config["use_tma_store"]
        assert ("UTMASTG" in listing) == staged, str(kernel)
        assert bool(re.search(r"\bSTG\.", listing)) != staged, str(kernel)
        assert "LDTM" in listing, str(kernel)


def test_nothing_touches_local_memory(listings: list[tuple[Kernel, str]]) -> None:
    """Spills would show as local loads and stores."""
    assert [str(k) for k, listing in listings if re.search(r"\b(LDL|STL)\b", listing)] == []
