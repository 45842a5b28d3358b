"""Laws of a deployment's loader: it launches what was pinned, exactly so, and refuses everything else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployments import LINES, Workshop, load, operands, write_table
from fake_torch import Place, Torch

from cutegen.pin import pin_table
from cutegen.pin import pinned as loader
from cutegen.problem import Problem

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One deployment of every kind of problem, made once and never changed."""
    root = tmp_path_factory.mktemp("pin")
    table = write_table(root / "table.json")
    pin_table(table, root / "deploy", kernels=Workshop(root / "cache").kernels())
    return root / "deploy"


@pytest.fixture
def copy(deployed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(deployed, tmp_path / "deploy"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(path))
    yield path


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
