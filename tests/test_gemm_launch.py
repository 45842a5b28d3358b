"""What the launch of a Hopper GEMM decides: how L2 keeps operands, where GPCs begin, whether it overlaps.

Needs the compiler but no GPU; takes some seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from disassembly import disassembled
from fake_gpu import build_driver, run_with_driver

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.families.gemm.perf_model.wave_order import GPCS, SMALL, SMALL_SMS, units_of_gpcs
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config, Value

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
NORMAL, FIRST, LAST = "0x1000000000000000", "0x12f0000000000000", "0x14f0000000000000"
#: In this kernel, behind tensors, the order of tiles and where GPCs begin: how to keep A and B of the MMA.
PLACES = "20 21"
#: And the first work units of GPCs.
FIRSTS = "18 19"
#: The attribute of launches that says it. Source: CUlaunchAttributeID, programmatic stream serialization.
OVERLAP = 6
LAUNCH = """
import tvm_ffi
from fake_gpu import FakeTensor

launch = tvm_ffi.load_module({library!r})[{symbol!r}]
for m, n, k in {sizes!r}:
    a, d = (FakeTensor(m, width, code=4, bits=16) for width in (k, n))
    b = FakeTensor(n, k, code=4, bits=16)
    b._shape[0], b._shape[1], b._strides[0], b._strides[1] = k, n, 1, k
    launch(a, b, d, {clusters}, 1, 0)
"""
#: Sizes, and whether the long operand, the weights, leaves L2 first.
SIZES = (
    (328, 5632, 3072, True),
    (512, 4096, 4096, True),
    (520, 5632, 8192, False),
    (328, 2048, 3072, False),
    (2000, 5632, 16384, False),
    (128, 24576, 1536, True),
    (128, 24576, 1024, True),
    (128, 32768, 512, False),
    (512, 4096, 4032, False),
)
#: Sizes, and whether a launch of tiles of 128 columns of D overlaps with the one before, if it may.
OVERLAPS = (
    (29, 9216, 4096, False),
    (29, 9216, 4032, True),
    (29, 49 * 128, 4096, True),
    (29, 50 * 128, 4096, False),
    (29, 92 * 128, 4096, False),
    (29, 93 * 128, 4096, True),
    (29, 512 * 128, 4096, True),
)


#: Tiles, clusters, whether they are swapped, k, and whether a launch on most multiprocessors overlaps, if it
#: may: tiles that L2 limits do not where rows are long. 128x256 and clusters that share the 128 rows use more
#: of what they load, and 128x32 waits for memory.
OVERLAPS_OF_TILES = (
    ((64, 128), (1, 1), False, 2040, True),
    ((64, 128), (1, 1), False, 2048, False),
    ((64, 128), (1, 1), True, 2048, False),
    ((64, 128), (1, 2), False, 4096, False),
    ((64, 128), (2, 1), False, 4096, True),
    ((64, 128), (2, 1), True, 4096, True),
    ((128, 256), (1, 1), False, 4096, True),
    ((128, 32), (1, 1), False, 4096, True),
)


@pytest.fixture(scope="module", params=[True, False], ids=["swapped", "plain"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Artifact]:
    return request.param, compiled(tmp_path_factory.mktemp("cache"), (128, 128), swap_ab=request.param)


def compiled(folder: Path, tile_shape_mn: tuple[int, int], **knobs: Value) -> Artifact:
    """Return a kernel, of single CTAs unless ``knobs`` say else."""
    problem = Problem(328, 5632, 512)
    shape: dict[str, Value] = {
        "tile_shape_mn": tile_shape_mn,
        "cluster_shape_mn": (1, 1),
        "mma_warpgroups": 2,
    }
    config = Config({**SPACE.default(problem), **shape, **knobs})
    with Builder(Store(folder)) as builder:
        [(_, result)] = builder.build([render(problem, config, ARCH)])
    assert isinstance(result, Artifact), result.message
    return result


def test_weights_that_few_tiles_read_leave_l2_first(kernel: tuple[bool, Artifact], tmp_path: Path) -> None:
    """Up to 512 rows and 4 tiles along them, where the other operand is at least 8 times as long as the first
    and as D."""
    swapped, artifact = kernel
    sizes = [size[:3] for size in SIZES]
    code = LAUNCH.format(
        library=str(artifact.shared_object), symbol=artifact.symbol, sizes=sizes, clusters=66
    )
    found = passed(tmp_path, code, PLACES)
    hinted = (FIRST, LAST) if swapped else (LAST, FIRST)
    assert found == [hinted if first else (NORMAL, NORMAL) for *_, first in SIZES]


def passed(folder: Path, code: str, places: str) -> list[tuple[str, ...]]:
    """Return some arguments of each launch of the kernel."""
    _, log = run_with_driver(build_driver(folder), code, folder / "log", FAKE_DRIVER_ARGUMENTS=places)
    return [tuple(re.findall(r" argument \d+ (\S+)", line)) for line in log if "cuLaunchKernelEx " in line]


@pytest.mark.parametrize("clusters", [132, 114])
def test_launches_tell_where_the_work_units_of_gpcs_begin(
    kernel: tuple[bool, Artifact], clusters: int, tmp_path: Path
) -> None:
    """A byte for each GPC: those that start early, and those that start once the small one is full."""
    _, artifact = kernel
    sizes = [(328, 5632, 512), (128, 2048, 512), (4096, 4096, 512)]
    code = LAUNCH.format(
        library=str(artifact.shared_object), symbol=artifact.symbol, sizes=sizes, clusters=clusters
    )
    want = []
    for m, n, _ in sizes:
        units = units_of_gpcs(min(132, -(-m // 128) * -(-n // 128)), 1)[-GPCS:]
        firsts = [first for first, _ in units]
        late = [first + SMALL_SMS for at, first in enumerate(firsts) if at != SMALL]
        packed = (sum(first << 8 * at for at, first in enumerate(each)) for each in (firsts, late))
        want.append(tuple(hex(each) if clusters == 132 else "0" for each in packed))
    assert passed(tmp_path, code, FIRSTS) == want


def test_every_load_of_a_tile_has_a_policy(kernel: tuple[bool, Artifact], tmp_path: Path) -> None:
    [code] = disassembled([kernel[1]], tmp_path)
    loads = re.findall(r"UTMALDG\S* .*", code)
    assert loads and all(re.search(r"desc\[UR\d+\]", load) for load in loads), loads


@pytest.mark.parametrize("use_pdl", [True, False])
def test_launches_on_half_of_the_multiprocessors_do_not_overlap(use_pdl: bool, tmp_path: Path) -> None:
    """Where rows to load are long, whatever the knob says; without it, none does."""
    artifact = compiled(tmp_path / "cache", (128, 32), swap_ab=True, use_pdl=use_pdl)
    found = overlapping(artifact, [size[:3] for size in OVERLAPS], tmp_path)
    assert found == [use_pdl and overlaps for *_, overlaps in OVERLAPS]


@pytest.mark.parametrize(("tile", "cluster", "swapped", "k", "overlaps"), OVERLAPS_OF_TILES)
def test_launches_of_tiles_that_l2_limits_do_not_overlap(
    tile: tuple[int, int], cluster: tuple[int, int], swapped: bool, k: int, overlaps: bool, tmp_path: Path
) -> None:
    """Their CTAs would have no neighbours in their GPC to share loads with."""
    knobs: dict[str, Value] = {"swap_ab": swapped, "use_pdl": True, "mma_warpgroups": tile[0] // 64}
    artifact = compiled(tmp_path / "cache", tile, cluster_shape_mn=cluster, **knobs)
    in_most = (tile[1] * 16, tile[0] * 8) if swapped else (tile[0] * 8, tile[1] * 16)
    clusters = 132 // (cluster[0] * cluster[1])
    assert overlapping(artifact, [(*in_most, k)], tmp_path, clusters) == [overlaps]


def overlapping(
    artifact: Artifact, sizes: list[tuple[int, ...]], folder: Path, clusters: int = 132
) -> list[bool]:
    """Return for each launch whether it may begin before the one before it has ended."""
    code = LAUNCH.format(
        library=str(artifact.shared_object), symbol=artifact.symbol, sizes=sizes, clusters=clusters
    )
    _, log = run_with_driver(build_driver(folder), code, folder / "log")
    return [f" attribute {OVERLAP} 1 " in line for line in log if "cuLaunchKernelEx " in line]
