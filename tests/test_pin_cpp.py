"""The C++ library of a deployment: what torch sees of it, what its kernels are given, and what it refuses.

Built for the CPU, with kernels that write down their arguments; the compiler and torch's headers are real.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deployments import DATA, Workshop, load_module, write_table  # noqa: E402
from forked_torch import ForkedTorch  # noqa: E402

from cutegen.build import Artifact  # noqa: E402
from cutegen.build.render import Source  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.cli.main import main  # noqa: E402
from cutegen.deploy import cpp_library, pin_table, writer  # noqa: E402
from cutegen.deploy.manifest import CPP_LIBRARY  # noqa: E402
from cutegen.errors import DeviceError, PinError  # noqa: E402
from cutegen.families.ranges import parse_range  # noqa: E402

LINES = (
    "gemm 64x128x256 bf16 kk",
    "gemm 128x64x256 bf16 kn",
    "gemm 3x64x128x64 fp16 mn",
    "gemm 64x100x128 bf16 kk alpha beta bias=n act=relu",
    "gemm 64x128x128 bf16 kk out=fp32 bias=m",
    "gemm 64x128x256 e4m3 kk scale promote",
    "gemm 64x128x8192 bf16 kk",
)
HEAD = """
import json, os, sys
import torch
torch.ops.load_library(sys.argv[1])
gemm = torch.ops.cutegen_pinned.gemm
def rand(*shape, dtype=torch.bfloat16):
    return torch.ones(shape).to(dtype)
def log():
    path = os.environ["KERNEL_LOG"]
    text = open(path).read() if os.path.exists(path) else ""
    open(path, "w").close()
    return [line.split() for line in text.splitlines()]
def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"
"""


class Objects(Workshop):
    """Also keeps the object file."""

    def compile(self, source: Source, store: Store) -> Artifact:
        artifact = super().compile(source, store)
        if not artifact.object.exists():
            import tvm_ffi.libinfo

            include = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
            entry = f"-DENTRY=__tvm_ffi_{artifact.symbol}"
            command = ["gcc", "-c", "-fPIC", entry, *include, str(DATA / "recording_kernel.c")]
            subprocess.run([*command, "-o", str(artifact.object)], check=True)
        return artifact


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return Objects(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, workshop: Objects) -> Path:
    """A deployment with a library for tensors on the CPU."""
    root = tmp_path_factory.mktemp("cpp")
    with pytest.MonkeyPatch.context() as patch:
        build = cpp_library.build_library
        patch.setattr(writer, "build_library", lambda *given: build(*given, on_cpu=True))
        table = write_table(root / "t.json", LINES)
        ranges = [parse_range("gemm 1..512x128x512 bf16 kk")]
        pin_table(table, root / "deploy", kernels=workshop.kernels(), problems=ranges, cpp=True)
    return root / "deploy"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, workshop: Objects) -> Path:
    """One as it ships."""
    root = tmp_path_factory.mktemp("real")
    table = write_table(root / "t.json", LINES[:1])
    pin_table(table, root / "deploy", kernels=workshop.kernels(), cpp=True)
    return root / "deploy"


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedTorch]:
    with ForkedTorch(tmp_path_factory.mktemp("printed")) as forked:
        yield forked


#: Returns what a Python printed that only loaded the library of a deployment.
Run = Callable[..., Any]


@pytest.fixture
def run(forked: ForkedTorch, tmp_path: Path) -> Run:
    def run(folder: Path, code: str, **more: str) -> Any:
        more["KERNEL_LOG"] = str(tmp_path / "log")
        done = forked.run(HEAD + code, str(folder / CPP_LIBRARY), str(folder), **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_kernels_get_tensors_integers_and_factors(folder: Path, run: Run) -> None:
    """The same blocks as the loader in Python makes: its manifest says which integers."""
    code = """
a, b = rand(64, 256), rand(128, 256).t()
calls = []
gemm(a, b); calls.append(log())
gemm(rand(128, 256), rand(256, 64)); calls.append(log())
gemm(rand(3, 64, 64, dtype=torch.float16).mT, rand(3, 64, 128, dtype=torch.float16)); calls.append(log())
c = rand(64, 100)
gemm(rand(64, 128), rand(100, 128).t(), c, rand(100), alpha=2.5, beta=-0.5, activation="relu")
calls.append(log())
bias = rand(64, 1, dtype=torch.float32)
found = gemm(rand(64, 128), rand(128, 128).t(), bias=bias, out_dtype=torch.float32)
calls.append(log())
one, f8 = rand(1, dtype=torch.float32), torch.float8_e4m3fn
scaled = gemm(rand(64, 256, dtype=f8), rand(128, 256, dtype=f8).t(), None, None, one, one)
calls.append(log())
gemm(rand(64, 8192), rand(128, 8192).t()); calls.append(log())
imported = [name in sys.modules for name in ("cutegen", "tvm_ffi")]
print(json.dumps([calls, str(found.dtype), str(scaled.dtype), *imported]))
"""
    calls, found, scaled, *imported = run(folder, code)
    assert (found, scaled, imported) == ("torch.float32", "torch.bfloat16", [False, False])
    manifest = json.loads((folder / "manifest.json").read_text())
    by_problem = {record["problem"]: record for record in manifest["kernels"]}
    tensors = [[line[3:] for line in call if line[0] == "tensor"] for call in calls]
    bf16 = "dtype4.16.1"
    assert tensors[0] == [
        [bf16, "64/256", "256/1", "+0"],
        [bf16, "256/1", "128/256", "+0"],
        [bf16, "64/128", "128/1", "+0"],
    ]
    assert tensors[1][1] == [bf16, "256/64", "64/1", "+0"]
    assert tensors[2][0] == ["dtype2.16.1", "3/4096", "64/1", "64/64", "+0"]
    assert [len(each) for each in tensors] == [3, 3, 3, 5, 4, 5, 4]
    assert tensors[3][3] == [bf16, "64/100", "100/1", "+0"] and tensors[3][4] == [bf16, "100/1", "+0"]
    assert tensors[4][3] == ["dtype2.32.1", "64/1", "+0"] and tensors[5][0][0] == "dtype10.8.1"
    assert [line[1] for line in calls[3] if line[0] == "float"] == ["2.5", "-0.5"]
    for line, call in zip(LINES, calls, strict=True):
        record = by_problem[line]
        assert [int(each[1]) for each in call if each[0] == "int"] == record["scalars"]
        if record["workspace_bytes"]:
            workspace = next(each for each in reversed(call) if each[0] == "tensor")
            assert workspace[3:] == ["dtype2.32.1", f"{record['workspace_bytes'] // 4}/1", "+0"]


def test_every_size_of_a_range_gets_the_integers_of_its_step(folder: Path, run: Run) -> None:
    code = """
found = []
for m in (1, 2, 63, 64, 65, 255, 256, 257, 511, 512):
    gemm(rand(m, 512), rand(128, 512).t())
    found.append([m, [int(each[1]) for each in log() if each[0] == "int"]])
print(json.dumps([found, refused(lambda: gemm(rand(513, 512), rand(128, 512).t()))]))
"""
    found, beyond = run(folder, code)
    manifest = json.loads((folder / "manifest.json").read_text())
    (steps,) = [record["steps"] for record in manifest["ranges"]]
    for m, integers in found:
        assert integers == next(step[4] for step in steps if m <= step[0]), m
    assert "no kernel is pinned for m=513 n=128 k=512" in beyond and "pinned: gemm 64x100x128" in beyond


def test_it_traces_with_symbolic_rows_and_exports(folder: Path, run: Run) -> None:
    """No Python of ours: shapes come from the library itself."""
    code = """
from torch._subclasses.fake_tensor import FakeTensorMode
b = rand(128, 512).t()
with FakeTensorMode() as mode:
    fake = gemm(mode.from_tensor(rand(7, 512)), mode.from_tensor(b), out_dtype=torch.float32)
eager = torch.compile(lambda a, b: gemm(a, b) + 1, backend="aot_eager", dynamic=True, fullgraph=True)
shapes = [list(eager(rand(m, 512), b).shape) for m in (5, 9, 300)]
class Model(torch.nn.Module):
    def forward(self, a, b):
        return gemm(a, b)
rows = {"a": {0: torch.export.Dim("m", min=2, max=512)}, "b": None}
program = torch.export.export(Model(), (rand(6, 512), b), dynamic_shapes=rows)
names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
later = list(program.module()(rand(33, 512), b).shape)
print(json.dumps([str(fake.dtype), list(fake.shape), shapes, names, later]))
"""
    dtype, shape, shapes, names, later = run(folder, code)
    assert (dtype, shape) == ("torch.float32", [7, 128])
    assert shapes == [[5, 128], [9, 128], [300, 128]] and later == [33, 128]
    assert names == ["cutegen_pinned.gemm.default"]


def test_what_it_cannot_compute_is_refused_in_words(folder: Path, run: Run) -> None:
    code = """
a, b = rand(64, 256), rand(128, 256).t()
print(json.dumps([refused(call) for call in (
    lambda: gemm(a, b[:100]),
    lambda: gemm(a.double(), b.double()),
    lambda: gemm(a[:, ::2], b[::2]),
    lambda: gemm(a, b, activation="tanh"),
    lambda: gemm(a, b, bias=rand(64)),
    lambda: gemm(a, b, scale_a=rand(1)),
    lambda: gemm(a, b.half()),
    lambda: gemm(a, b, rand(64, 64)),
)] + [list(gemm(a[:0], b).shape)]))
"""
    *found, empty = run(folder, code)
    for text, message in zip(
        found,
        (
            "do not multiply",
            "dtype that no kernel takes",
            "rows or columns must be contiguous",
            "no kernel has the activation tanh",
            "bias has shape (64); it must be (128) or (64, 1)",
            "pass scale_a and scale_b",
            "must have one dtype",
            "c has shape (64, 64); it must be (64, 128)",
        ),
        strict=True,
    ):
        assert message in text, text
    assert empty == [0, 128]


def test_a_kernel_that_refuses_is_an_error_with_its_words(folder: Path, run: Run) -> None:
    code = "print(json.dumps(refused(lambda: gemm(rand(64, 256), rand(128, 256).t()))))"
    found = run(folder, code, KERNEL_FAILS="1")
    assert "refused the call: ValueError: Misaligned Tensor data on argument #0" in found


def test_the_library_that_ships_takes_gpus_only(real: Path, run: Run) -> None:
    """It has no symbol but torch's to resolve, and needs neither tvm-ffi nor Python."""
    code = "print(json.dumps(refused(lambda: gemm(rand(64, 256), rand(128, 256).t()))))"
    assert "is not on a GPU; move it there" in run(real, code)
    library = str(real / CPP_LIBRARY)
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in needed and "tvm" not in needed and "python" not in needed
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    assert "TVMFFI" not in symbols and "__tvm_ffi" not in symbols


def test_the_loader_traces_by_the_library(folder: Path, run: Run) -> None:
    """``import pinned`` finds the operator of the library, and does not register its own."""
    code = """
sys.path.insert(0, sys.argv[2])
import pinned
f = torch.compile(lambda x, w: pinned.linear(x, w) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
found = [list(f(rand(2, m, 512), rand(128, 512)).shape) for m in (3, 8)]
print(json.dumps([found, sum(line[0] == "call" for line in log())]))
"""
    assert run(folder, code) == [[[2, 3, 128], [2, 8, 128]], 2]


def test_without_a_library_the_loader_registers_the_operator(
    tmp_path: Path, workshop: Objects, forked: ForkedTorch
) -> None:
    table = write_table(tmp_path / "t.json", LINES[:1])
    pin_table(table, tmp_path / "deploy", kernels=workshop.kernels())
    code = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import pinned
class Model(torch.nn.Module):
    def forward(self, x, w):
        return pinned.linear(x, w, activation="relu")
x, w = torch.ones(2, 32, 256, dtype=torch.bfloat16), torch.ones(128, 256, dtype=torch.bfloat16)
program = torch.export.export(Model(), (x, w))
names = [str(n.target) for n in program.graph.nodes if "pinned" in str(n.target)]
try:
    torch.ops.cutegen_pinned.gemm(x[0], w.t())
except Exception as error:
    said = str(error)
print(json.dumps([names, said]))
"""
    done = forked.run(code, str(tmp_path / "deploy"))
    assert done.returncode == 0, done.stderr
    names, said = json.loads(done.stdout.splitlines()[-1])
    assert names == ["cutegen_pinned.gemm.default"] and "operands are on cpu" in said


def test_a_changed_library_is_refused(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    with (tmp_path / "copy" / CPP_LIBRARY).open("ab") as file:
        file.write(b"x")
    with pytest.raises(RuntimeError, match=f"{CPP_LIBRARY} in .* has changed"):
        load_module(tmp_path / "copy").Deployment(tmp_path / "copy").verify()


def test_what_is_missing_to_build_it_is_said(
    tmp_path: Path, workshop: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_table(tmp_path / "t.json", LINES[:1])
    monkeypatch.setattr(cpp_library, "CXX_COMPILERS", ())
    with pytest.raises(PinError, match=r"no C\+\+ compiler"):
        pin_table(table, tmp_path / "deploy", kernels=workshop.kernels(), cpp=True)
    monkeypatch.undo()
    monkeypatch.setattr(cpp_library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PinError, match=r"headers of torch 2\.10"):
        cpp_library.build_library({}, "")
    assert not (tmp_path / "deploy").exists()


def test_recorded_problems_are_pinned_with_all_rows(
    tmp_path: Path, workshop: Objects, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forward calls only; nothing else of the table."""
    from cutegen.cli import pin
    from cutegen.families.registry import parse_problem
    from cutegen.records.recorded_calls import Call, append_calls

    table = write_table(tmp_path / "t.json", LINES[:2])
    recorded = tmp_path / "model.jsonl"
    forward = Call(parse_problem("gemm 16x128x256 bf16 kk"), "forward", "default", "cutegen")
    backward = Call(parse_problem("gemm 16x256x128 bf16 kn"), "backward", "default", "cutegen")
    append_calls(recorded, {"gpu": None}, {forward: 2, backward: 2})
    monkeypatch.setattr(pin, "Kernels", lambda store, build: workshop.kernels())
    command = ["pin", "--table", str(table), "--recorded", str(recorded), "--out", str(tmp_path / "deploy")]
    assert main([*command, "--m", "1:600"]) == 0
    manifest = json.loads((tmp_path / "deploy" / "manifest.json").read_text())
    assert manifest["kernels"] == [] and [r["problem"] for r in manifest["ranges"]] == [
        "gemm 1..600x128x256 bf16 kk"
    ]
    assert main(command) == 0
    assert load_module(tmp_path / "deploy").Deployment(tmp_path / "deploy").problems == [str(forward.problem)]
    for more, message in ((["--m", "8192"], "FIRST..LAST"), (["--m", "9:1"], "FIRST up to LAST")):
        assert main([*command, *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["pin", "--table", str(table), "--out", str(tmp_path / "x"), "--m", "1:2"]) == 2
    assert main(["pin", "--out", str(tmp_path / "x")]) == 2
    append_calls(tmp_path / "b.jsonl", {"gpu": None}, {backward: 2})
    assert main([*command[:4], str(tmp_path / "b.jsonl"), *command[5:]]) == 2
    assert "no forward call" in capsys.readouterr().err

    def absent() -> Any:
        raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.setattr(pin, "present_device", absent)
    assert main(["pin", "--recorded", str(recorded), "--out", str(tmp_path / "y")]) == 3
    assert "--table names the table, and so the GPU, to pin for" in capsys.readouterr().err


MAIN = """
#include <ATen/ops/ones.h>
#include <dlfcn.h>
#include <iostream>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int, char **arguments) {
    if (!dlopen(arguments[1], RTLD_NOW)) return std::cerr << dlerror(), 1;
    torch::inductor::AOTIModelPackageLoader model(arguments[2]);
    for (int rows : {5, 64, 300}) {
        std::vector<at::Tensor> inputs = {at::ones({rows, 512}, at::kBFloat16)};
        std::cout << model.run(inputs)[0].size(0) << " ";
    }
}
"""


def test_a_packaged_model_runs_without_python(folder: Path, tmp_path: Path, run: Run) -> None:
    """AOTInductor's package in a plain C++ program: each call reaches a kernel with its own rows."""
    code = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(128, 512, dtype=torch.bfloat16), requires_grad=False)
    def forward(self, x):
        return torch.relu(gemm(x, self.w.t()))
rows = {"x": {0: torch.export.Dim("m", min=2, max=512)}}
with torch.no_grad():
    program = torch.export.export(Model(), (rand(6, 512),), dynamic_shapes=rows)
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # it runs three times
    options["cpp.vec_isa_ok"] = False  # else programs are compiled to find out what the CPU can
    if hasattr(torch._inductor.config.aot_inductor, "precompile_headers"):
        options["aot_inductor.precompile_headers"] = False  # they take longer than the wrapper
    path = sys.argv[2] + "/../model.pt2"
    made = torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
print(json.dumps(made))
"""
    package = run(folder, code)
    (tmp_path / "main.cpp").write_text(MAIN)
    root = Path(torch.__file__).parent
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    link = [
        f"-L{root}/lib",
        f"-Wl,-rpath,{root}/lib",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    program = str(tmp_path / "main")
    command = ["g++", "-std=c++20", *include, str(tmp_path / "main.cpp"), *link, "-ldl", "-o", program]
    subprocess.run(command, check=True, timeout=250)
    log = tmp_path / "cpp.log"
    done = subprocess.run(
        [program, str(folder / CPP_LIBRARY), package],
        env={**os.environ, "KERNEL_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "64", "300"]
    calls = [line.split() for line in log.read_text().splitlines() if line.startswith("tensor")]
    assert [call[4] for call in calls[0::3]] == ["5/512", "64/512", "300/512"]


def test_texts_of_a_manifest_stay_texts(folder: Path) -> None:
    """Names in a table are data: in the source that is compiled they are quoted, and numbers are numbers."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["gpu"]["gpu_name"] = 'X"; int y = 1; const char *z = "\\'
    assert 'GPU_NAME = "X\\"; int y = 1; const char *z = \\"\\\\";' in cpp_library.tables_text(manifest)
    manifest["gpu"]["sm_count"] = "132; int y = 1"
    with pytest.raises(ValueError, match="invalid literal"):
        cpp_library.tables_text(manifest)
