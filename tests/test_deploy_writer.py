"""Laws of pinning: the folder is complete, ships what was measured, and replaces nothing but its like."""

from __future__ import annotations

import json
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from deployments import LINES, Workshop, load, operands, write_table
from fake_gpu import build_driver, run_with_driver
from fake_kernels import H200
from fake_torch import Torch

from cutegen.arch import find_arch
from cutegen.build import Toolchain
from cutegen.build.store import Store
from cutegen.cli.pin import main
from cutegen.deploy import pin_table
from cutegen.errors import PinError
from cutegen.families.gemm.problem import Problem
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.runtime.kernel_cache import Kernels

pytest.importorskip("torch")


def test_folder_holds_all_and_only_what_ships(tmp_path: Path) -> None:
    """Table, manifest, loader, and a source and a library per kernel; the manifest vouches for the rest."""
    deployed = tmp_path / "deploy"
    pin_table(write_table(tmp_path / "t.json"), deployed, kernels=Workshop(tmp_path / "cache").kernels())
    manifest = json.loads((deployed / "manifest.json").read_text())
    found = {path.relative_to(deployed).as_posix() for path in deployed.rglob("*") if path.is_file()}
    assert found == {*manifest["files"], "manifest.json", "pinned.py", cache_from_source("pinned.py")}
    symbols = {record["symbol"] for record in manifest["kernels"]}
    assert {f"kernels/{symbol}.{end}" for symbol in symbols for end in ("so", "py")} < found
    assert [record["problem"] for record in manifest["kernels"]] == [
        str(problem) for problem in Table.load(deployed / "table.json").entries
    ]
    load(deployed)[0].verify()


def test_wildcards_accept_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that says "*" pins for any GPU of that field."""
    log = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(log))
    table = write_table(tmp_path / "t.json", LINES[:1], gpu_name="*", sm_count="*", cutlass_dsl="*")
    pin_table(table, tmp_path / "deploy", kernels=Workshop(tmp_path / "cache").kernels())
    deployment, torch = load(tmp_path / "deploy", Torch(name="NVIDIA H100 PCIe", sm_count=114))
    a, b, _ = operands(Problem.parse(LINES[0]), torch)
    deployment.gemm(a, b)
    assert log.read_text().count("call") == 1


def test_a_table_for_any_capability_is_pinned_for_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is for that one alone, whose kernels it holds."""
    table = write_table(tmp_path / "t.json", LINES[:1], compute_capability="*")
    workshop = Workshop(tmp_path / "cache")
    monkeypatch.setattr("cutegen.cli.pin.Kernels", lambda store, build: workshop.kernels(build=build))
    words = ["--table", str(table), "--out", str(tmp_path / "deploy")]
    assert main(words) == 3
    assert main([*words, "--arch", "sm_90a"]) == 0
    manifest = json.loads((tmp_path / "deploy" / "manifest.json").read_text())
    assert manifest["gpu"]["compute_capability"] == "9.0"


def test_torch_winners_ship_without_a_kernel(tmp_path: Path) -> None:
    """A problem that the table gives to torch is answered by torch."""
    problem = Problem.parse(LINES[0])
    entry = Entry(problem, None, source="torch")
    Table(Fingerprint.of(H200, Toolchain.current()), [entry]).save(tmp_path / "t.json")
    pin_table(tmp_path / "t.json", tmp_path / "deploy", kernels=Workshop(tmp_path / "cache").kernels())
    deployment, torch = load(tmp_path / "deploy")
    called = []
    torch.mm = lambda a, b, out: called.append(out)
    a, b, options = operands(problem, torch)
    assert deployment.gemm(a, b, **options) is called[0]


def test_further_problems_are_answered_as_a_call_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--problem pins neighbours of what was measured, and the command says which rule found each."""
    table = write_table(tmp_path / "t.json", LINES[:1])
    workshop = Workshop(tmp_path / "cache")
    monkeypatch.setattr("cutegen.cli.pin.Kernels", lambda store, build: workshop.kernels(build=build))
    words = ["--table", str(table), "--out", str(tmp_path / "deploy"), "--problem", "gemm 60x128x256 bf16 kk"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"{LINES[0]}: exact: " in out
    assert f"gemm 60x128x256 bf16 kk: bucket (measured for {LINES[0]}): " in out
    assert "2 problems, 1 kernel, " in out


def test_pinning_again_replaces_but_nothing_else_is_touched(tmp_path: Path) -> None:
    """An earlier deployment gives way in one step; a folder that is none is refused."""
    kernels = Workshop(tmp_path / "cache").kernels()
    out = tmp_path / "deploy"
    pin_table(write_table(tmp_path / "t.json", LINES[:1]), out, kernels=kernels)
    pin_table(write_table(tmp_path / "t.json", LINES[1:2]), out, kernels=kernels)
    assert load(out)[0].problems == [LINES[1]]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    with pytest.raises(PinError, match="home exists and is no deployment"):
        pin_table(tmp_path / "t.json", tmp_path / "home", kernels=kernels)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_pinned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No entries, no kernel, or a kernel that this compiler would make differently."""
    gpu = Workshop(tmp_path / "cache")
    out = tmp_path / "deploy"
    with pytest.raises(PinError, match="has no entries, so there is nothing to pin"):
        pin_table(write_table(tmp_path / "empty.json", ()), out, kernels=gpu.kernels())
    table = write_table(tmp_path / "t.json", LINES[:1])
    with pytest.raises(PinError, match=r"no kernel to pin for gemm 64x128x256 bf16 kk: no compiled kernel"):
        pin_table(table, out, kernels=gpu.kernels(build="never"))
    old = write_table(tmp_path / "old.json", LINES[:1], cutlass_dsl="4.0.0")
    with pytest.raises(PinError, match=r"compiled by nvidia-cutlass-dsl 4\.0\.0, and .* tune again"):
        pin_table(old, out, kernels=gpu.kernels())
    anywhere = write_table(tmp_path / "any.json", LINES[:1], compute_capability="*")
    with pytest.raises(PinError, match=r"for any compute capability \('\*'\).*; name it with --arch"):
        pin_table(anywhere, out, kernels=gpu.kernels())
    with pytest.raises(PinError, match=r"compute_capability is '9\.0a' in the table but '10\.0a' here"):
        pin_table(table, out, kernels=gpu.kernels(), arch=find_arch("sm_100a"))
    early = write_table(tmp_path / "early.json", LINES[:1], cutegen="0.0.1")
    with pytest.raises(PinError, match=r"no call would use the table: cutegen is '0\.0\.1' in the table but"):
        pin_table(early, out, kernels=gpu.kernels())
    nameless = tmp_path / "tf32.json"
    entry = Entry(Problem.parse("gemm 64x128x256 tf32 kk"), None, source="torch")
    Table(Fingerprint.of(H200, Toolchain.current()), [entry]).save(nameless)
    with pytest.raises(PinError, match="torch has no dtype tf32, so no call poses it"):
        pin_table(nameless, out, kernels=gpu.kernels())
    with pytest.raises(PinError, match="torch has no dtype tf32, so no call poses it"):
        pin_table(nameless, out, kernels=gpu.kernels(), problems=[entry.problem])
    other = write_table(tmp_path / "other.json", LINES[:1])
    other.write_text(other.read_text().replace('"use_pdl"', '"use_pdm"'))
    with pytest.raises(
        PinError, match=r"use_pdm=true.*, is not valid in this version: unknown knob 'use_pdm'"
    ):
        pin_table(other, out, kernels=gpu.kernels())
    assert not out.exists()
    words = ["--table", str(table), "--out", str(out), "--no-build", "--cache-dir", str(tmp_path / "none")]
    assert main(words) == 3
    assert "cutegen: error: no kernel to pin" in capsys.readouterr().err


def test_entries_that_no_call_poses_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One table holds what was tuned on a GPU; tf32 has no torch dtype, which stops nobody from shipping the
    rest, and is said."""
    gpu, out = Workshop(tmp_path / "cache"), tmp_path / "deploy"
    table = write_table(tmp_path / "t.json", LINES[:1])
    tf32 = Entry(Problem.parse("gemm 64x128x256 tf32 kk"), None, source="torch")
    Table.load(table).with_entries([tf32]).save(table)
    pinned = pin_table(table, out, kernels=gpu.kernels())
    assert [str(item.answer.problem) for item in pinned] == [LINES[0]]
    words = ["--table", str(table), "--out", str(out), "--cache-dir", str(tmp_path / "cache")]
    assert main(words) == 0
    assert "left out: gemm 64x128x256 tf32 kk; torch has no dtype tf32" in capsys.readouterr().out


REAL_CALL = """
import sys, time
import fake_torch
torch = fake_torch.Torch()
sys.modules["torch"] = torch
sys.path.insert(0, {folder!r})
import pinned
a, b = torch.tensor(256, 512), torch.tensor(128, 512).t()
c = pinned.gemm(a, b)
print(c.shape, "tvm_ffi" in sys.modules)
try:
    pinned.gemm(a, b, out=torch.tensor(256, 128, address=0x7002))
except pinned.PinnedError as error:
    print(error)
"""


@pytest.mark.dsl
def test_a_compiled_kernel_launches_from_its_folder(tmp_path: Path) -> None:
    """The real compiler and loader and a driver that records: grid, cluster and stream as they should be."""
    table = write_table(tmp_path / "t.json", ("gemm 256x128x512 bf16 kk",))
    pin_table(table, tmp_path / "deploy", kernels=Kernels(Store(tmp_path / "cache")))
    driver = build_driver(tmp_path)
    code = REAL_CALL.format(folder=str(tmp_path / "deploy"))
    out, log = run_with_driver(driver, code, tmp_path / "log")
    first, second = out.splitlines()
    assert first == "(256, 128) False"
    assert second.startswith("no kernel is pinned for m=256 n=128 k=512") and "unaligned_out=True" in second
    [launch] = [line for line in log if line.startswith("cuLaunchKernelEx")]
    config = next(iter(Table.load(table).entries.values())).config
    assert config is not None
    cluster_m, cluster_n = config["cluster_shape_mn"]  # type: ignore[misc]
    assert f" grid {cluster_m} {cluster_n} " in launch and " stream 0x5eed " in launch
