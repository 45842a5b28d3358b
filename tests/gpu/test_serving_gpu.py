"""Serving on a real GPU: warmed up, frozen, captured; pinned GEMMs as a C++ operator in other processes."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hopper import GPU, NEEDS_HOPPER

from cutegen.build import Toolchain
from cutegen.deploy import pin_table
from cutegen.deploy.manifest import CPP_LIBRARY
from cutegen.errors import FrozenError, LaunchError
from cutegen.families.ranges import parse_range
from cutegen.families.registry import find_space, parse_problem
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.search.defaults import default_config

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
BF16 = torch.bfloat16
N, K = 512, 1024
LINE = f"gemm 64x{N}x{K} bf16 kk"


@pytest.fixture
def operators() -> Iterator[None]:
    before = cutegen.configure()
    cutegen.reset_counters()
    gc.collect()  # to destroy a graph of another test while one is captured would end the capture
    yield
    cutegen.use(before)


def rand(m: int, n: int) -> Any:
    return torch.randn(m, n, device="cuda", dtype=BF16)


def near(found: Any, a: Any, b: Any) -> None:
    want, most = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((found.double() - want).abs() <= want.abs() * 2.0**-8 + most * 2.0**-20).all()


def test_a_warmed_up_program_is_frozen_and_captures(operators: None) -> None:
    """The sizes for which vLLM captures: nothing is compiled then; the rest is counted or refused."""
    cutegen.configure(fallback="none")
    model = torch.nn.Sequential(torch.nn.Linear(K, N, device="cuda", dtype=BF16))
    warmed = cutegen.warmup(model, m="vllm")
    assert warmed.wanted and not warmed.failed and warmed.launched == len(warmed.wanted)
    cutegen.freeze("error")
    w, bias = rand(N, K), rand(1, N)[0]
    for m in (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)):
        x, out = rand(m, K), torch.zeros(m, N, device="cuda", dtype=BF16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cutegen.linear(x, w, bias, out=out)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        want = x.double() @ w.double().t() + bias.double()
        most = x.double().abs() @ w.double().abs().t() + bias.double().abs()
        assert ((out.double() - want).abs() <= want.abs() * 2.0**-8 + most * 2.0**-20).all()
    with pytest.raises(FrozenError, match="act=gelu"):
        cutegen.linear(rand(16, K), w, bias, "gelu")
    cutegen.freeze("fallback")
    found = cutegen.linear(rand(16, K), w, bias, "silu")
    assert found.shape == (16, N) and cutegen.counters()["calls"]["missed"] == 1
    assert cutegen.counters()["late_compiles"] == 0


def test_what_a_table_leaves_to_torch_is_captured_too(operators: None, tmp_path: Path) -> None:
    """Warmed up, frozen and captured without a kernel of ours, since torch won there."""
    assert GPU is not None
    path = tmp_path / "t.json"
    entry = Entry(parse_problem(LINE), None, source="torch")
    Table(Fingerprint.of(GPU, Toolchain.current()), [entry]).save(path)
    cutegen.load_table(path)
    cutegen.warmup(path)
    cutegen.freeze("error")
    x, w, out = rand(64, K), rand(N, K), torch.zeros(64, N, device="cuda", dtype=BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutegen.gemm(x, w.t(), out=out)
    graph.replay()
    torch.cuda.synchronize()
    near(out, x, w.t())
    assert cutegen.counters()["calls"] == {"torch": 1} and cutegen.counters()["late_compiles"] == 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # nothing was captured before the error
def test_a_capture_of_an_unwarmed_problem_names_warmup(operators: None) -> None:
    x, w = rand(16, 192), rand(320, 192)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match=r"cutegen\.warmup"), torch.cuda.graph(graph):
        cutegen.linear(x, w, activation="gelu_tanh")


def test_a_captured_graph_keeps_its_kernel_after_a_swap(operators: None, tmp_path: Path) -> None:
    """Bit for bit; the next eager call uses the new table."""
    assert GPU is not None
    problem = parse_problem(LINE)
    space = find_space("gemm", GPU.arch)
    config = default_config(space, problem, GPU.sm_count)
    other = config.replace(split_k=2, use_tma_store=False)
    if not space.is_valid(problem, other):
        pytest.skip("the default splits k in another way")
    Table(Fingerprint.of(GPU, Toolchain.current()), [Entry(problem, other)]).save(tmp_path / "t.json")
    cutegen.configure(build="allow", fallback="none")
    x, w, out = rand(64, K), rand(N, K), torch.zeros(64, N, device="cuda", dtype=BF16)
    cutegen.gemm(x, w.t(), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cutegen.gemm(x, w.t(), out=out)
    before = out.clone()
    cutegen.load_table(tmp_path / "t.json", fallback="none")
    near(cutegen.gemm(x, w.t()), x, w.t())
    assert cutegen.counters()["problems"] == {"exact": 1}
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, before)


# --- C++ operators ---

CALLS = """
import json, sys, threading
for name in ("cutegen", "cutlass", "tvm_ffi", "jinja2"):
    sys.modules[name] = None
import torch
torch.ops.load_library(sys.argv[1])
gemm = torch.ops.cutegen_pinned.gemm
N, K = int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
def rand(m, n):
    return torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
def near(found, a, b):
    want, most = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((found.double() - want).abs() <= want.abs() * 2.0**-8 + most * 2.0**-20).all(), found.shape
b = rand(N, K).t()
for m in (1, 2, 7, 64, 65, 100, 256, 511, 512):
    a = rand(m, K)
    near(gemm(a, b), a, b)
try:
    gemm(rand(513, K), b)
except RuntimeError as error:
    assert "no kernel is pinned for m=513" in str(error), error
else:
    raise AssertionError("513 rows")
side = torch.cuda.Stream()
a, big = rand(64, K), torch.randn(8192, 8192, device="cuda")
with torch.cuda.stream(side):  # the operand is written late on this stream, which the kernel must wait for
    for _ in range(4):
        big = big @ big * 1e-4
    late = a * 2
    found = gemm(late, b)
side.synchronize()
near(found, a * 2, b)
errors = []
def work(seed):
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            for m in (64, 100, 512):
                mine = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
                found = gemm(mine, b)
                torch.cuda.current_stream().synchronize()
                near(found, mine, b)
    except Exception as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
graph, x = torch.cuda.CUDAGraph(), rand(64, K)
with torch.cuda.graph(graph):
    y = gemm(x, b)
x.copy_(rand(64, K))
graph.replay()
torch.cuda.synchronize()
near(y, x, b)
import time
for _ in range(200):
    gemm(x, b)
torch.cuda.synchronize()
times = {}
for name, call in (("pinned", lambda: gemm.default(x, b)), ("torch.mm", lambda: torch.mm(x, b))):
    best = 1e9
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(300):
            call()
        best = min(best, (time.perf_counter() - begun) / 300)
        torch.cuda.synchronize()
    times[name] = round(best * 1e6, 2)
print(json.dumps({"host_us": times, "torch": torch.__version__}))
"""
MODEL = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
N, K = int(sys.argv[2]), int(sys.argv[3])
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
        self.w = torch.nn.Parameter(w, requires_grad=False)
    def forward(self, x):
        return torch.relu(torch.ops.cutegen_pinned.gemm(x, self.w.t()))
def check(found, model, x):
    want = torch.relu(x.double() @ model.w.double().t())
    most = x.double().abs() @ model.w.double().abs().t()
    assert ((found.double() - want).abs() <= want.abs() * 2.0**-8 + most * 2.0**-20).all(), found.shape
model = Model()
"""
COMPILED = (
    MODEL
    + """
with torch.no_grad():
    run = torch.compile(model, dynamic=True, fullgraph=True)
    for m in (16, 64, 300):
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        check(run(x), model, x)
print("all right")
"""
)
#: The wrapper is compiled without optimising, since it runs three times, and without headers compiled before,
#: which take longer than itself.
PACKAGE = (
    MODEL
    + """
x = torch.randn(300, K, device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    rows = {"x": {0: torch.export.Dim("m", min=2, max=512)}}
    program = torch.export.export(model, (x,), dynamic_shapes=rows)
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    if hasattr(torch._inductor.config.aot_inductor, "precompile_headers"):
        options["aot_inductor.precompile_headers"] = False
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[4], inductor_configs=options)
    torch.save({"w": model.w}, sys.argv[4] + ".pt")
print("all right")
"""
)
PACKAGED = """
import sys
for name in ("cutegen", "cutlass", "tvm_ffi"):
    sys.modules[name] = None
import torch
torch.ops.load_library(sys.argv[1])
run = torch._inductor.aoti_load_package(sys.argv[4])
w = torch.load(sys.argv[4] + ".pt")["w"]
for m in (5, 64, 511):
    x = torch.randn(m, w.shape[1], device="cuda", dtype=torch.bfloat16)
    found = run(x)
    found = found[0] if isinstance(found, (tuple, list)) else found
    want, most = torch.relu(x.double() @ w.double().t()), x.double().abs() @ w.double().abs().t()
    assert ((found.double() - want).abs() <= want.abs() * 2.0**-8 + most * 2.0**-20).all(), m
print("all right")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a deployment that serves a range of rows."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    assert GPU is not None
    folder = tmp_path_factory.mktemp("cpp")
    problem = parse_problem(LINE)
    entry = Entry(problem, default_config(find_space("gemm", GPU.arch), problem, GPU.sm_count))
    table = Table(Fingerprint.of(GPU, Toolchain.current()), [entry], fallback="none")
    table.save(folder / "t.json")
    rows = parse_range(f"gemm 1..512x{N}x{K} bf16 kk")
    pin_table(folder / "t.json", folder / "deploy", problems=[rows], cpp=True)
    return folder / "deploy" / CPP_LIBRARY


def run(code: str, library: Path, *more: str) -> str:
    # Inductor's compiler is that of the library. A package by one that brings its own libstdc++ ended in a
    # segmentation fault when Python loaded it, in torch's std::regex, whatever the model.
    # What vector instructions the CPU has, six programs compiled one after another, is asked when packages
    # are made and again when they are loaded; nothing here runs on the CPU.
    env = {**os.environ, "CXX": "g++", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    command = [sys.executable, "-X", "faulthandler", "-c", code, str(library), str(N), str(K), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_a_process_that_only_loads_the_library_computes_what_torch_does(library: Path) -> None:
    """All sizes of the range, another stream, two threads, a CUDA graph."""
    found = json.loads(run(CALLS, library))
    logging.getLogger("cutegen").warning("host time of the C++ operator: %s", found)


def test_compiled_models_call_it(library: Path) -> None:
    """One compilation for all rows."""
    assert run(COMPILED, library) == "all right"


def test_packaged_models_call_it(library: Path, tmp_path: Path) -> None:
    """The package runs in a Python that has no cutegen."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, as AOTInductor does")
    package = str(tmp_path / "model.pt2")
    assert run(PACKAGE, library, package) == "all right"
    assert run(PACKAGED, library, package) == "all right"


def test_pinned_calls_are_captured_from_two_threads(operators: None) -> None:
    """Frozen calls of several threads, on streams of their own."""
    cutegen.configure(build="allow", fallback="none")
    w = rand(N, K).t()
    cutegen.gemm(rand(64, K), w)
    cutegen.freeze("error")
    errors: list[str] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    x = rand(64, K)
                    found = cutegen.gemm(x, w)
                    torch.cuda.current_stream().synchronize()
                    near(found, x, w)
        except (AssertionError, RuntimeError, LaunchError) as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and cutegen.counters()["calls"]["default"] == 40
