"""NVIDIA's operators through the real API and compiler: listed, compiled, loaded and launched as our kernels.

Needs nvidia-cutlass-operators (the extra ``operators``) and the compiler, but no GPU.
"""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from fake_gpu import build_driver, run_with_driver
from fake_kernels import H200

from cutegen.arch import Arch, find_arch
from cutegen.build import Artifact, Builder, Toolchain
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.cli.tune import main as tune
from cutegen.deploy import pin_table
from cutegen.errors import ResourceError
from cutegen.families.gemm.operator_package import PACKAGE
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.operator_api import find_offers
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config


def installed() -> bool:
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        return False
    return importlib.util.find_spec("cutlass") is not None


pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(not installed(), reason=f"{PACKAGE} is not installed"),
]
SM90, SM100 = find_arch("sm_90a"), find_arch("sm_100a")
PROBLEM = Problem(256, 128, 512)
HOPPER = "source=operators operator=Sm90StaticPersistentGemmOperator"
BLACKWELL = "source=operators operator=PersistentDenseGemmOperator use_tma_store=true"
FIRST = Config.parse(f"{HOPPER} tile_shape_mn=128x128 cluster_shape_mn=2x1")
#: Every dtype, layout letter, rank and output width, and on Blackwell both schedulers and kinds of MMA.
COMPILED: tuple[tuple[Arch, str, str], ...] = (
    (SM90, str(PROBLEM), str(FIRST)),
    (SM90, "gemm 3x256x128x512 fp16 mn out=fp32", f"{HOPPER} tile_shape_mn=128x256 cluster_shape_mn=1x2"),
    (SM90, "gemm 256x128x512 e4m3 kk", f"{HOPPER} tile_shape_mn=64x64 cluster_shape_mn=2x2"),
    (SM90, "gemm 256x128x512 int8 kk", f"{HOPPER} tile_shape_mn=128x64 cluster_shape_mn=1x1"),
    (
        SM100,
        "gemm 256x128x512 bf16 kn",
        f"{BLACKWELL} mma_tiler_mn=256x256 use_2cta_instrs=true cluster_shape_mn=2x1 tile_scheduler=static",
    ),
    (
        SM100,
        "gemm 3x256x128x512 fp16 mk out=fp32",
        f"{BLACKWELL} mma_tiler_mn=64x128 use_2cta_instrs=false cluster_shape_mn=1x1 tile_scheduler=clc",
    ),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def artifacts(store: Store) -> list[Artifact]:
    """All of :data:`COMPILED`, in order; what does not compile fails every test with its reason."""
    sources = [render(Problem.parse(line), Config.parse(config), arch) for arch, line, config in COMPILED]
    with Builder(store) as builder:
        results = dict(builder.build(sources))
    failed = [f"{source.config}: {r.message}" for source, r in results.items() if not isinstance(r, Artifact)]
    assert not failed, "\n".join(failed)
    return [result for source in sources if isinstance(result := results[source], Artifact)]


def test_the_api_lists_what_the_spaces_hold(store: Store) -> None:
    """Hopper's 24 and Blackwell's 400 operators; those of other targets are refused in the API's words."""
    hopper, blackwell = (find_offers(PROBLEM, arch, store) for arch in (SM90, SM100))
    for offers, arch in ((hopper, SM90), (blackwell, SM100)):
        assert set(offers.configs) == set(find_space("gemm", arch, "operators").configs(PROBLEM))
    reasons = {refused.operator: refused.reason for refused in blackwell.refused}
    assert "cannot be compiled for target 100a" in reasons["Sm90StaticPersistentGemmOperator"]
    assert {str(r) for r in hopper.refused} == {
        "4 x Sm80TensorOpGemmOperator: cutegen has an adapter for Sm90StaticPersistentGemmOperator only"
    }


def test_operators_compile_into_artifacts_like_ours(artifacts: list[Artifact]) -> None:
    """With their resources, source and config in the cache, within the limits of the target."""
    assert len({artifact.key for artifact in artifacts}) == len(COMPILED)
    for artifact, (arch, _, config) in zip(artifacts, COMPILED, strict=True):
        meta = json.loads((artifact.folder / "meta.json").read_text())
        assert Config.from_json(meta["config"]) == Config.parse(config)
        assert artifact.arch == arch.name and artifact.shared_object.is_file()
        assert 0 < artifact.resources.smem_bytes <= arch.smem_bytes
        assert artifact.resources.threads >= 192 and artifact.resources.spill_store_bytes == 0
        assert all(kernel.name.startswith(artifact.symbol) for kernel in artifact.resources.kernels)
        assert PACKAGE in artifact.source.read_text()


LAUNCH = """
from pathlib import Path
import tvm_ffi
from cutegen.build.loader import load_kernel
from fake_gpu import FakeTensor
f = load_kernel(Path({library!r}), {symbol!r})
def matrix(at, *shape):
    return tvm_ffi.from_dlpack(FakeTensor(*shape, code=4, bits=16, address=0x10000 * at))
import sys
for m, clusters in ((4096, 66), (4096, 5), (256, 66)):
    f(matrix(1, m, 512), matrix(2, 512, 1024), matrix(3, m, 1024), clusters)
print("cutlass" in sys.modules)
"""


def test_the_number_of_clusters_is_an_argument_of_the_launch(tmp_path: Path, store: Store) -> None:
    """As many clusters as given, unless there are fewer tiles; nothing of the package is imported."""
    problem = Problem.parse("gemm 256x1024x512 bf16 kn")
    artifact = Kernels(store).artifact(problem, FIRST, SM90)
    code = LAUNCH.format(library=str(artifact.shared_object), symbol=artifact.symbol)
    out, log = run_with_driver(build_driver(tmp_path), code, tmp_path / "log")
    grids = [line.split(" grid ")[1].split()[:3] for line in log if line.startswith("cuLaunchKernelEx")]
    assert [int(x) * int(y) * int(z) for x, y, z in grids] == [2 * 66, 2 * 5, 2 * 8]
    assert out == "False\n"


def test_an_operator_is_dispatched_and_pinned_without_its_package(
    tmp_path: Path, store: Store, artifacts: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the artifact that the table names: loaded, and shipped in a folder that launches it."""
    entry = Entry(PROBLEM, FIRST, source="operators", artifact_key=artifacts[0].key, time_us=1.0)
    table = Table(Fingerprint.of(H200, Toolchain.current()), [entry])
    table.save(tmp_path / "t.json")

    def missing() -> str:
        raise ResourceError("gone")

    monkeypatch.setattr("cutegen.families.gemm.family.require_package", missing)
    kernels = Kernels(store, build="never")
    choice = Dispatcher(table, kernels=kernels, device=lambda index: H200).kernel(PROBLEM)
    assert choice is not None and callable(choice.function) and choice.launch.scalars == (66,)
    pin_table(tmp_path / "t.json", tmp_path / "deploy", kernels=kernels)
    code = f"""
import fake_torch
torch = sys.modules["torch"] = fake_torch.Torch()
sys.path.insert(0, {str(tmp_path / "deploy")!r})
import pinned
pinned.gemm(torch.tensor(256, 512), torch.tensor(128, 512).t())
print([name for name in ("cutegen", "cutlass", "tvm_ffi") if name in sys.modules])
"""
    out, log = run_with_driver(build_driver(tmp_path), code, tmp_path / "log")
    (launch,) = [line for line in log if line.startswith("cuLaunchKernelEx")]
    assert " grid 2 1 1 " in launch and out == "[]\n"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_command_compiles_both_sources_for_a_gpu_that_is_not_there(
    tmp_path: Path, arch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two kernels of each, with their resources; for programs the source is named."""
    words = ["gemm", "--arch", arch, "--shape", "256x128x512", "--sources", "cutegen,operators", "--json"]
    assert tune([*words, "--candidates", "1", "--quiet", "--cache-dir", str(tmp_path)]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert [row["source"] for row in result["candidates"]] == ["cutegen", "operators"]
    assert all(row["resources"]["registers"] for row in result["candidates"])
    assert result["outcomes"] == {"ok": 2} and result["refused"]
