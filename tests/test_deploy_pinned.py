"""Laws of a deployment's loader: it launches what was pinned, exactly so, and refuses everything else."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from deployments import LINES, Workshop, load, operands, write_table
from fake_torch import Place, Torch

from cutegen.deploy import pin_table, tensors
from cutegen.deploy import pinned as loader
from cutegen.families import strides
from cutegen.families.gemm.problem import Problem

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


def test_autograd_is_told_what_is_written(deployed: Path, log: Path) -> None:
    """It sees no write by an address; a new result is nobody's yet."""
    deployment, torch = load(deployed)
    a, b, options = operands(Problem.parse(LINES[0]), torch)
    for _ in range(2):
        deployment.gemm(a, b)
    assert torch.written == []
    for calls in (1, 2):
        deployment.gemm(a, b, out=options["out"])
        assert torch.written == [options["out"]] * calls


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
    "a gradient of the bias": (
        lambda a, b, t: ((a, b), {"bias": t.tensor(128, requires_grad=True)}),
        "bias requires grad",
    ),
    "a gradient of c": (
        lambda a, b, t: ((a, b), {"c": t.tensor(64, 128, requires_grad=True)}),
        "c requires grad",
    ),
    "a gradient of the result": (
        lambda a, b, t: ((a, b), {"out": t.tensor(64, 128, requires_grad=True)}),
        "out requires grad",
    ),
    "sizes": (lambda a, b, t: ((a, replace(b, shape=(255, 128))), {}), "they do not multiply"),
    "strides": (lambda a, b, t: ((replace(a, strides=(512, 2)), b), {}), "must be contiguous"),
    "odd output": (
        lambda a, b, t: ((a, b), {"out": replace(t.tensor(64, 128), address=0x7000_0002)}),
        "no kernel is pinned for .* unaligned_out=True",
    ),
    "float64": (lambda a, b, t: ((replace(a, dtype=type(t.int8)("float64")), b), {}), "dtype torch.float64"),
    "a number for a": (lambda a, b, t: ((1, b), {}), "a is 1; it must be a torch.Tensor"),
    "numbers for both": (lambda a, b, t: ((1, 2), {}), "a is 1; it must be a torch.Tensor"),
    "nothing for b": (lambda a, b, t: ((a, None), {}), "b is None; it must be a torch.Tensor"),
    "a list for out": (lambda a, b, t: ((a, b), {"out": [0]}), r"out is \[0\]; it must be a torch.Tensor"),
    "a number for c": (lambda a, b, t: ((a, b), {"c": 3}), "c is 3; it must be a torch.Tensor"),
    "text for bias": (lambda a, b, t: ((a, b), {"bias": "n"}), "bias is 'n'; it must be a torch.Tensor"),
    "a vector for a": (
        lambda a, b, t: ((t.tensor(256), b), {}),
        r"a has shape \(256,\); it must be a matrix",
    ),
    "a scalar for b": (lambda a, b, t: ((a, t.tensor()), {}), r"b has shape \(\); it must be a matrix"),
    "one scale": (
        lambda a, b, t: ((a, b), {"scales": 1.0}),
        r"scales is 1.0; it must be \(scale_a, scale_b\)",
    ),
    "numbers for scales": (lambda a, b, t: ((a, b), {"scales": (1, 2)}), "scale_a is 1; it must be a torch"),
    "text for alpha": (lambda a, b, t: ((a, b), {"alpha": "x"}), "alpha is 'x'; it must be a number"),
    "activations": (lambda a, b, t: ((a, b), {"activation": ["relu"]}), "it must be text"),
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


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (1, 2, "x is 1; it must be a torch.Tensor"),
        ((64, 256), 2, "w is 2; it must be a torch.Tensor"),
        ((), (128, 256), r"x has shape \(\) and w \(128, 256\); they must be \(..., k\) and \(n, k\)"),
        ((64, 256), (256,), r"and w \(256,\); they must be"),
    ],
)
def test_layers_of_what_are_no_matrices_are_refused(deployed: Path, x: Any, w: Any, message: str) -> None:
    deployment, torch = load(deployed)
    x, w = (torch.tensor(*given) if isinstance(given, tuple) else given for given in (x, w))
    with pytest.raises(RuntimeError, match=message) as caught:
        deployment.linear(x, w)
    assert type(caught.value).__name__ == "PinnedError"


CPU, SECOND = Place("cpu", 0), Place("cuda", 1)


@pytest.mark.parametrize("place", [CPU, SECOND], ids=["cpu", "cuda:1"])
@pytest.mark.parametrize("name", ["a", "b", "out", "c", "bias", "scale_a", "scale_b"])
def test_devices_of_all_tensors_count_in_every_call(
    deployed: Path, log: Path, name: str, place: Place
) -> None:
    """A call that only differs by where one tensor lies is refused after a good one, too."""
    line = LINES[5] if name.startswith("scale") else LINES[3]
    deployment, torch = load(deployed)
    a, b, options = operands(Problem.parse(line), torch)
    deployment.gemm(a, b, **options)
    moved = dict(options, a=a, b=b)
    if name.startswith("scale"):
        at = ("scale_a", "scale_b").index(name)
        scales = options["scales"]
        moved["scales"] = (*scales[:at], replace(scales[at], device=place), *scales[at + 1 :])
    else:
        moved[name] = replace(moved[name], device=place)
    with pytest.raises(RuntimeError, match=r"operands are on .*; they must be on one GPU"):
        deployment.gemm(**moved)
    deployment.gemm(a, b, **options)
    assert log.read_text().count("call") == 2


@pytest.mark.parametrize(
    ("line", "name"), [(0, "a"), (0, "b"), (0, "out"), (3, "a"), (3, "out"), (3, "c"), (3, "bias")]
)
def test_memory_that_was_freed_is_refused_in_every_call(
    deployed: Path, log: Path, line: int, name: str
) -> None:
    """A sharded model frees the storage of its parameters and keeps their shapes."""
    deployment, torch = load(deployed)
    a, b, options = operands(Problem.parse(LINES[line]), torch)
    deployment.gemm(a, b, **options)
    moved = dict(options, a=a, b=b)
    moved[name] = replace(moved[name], address=0)
    with pytest.raises(RuntimeError, match="an operand has no memory"):
        deployment.gemm(**moved)
    assert log.read_text().count("call") == 1


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_out_never_shares_memory_with_an_input(deployed: Path, log: Path, name: str, warm: bool) -> None:
    """As cutegen.gemm refuses it, in the first call and in later ones, which look at addresses alone."""
    deployment, torch = load(deployed)
    a, b, options = operands(Problem.parse(LINES[3]), torch)
    if warm:
        deployment.gemm(a, b, **options)
    given = {"a": a, "b": b, **options}[name]
    out = replace(options["out"], address=given.address)
    with pytest.raises(RuntimeError, match=f"out shares memory with {name}, which is read while") as caught:
        deployment.gemm(a, b, **{**options, "out": out})
    assert type(caught.value).__name__ == "PinnedError"
    assert (log.read_text().count("call") if warm else int(log.exists())) == warm


@pytest.mark.parametrize("at", [0, 1])
def test_out_never_shares_memory_with_a_scale(deployed: Path, log: Path, at: int) -> None:
    """A scale is read by the kernel as any other input."""
    deployment, torch = load(deployed)
    a, b, options = operands(Problem.parse(LINES[5]), torch)
    deployment.gemm(a, b, **options)
    scales = list(options["scales"])
    scales[at] = replace(scales[at], address=options["out"].address + 64)
    with pytest.raises(RuntimeError, match=f"out shares memory with scale_{'ab'[at]}"):
        deployment.gemm(a, b, **{**options, "scales": tuple(scales)})
    assert log.read_text().count("call") == 1


@pytest.mark.parametrize("name", ["out", "c"])
def test_alignment_counts_in_every_call(deployed: Path, log: Path, name: str) -> None:
    """The kernel of aligned outputs is not launched on another, which only its address tells."""
    line = LINES[7] if name == "c" else LINES[0]
    deployment, torch = load(deployed)
    a, b, options = operands(Problem.parse(line), torch)
    deployment.gemm(a, b, **options)
    moved = replace(options[name], address=options[name].address + 2)
    with pytest.raises(RuntimeError, match=r"no kernel is pinned for .* unaligned_out=True"):
        deployment.gemm(a, b, **{**options, name: moved})


def test_out_may_be_c_but_not_share_a_part_of_it(deployed: Path, log: Path) -> None:
    """Accumulating in place is what many call it for."""
    deployment, torch = load(deployed)
    a, b, options = operands(Problem.parse(LINES[3]), torch)
    out = options["out"]
    for c in (out, out, replace(out), options["c"], out, replace(out)):
        deployment.gemm(a, b, **{**options, "c": c})
    assert log.read_text().count("call") == 6
    for distance in (-16, 16):
        part = replace(options["c"], address=out.address + distance)
        with pytest.raises(RuntimeError, match="out shares some of its memory with c; pass out=c itself"):
            deployment.gemm(a, b, **{**options, "c": part})
    with pytest.raises(RuntimeError, match="out shares memory with a"):
        deployment.gemm(replace(a, address=out.address), b, **{**options, "c": out})


def test_sharing_memory_means_what_it_means_to_gemm() -> None:
    """The loader cannot import the rule, so it repeats it: the same answer for every pair of ranges."""
    torch, start = Torch(), 0x7000_0000
    views = [
        torch.tensor(*shape, address=start + 2 * offset, strides=stride)
        for shape, stride in (((4, 8), (32, 1)), ((4, 8), (16, 1)), ((8, 4), (1, 32)), ((16,), (1,)))
        for offset in (0, 4, 8, 24, 32, 100, 124, 128)
    ]
    pairs = list(product(views, views))
    assert [tensors.overlap(x, y) for x, y in pairs] == [strides.overlap(x, y) for x, y in pairs]
    assert len({tensors.overlap(x, y) for x, y in pairs}) == 2


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


def test_a_library_that_is_replaced_while_it_is_loaded_is_not_called(copy: Path, log: Path) -> None:
    """As when the folder is pinned again meanwhile: what was checked is not what was loaded."""
    deployment, torch = load(copy)
    a, b, options = operands(Problem.parse(LINES[0]), torch)
    read = deployment._read

    def racing(name: str, digest: str) -> bytes:
        data: bytes = read(name, digest)
        if name.endswith(".py"):
            library = (copy / name).with_suffix(".so")
            shutil.copy(library, copy / "other.so")
            (copy / "other.so").replace(library)
        return data

    deployment._read = racing
    with pytest.raises(RuntimeError, match=r"\.so in .* was replaced while it was being loaded"):
        deployment.gemm(a, b, **options)
    assert not log.exists()
    deployment._read = read
    deployment.gemm(a, b, **options)


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


def test_the_loader_comes_with_its_bytecode(deployed: Path, tmp_path: Path) -> None:
    """Python takes it for exactly this loader, and compiles a changed one itself."""
    folder = shutil.copytree(deployed, tmp_path / "copy")
    name = Path(importlib.util.cache_from_source("pinned.py")).name
    cached = folder / "__pycache__" / name
    before = cached.read_bytes()
    run = [sys.executable, "-c", "import pinned; print(pinned.__cached__, pinned.Deployment.__name__)"]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True)
    assert name in done.stdout and cached.read_bytes() == before
    with (folder / "pinned.py").open("a") as file:
        file.write("\nDeployment.__name__ = 'another'\n")
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True)
    assert "another" in done.stdout
