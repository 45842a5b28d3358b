"""Laws of pinning: the folder is complete, ships what was measured, and refuses what it was not made for."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import DATA, build_driver, run_with_driver
from fake_kernels import H200, FakeGpu
from fake_torch import Place, Torch

from cutegen.build import Artifact, Toolchain
from cutegen.cli_pin import main
from cutegen.entry import Entry, Fingerprint
from cutegen.errors import PinError
from cutegen.kernels import Kernels
from cutegen.pin import pin_table
from cutegen.pin import pinned as loader
from cutegen.problem import Problem
from cutegen.render import Source
from cutegen.store import Store
from cutegen.table import Table

LINES = (
    "gemm 64x128x256 bf16 tn",
    "gemm 128x64x256 bf16 nn",
    "gemm 3x64x128x64 fp16 nt",
    "gemm 64x100x128 bf16 tn alpha beta bias=n act=relu",
    "gemm 64x128x128 bf16 tn out=fp32 bias=m",
    "gemm 64x128x256 e4m3 tn scale promote",
    "gemm 64x128x8192 bf16 tn",
)


class Workshop(FakeGpu):
    """Compiles every source into the recording kernel and keeps it where the real builder would."""

    def compile(self, source: Source, store: Store) -> Artifact:
        artifact = super().compile(source, store)
        artifact.folder.mkdir(parents=True, exist_ok=True)
        artifact.source.write_text(source.text)
        import tvm_ffi.libinfo

        include = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
        command = ["gcc", "-shared", "-fPIC", f"-DENTRY=__tvm_ffi_{artifact.symbol}", *include]
        command += [str(DATA / "recording_kernel.c"), "-o", str(artifact.library)]
        subprocess.run(command, check=True)
        return artifact


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One deployment of every kind of problem, made once and never changed."""
    root = tmp_path_factory.mktemp("pin")
    table = write_table(root / "table.json")
    pin_table(table, root / "deploy", kernels=Workshop(root / "cache").kernels())
    return root / "deploy"


def write_table(path: Path, lines: tuple[str, ...] = LINES, **changes: Any) -> Path:
    gpu = FakeGpu(path.parent / "unused")
    dispatcher = gpu.dispatcher()
    entries = []
    for line in lines:
        problem = Problem.parse(line)
        config = dispatcher.explain(problem).config
        assert config is not None
        if problem.k == 8192:
            config = config.replace(split_k=4, use_tma_store=False)
        entries.append(Entry(problem, config, time_us=1.0))
    fingerprint = replace(Fingerprint.of(H200, Toolchain.current()), **changes)
    Table(fingerprint, entries).save(path)
    return path


@pytest.fixture
def copy(deployed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(deployed, tmp_path / "deploy"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(path))
    yield path


def load(folder: Path, torch: Torch | None = None) -> tuple[Any, Torch]:
    """Import the folder's own loader, as a deployment does, over a stand-in for torch."""
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("pinned_under_test", folder / "pinned.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    deployment = module.Deployment(folder)
    torch = torch or Torch()
    deployment.torch, deployment.raw_stream = torch, torch._C._cuda_getCurrentRawStream
    return deployment, torch


def operands(problem: Problem, torch: Torch) -> tuple[Any, Any, dict[str, Any]]:
    """Stand-ins for the tensors of ``problem``, and the options of its call."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "e4m3": "float8_e4m3fn"}
    dtype, out = names[problem.ab_dtype], names[problem.out_dtype]
    lead = (problem.batch,) if problem.batch > 1 else ()

    def matrix(rows: int, columns: int, swapped: bool) -> Any:
        shape = (*lead, columns, rows) if swapped else (*lead, rows, columns)
        made = torch.tensor(*shape, dtype=dtype)
        if not swapped:
            return made
        last = (-1, -2)
        order = lambda values: (*values[:-2], *(values[at] for at in last))  # noqa: E731
        return replace(made, shape=order(made.shape), strides=order(made.strides))

    a = matrix(problem.m, problem.k, problem.layout in ("nt", "tt"))
    b = matrix(problem.k, problem.n, problem.layout in ("tn", "tt"))
    options: dict[str, Any] = {"out": torch.tensor(*lead, problem.m, problem.n, dtype=out)}
    epilogue = problem.epilogue
    if epilogue.alpha:
        options["alpha"] = 2.5
    if epilogue.beta:
        options |= {"c": torch.tensor(problem.m, problem.n, dtype=out), "beta": -0.5}
    if epilogue.bias:
        shape = (problem.n,) if epilogue.bias == "n" else (problem.m, 1)
        options["bias"] = torch.tensor(*shape, dtype=out)
    if epilogue.scale:
        options["scales"] = (torch.tensor(1, dtype="float32"), torch.tensor(1, dtype="float32"))
    if epilogue.activation:
        options["activation"] = epilogue.activation
    return a, b, options


def test_folder_holds_all_and_only_what_ships(deployed: Path) -> None:
    """Table, manifest, loader, and a source and a library per kernel; the manifest vouches for the rest."""
    manifest = json.loads((deployed / "manifest.json").read_text())
    found = {path.relative_to(deployed).as_posix() for path in deployed.rglob("*") if path.is_file()}
    assert found == {*manifest["files"], "manifest.json", "pinned.py"}
    symbols = {record["symbol"] for record in manifest["kernels"]}
    assert {f"kernels/{symbol}.{end}" for symbol in symbols for end in ("so", "py")} < found
    assert [record["problem"] for record in manifest["kernels"]] == [
        str(problem) for problem in Table.load(deployed / "table.json").entries
    ]
    load(deployed)[0].verify()


@pytest.mark.parametrize("line", LINES)
def test_calls_reach_the_kernel_in_the_order_of_the_convention(deployed: Path, log: Path, line: str) -> None:
    """Tensors with their strides, scalars, then factors, on torch's stream, read by tvm-ffi's own headers."""
    deployment, torch = load(deployed)
    problem = Problem.parse(line)
    a, b, options = operands(problem, torch)
    assert deployment.gemm(a, b, **options) is options["out"]
    record = next(
        r for r in json.loads((deployed / "manifest.json").read_text())["kernels"] if r["problem"] == line
    )
    given = [a, b, *(options[name] for name in ("out", "c", "bias") if name in options)]
    given += options.get("scales", ())
    if record["workspace_bytes"]:
        given.append(torch.allocated[-1])
        assert torch.allocated[-1].numel() * 4 >= record["workspace_bytes"]
    lines = log.read_text().splitlines()
    assert lines.pop(0) == "call stream 0x5eed"
    for tensor in given:
        words = lines.pop(0).split()
        assert words[:2] == ["tensor", hex(tensor.data_ptr())]
        shape = (tensor.numel(),) if tensor is options.get("bias") else tensor.shape
        steps = (1,) if tensor is options.get("bias") else tensor.stride()
        assert words[4:] == [*(f"{e}/{s}" for e, s in zip(shape, steps, strict=True)), "+0"]
        assert words[2] == "dev2:0" and words[3].split(".")[1] == str(tensor.element_size() * 8)
    assert lines[: len(record["scalars"])] == [f"int {scalar}" for scalar in record["scalars"]]
    factors = ["float 2.5"] * problem.epilogue.alpha + ["float -0.5"] * problem.epilogue.beta
    assert lines[len(record["scalars"]) :] == factors


def test_second_call_takes_new_addresses_and_factors(deployed: Path, log: Path) -> None:
    """The argument block is reused; only addresses and factors change."""
    deployment, torch = load(deployed)
    problem = Problem.parse(LINES[3])
    a, b, options = operands(problem, torch)
    deployment.gemm(a, b, **options)
    first = log.read_text().splitlines()
    moved = replace(a, address=a.address + 4096)
    deployment.gemm(moved, b, **{**options, "alpha": 7.0, "beta": 9.0})
    second = log.read_text().splitlines()[len(first) :]
    assert [x == y for x, y in zip(first, second, strict=True)].count(False) == 3
    assert second[-2:] == ["float 7", "float 9"] and hex(moved.address) in second[1]


def test_result_is_allocated_in_the_usual_dtype(deployed: Path, log: Path) -> None:
    """Without ``out`` the result is a new tensor; without elements nothing is launched."""
    deployment, torch = load(deployed)
    a, b, _ = operands(Problem.parse(LINES[0]), torch)
    found = deployment.gemm(a, b)
    assert (found.shape, str(found.dtype)) == ((64, 128), "torch.bfloat16")
    assert deployment.linear(replace(a, shape=(2, 32, 256), strides=(8192, 256, 1)), b.t()).shape == (
        2,
        32,
        128,
    )
    calls = log.read_text().count("call")
    assert deployment.gemm(replace(a, shape=(0, 256)), b).shape == (0, 128)
    assert log.read_text().count("call") == calls == 2


BAD: dict[str, tuple[Any, str]] = {
    "another size": (
        lambda a, b, t: ((replace(a, shape=(65, 256)), b), {}),
        "no kernel is pinned for m=65 n=128",
    ),
    "another dtype": (
        lambda a, b, t: ((replace(a, dtype=t.float16), replace(b, dtype=t.float16)), {}),
        "no kernel",
    ),
    "an epilogue": (
        lambda a, b, t: ((a, b), {"activation": "relu"}),
        "no kernel is pinned for .* activation=relu",
    ),
    "two dtypes": (lambda a, b, t: ((a, replace(b, dtype=t.float16)), {}), "must have one dtype"),
    "two devices": (lambda a, b, t: ((a, replace(b, device=Place("cuda", 1))), {}), "must be on one GPU"),
    "the CPU": (
        lambda a, b, t: ((replace(a, device=Place("cpu")), replace(b, device=Place("cpu"))), {}),
        "must be on one GPU",
    ),
    "no memory": (lambda a, b, t: ((replace(a, address=0), b), {}), "an operand has no memory"),
    "a gradient": (lambda a, b, t: ((replace(a, requires_grad=True), b), {}), "requires grad"),
    "extents": (lambda a, b, t: ((a, replace(b, shape=(255, 128))), {}), "they do not multiply"),
    "strides": (lambda a, b, t: ((replace(a, strides=(512, 2)), b), {}), "must be contiguous"),
    "odd output": (
        lambda a, b, t: ((a, b), {"out": replace(t.tensor(64, 128), address=0x7000_0002)}),
        "no kernel is pinned for .* unaligned_out=True",
    ),
    "float64": (lambda a, b, t: ((replace(a, dtype=type(t.int8)("float64")), b), {}), "dtype torch.float64"),
}


@pytest.mark.parametrize("name", BAD)
def test_unpinned_calls_are_refused(deployed: Path, name: str) -> None:
    """What the folder has no kernel for is an error that says so, and the next call works."""
    make, message = BAD[name]
    torch = Torch()
    torch.grad = True
    deployment, _ = load(deployed, torch)
    a, b, _ = operands(Problem.parse(LINES[0]), torch)
    (x, y), options = make(a, b, torch)
    with pytest.raises(RuntimeError, match=message) as caught:
        deployment.gemm(x, y, **options)
    assert type(caught.value).__name__ == "PinnedError"


def test_kernels_own_checks_are_reported(deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiled interface refuses is told in its words."""
    deployment, torch = load(deployed)
    a, b, _ = operands(Problem.parse(LINES[0]), torch)
    monkeypatch.setenv("KERNEL_FAILS", "1")
    with pytest.raises(
        RuntimeError, match="the kernel refused the call: Misaligned Tensor data on argument #0"
    ):
        deployment.gemm(a, b)


@pytest.mark.parametrize(
    ("torch", "field"),
    [
        (Torch(name="NVIDIA H100 80GB HBM3"), "gpu_name=NVIDIA H200, but GPU 0 has gpu_name=NVIDIA H100"),
        (Torch(major=10), r"compute_capability=9\.0, but GPU 0 has compute_capability=10\.0"),
        (Torch(sm_count=114), "sm_count=132, but GPU 0 has sm_count=114"),
    ],
)
def test_another_gpu_is_refused(deployed: Path, torch: Torch, field: str) -> None:
    """A kernel never runs on a GPU other than the one the table was measured on."""
    deployment, _ = load(deployed, torch)
    a, b, _ = operands(Problem.parse(LINES[0]), torch)
    with pytest.raises(RuntimeError, match=f"pinned for {field}"):
        deployment.gemm(a, b)


def test_wildcards_accept_another_gpu(tmp_path: Path, log: Path) -> None:
    """A table that says "*" pins for any GPU of that field."""
    table = write_table(tmp_path / "t.json", LINES[:1], gpu_name="*", sm_count="*", cutlass_dsl="*")
    pin_table(table, tmp_path / "deploy", kernels=Workshop(tmp_path / "cache").kernels())
    deployment, torch = load(tmp_path / "deploy", Torch(name="NVIDIA H100 PCIe", sm_count=114))
    a, b, _ = operands(Problem.parse(LINES[0]), torch)
    deployment.gemm(a, b)
    assert log.read_text().count("call") == 1


@pytest.mark.parametrize("name", ["manifest.json", "table.json", "library", "source"])
@pytest.mark.parametrize("harm", ["change", "remove"])
def test_changed_files_are_refused_by_name(copy: Path, name: str, harm: str) -> None:
    """One flipped byte, or a missing file, and the call that would use it is refused."""
    record = next(
        r for r in json.loads((copy / "manifest.json").read_text())["kernels"] if r["problem"] == LINES[0]
    )
    name = record.get(name, name)
    path = copy / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data) if harm == "change" else path.unlink()
    message = f"{Path(name).name} in .* " + ("has changed" if harm == "change" else "cannot be read")

    def use() -> None:
        deployment, torch = load(copy)
        a, b, _ = operands(Problem.parse(LINES[0]), torch)
        deployment.gemm(a, b)

    with pytest.raises(RuntimeError, match=message):
        use()


def test_cpu_without_the_instructions_is_refused() -> None:
    """Launch code that was compiled for a newer CPU would die of an illegal instruction."""
    with pytest.raises(loader.PinnedError, match="this CPU lacks avx9000"):
        loader._check_cpu(["avx9000"])


def test_loader_needs_no_cutegen(deployed: Path) -> None:
    """The folder works where cutegen, the DSL and Jinja2 cannot be imported, and tvm_ffi is not imported."""
    code = (
        "import sys\n"
        "for name in ('cutegen', 'cutlass', 'jinja2', 'nvidia_cutlass_dsl'): sys.modules[name] = None\n"
        "import pinned\n"
        "print(len(pinned._deployment().problems), 'tvm_ffi' in sys.modules)\n"
    )
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", code], cwd=deployed, capture_output=True, text=True)
    assert done.stdout.split() == [str(len(LINES)), "False"], done.stderr


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
    monkeypatch.setattr("cutegen.cli_pin.Kernels", lambda store, build: workshop.kernels(build=build))
    words = ["--table", str(table), "--out", str(tmp_path / "deploy"), "--problem", "gemm 60x128x256 bf16 tn"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"{LINES[0]}: exact: " in out
    assert f"gemm 60x128x256 bf16 tn: bucket (measured for {LINES[0]}): " in out
    assert "2 problems, 1 kernels, " in out


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
    with pytest.raises(PinError, match=r"no kernel to pin for gemm 64x128x256 bf16 tn: no compiled kernel"):
        pin_table(table, out, kernels=gpu.kernels(build="never"))
    old = write_table(tmp_path / "old.json", LINES[:1], cutlass_dsl="4.0.0")
    with pytest.raises(PinError, match=r"compiled by nvidia-cutlass-dsl 4\.0\.0, and .* tune again"):
        pin_table(old, out, kernels=gpu.kernels())
    anywhere = write_table(tmp_path / "any.json", LINES[:1], compute_capability="*")
    with pytest.raises(PinError, match=r"the table is for compute capability \*"):
        pin_table(anywhere, out, kernels=gpu.kernels())
    assert not out.exists()
    words = ["--table", str(table), "--out", str(out), "--no-build", "--cache-dir", str(tmp_path / "none")]
    assert main(words) == 3
    assert "cutegen: error: no kernel to pin" in capsys.readouterr().err


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
    table = write_table(tmp_path / "t.json", ("gemm 256x128x512 bf16 tn",))
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
