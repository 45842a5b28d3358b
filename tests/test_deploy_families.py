"""Pinned kernels of declared families: arguments bound by name, and the safety that GEMMs have."""

from __future__ import annotations

import hashlib
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
from deployments import LINES as GEMMS
from deployments import Workshop, load, load_module, operands, write_table
from fake_gpu import build_driver, run_with_driver
from fake_torch import Place, Torch
from pinned_families import LINES, values_of, write_family

from cutegen.build.store import Store
from cutegen.deploy import family_calls, pin_table
from cutegen.errors import PinError
from cutegen.families import registry, strides
from cutegen.families.calls import describe_call
from cutegen.families.gemm.problem import Problem
from cutegen.runtime.kernel_cache import Kernels

pytest.importorskip("torch")
NORM, FULL, MIXED = LINES[0], LINES[1], LINES[6]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One deployment of a GEMM and of every problem above, made once and never changed."""
    root = tmp_path_factory.mktemp("pin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._all()))
        registry.load_families(write_family(root))
        table = write_table(root / "table.json", (GEMMS[0], *LINES))
        pin_table(table, root / "deploy", kernels=Workshop(root / "cache").kernels())
        yield root / "deploy"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(path))
    return path


def call(deployment: Any, line: str, values: dict[str, Any]) -> Any:
    return deployment.call(line.split()[0], **values)


def record_of(folder: Path, line: str) -> dict[str, Any]:
    manifest = json.loads((folder / "manifest.json").read_text())
    kernels = manifest["families"][line.split()[0]]["kernels"]
    found: dict[str, Any] = next(record for record in kernels if record["problem"] == line)
    return found


@pytest.mark.parametrize("line", LINES)
def test_arguments_reach_the_kernel_in_its_order(deployed: Path, log: Path, line: str) -> None:
    """Tensors by name, integers, scratch memory and scalars where the family declares them."""
    deployment, torch = load(deployed)
    problem: Any = registry.parse_problem(line)
    values = values_of(line, torch)
    call(deployment, line, values)
    record = record_of(deployed, line)
    lines = log.read_text().splitlines()
    assert lines.pop(0) == "call stream 0x5eed"
    for argument in problem.declared.arguments(problem):
        if argument.kind == "launch":
            assert [lines.pop(0) for _ in record["scalars"]] == [f"int {n}" for n in record["scalars"]]
        elif argument.kind == "scalar":
            whole = argument.dtype == "int32"
            assert lines.pop(0) == (f"int {values[argument.name]}" if whole else "float 0.25")
        elif argument.kind == "scratch" and not record["workspace_bytes"]:
            continue
        elif argument.kind == "scratch":
            words = lines.pop(0).split()
            assert words[1] == hex(torch.allocated[-1].data_ptr()) and record["zeroed"]
            assert torch.allocated[-1].numel() * 4 == record["workspace_bytes"] == problem.m * 4
        else:
            tensor, words = values[argument.name], lines.pop(0).split()
            assert words[:3] == ["tensor", hex(tensor.data_ptr()), "dev2:0"]
            assert words[3].split(".")[1] == str(tensor.element_size() * 8)
            assert [int(word.partition("/")[0]) for word in words[4:-1]] == list(tensor.shape)
            if 1 not in tensor.shape:
                assert [int(word.partition("/")[2]) for word in words[4:-1]] == list(tensor.stride())
    assert lines == []


def test_outputs_are_made_and_returned_in_their_order(deployed: Path, log: Path) -> None:
    """What is not given is allocated, options of a family excepted; True asks for one of these."""
    deployment, torch = load(deployed)
    values = values_of(FULL, torch)
    mine = values["residual_out"]
    wanted = {name: values[name] for name in ("x", "weight", "residual", "eps")}
    out, total, rstd = deployment.call("rmsnorm", **wanted, residual_out=mine, rstd=True)
    assert total is mine and torch.allocated == [out, rstd]
    assert (out.shape, str(out.dtype)) == ((64, 4096), "torch.bfloat16")
    assert (rstd.shape, str(rstd.dtype)) == ((64,), "torch.float32")
    plain = values_of(NORM, torch)
    del plain["out"]
    assert deployment.call("rmsnorm", **plain, residual=None).shape == (64, 4096)
    assert log.read_text().count("call") == 2


def test_a_second_call_takes_new_addresses_and_scalars(deployed: Path, log: Path) -> None:
    deployment, torch = load(deployed)
    values = values_of(MIXED, torch)
    call(deployment, MIXED, values)
    first = log.read_text().splitlines()
    x = values["x"]
    moved = {**values, "x": replace(x, address=x.address + 4096), "shift": 9, "factor": 3}
    loads = len(deployment._functions)
    call(deployment, MIXED, moved)
    second = log.read_text().splitlines()[len(first) :]
    # x, shift, factor, and the scratch memory of this call
    assert [a == b for a, b in zip(first, second, strict=True)].count(False) == 4
    assert "int 9" in second and "float 3" in second and len(deployment._functions) == loads


def test_what_tensors_do_not_tell_is_told_by_name(deployed: Path, log: Path) -> None:
    """Options and sizes have the defaults of the family, and are part of what is pinned."""
    deployment, torch = load(deployed)
    values = values_of(LINES[5], torch)
    for name in ("mode", "causal", "window", "total"):
        del values[name]
    assert str(deployment.call("mixed", **values).dtype) == "torch.float32"
    for change in ({"mode": "exact"}, {"causal": True}, {"window": 4}):
        with pytest.raises(
            RuntimeError, match=r"no kernel of mixed is pinned for m=8 n=64 window=.*; pinned: "
        ):
            deployment.call("mixed", **values, **change)
    with pytest.raises(RuntimeError, match=r"mode is \[1\]; it must be text, True, False or an integer"):
        deployment.call("mixed", **values, mode=[1])
    assert log.read_text().count("call") == 1


# --- refused calls ---

BAD: dict[str, tuple[str, Any, str]] = {
    "another size": (NORM, lambda v, t: {"x": t.tensor(65, 4096)}, "out has shape .*, but x makes it 65"),
    "a size that is not pinned": (
        NORM,
        lambda v, t: {"x": t.tensor(65, 4096), "out": None},
        "no kernel of rmsnorm is pinned for m=65 n=4096 x=bf16 weight=bf16 eps=True out=True; pinned: rms",
    ),
    "another dtype": (NORM, lambda v, t: {"weight": replace(v["weight"], dtype=t.float32)}, "no kernel of"),
    "an unknown dtype": (
        NORM,
        lambda v, t: {"x": replace(v["x"], dtype=type(t.int8)("complex64"))},
        "x has dtype torch.complex64, which no kernel takes",
    ),
    "one dimension": (NORM, lambda v, t: {"x": t.tensor(64)}, r"x has shape \(64,\); it must be \(m, n\)"),
    "no rows": (NORM, lambda v, t: {"x": t.tensor(0, 4096), "out": None}, "m must be at least 1"),
    "columns": (
        NORM,
        lambda v, t: {"x": replace(v["x"], strides=(1, 64))},
        r"x has strides \(1, 64\); its rows must be contiguous and apart, so pass x.contiguous\(\)",
    ),
    "repeated rows": (NORM, lambda v, t: {"x": replace(v["x"], strides=(0, 1))}, "contiguous and apart"),
    "odd rows": (NORM, lambda v, t: {"x": replace(v["x"], strides=(4099, 1))}, "no kernel of .* unaligned; "),
    "an odd address": (
        NORM,
        lambda v, t: {"weight": replace(v["weight"], address=0x7000_0002)},
        "no kernel of .* unaligned; ",
    ),
    "no x": (NORM, lambda v, t: {"x": None}, "rmsnorm needs x"),
    "x to be made": (NORM, lambda v, t: {"x": True}, "x is True; it must be a tensor, since only outputs"),
    "a number for x": (NORM, lambda v, t: {"x": 7}, "x is 7; it must be a tensor"),
    "text for eps": (NORM, lambda v, t: {"eps": "small"}, "eps is 'small'; it must be a number"),
    "no eps": (NORM, lambda v, t: {"eps": None}, "eps is None; it must be a number"),
    "a fraction": (MIXED, lambda v, t: {"shift": 1.5}, "shift is 1.5; it must be a 32-bit integer"),
    "a large integer": (MIXED, lambda v, t: {"shift": 2**31}, "it must be a 32-bit integer"),
    "an argument of nobody's": (NORM, lambda v, t: {"w": 7}, "rmsnorm takes no 'w'; it takes eps, out, "),
    "half of what goes together": (FULL, lambda v, t: {"residual": None}, "no kernel of rmsnorm is pinned"),
    "the CPU": (NORM, lambda v, t: {"eps": 1.0, "x": replace(v["x"], device=Place("cpu"))}, "on one GPU"),
    "no memory": (NORM, lambda v, t: {"x": replace(v["x"], address=0)}, "an operand has no memory"),
    "a gradient": (NORM, lambda v, t: {"weight": replace(v["weight"], requires_grad=True)}, "requires grad"),
}


EIGHTS = "rmsnorm_quantized 7x1000 bf16"


@pytest.mark.parametrize(
    ("name", "moved", "pitch", "aligned"),
    [
        *(("out", 8, 1000, True), ("out", 0, 1016, True), ("out", 4, 1000, False), ("out", 0, 1004, False)),
        *(("x", 8, 1000, False), ("x", 0, 1004, False), ("x", 16, 1008, True)),
    ],
)
def test_rows_start_where_their_argument_declares(
    deployed: Path, log: Path, name: str, moved: int, pitch: int, aligned: bool
) -> None:
    """Those of fp8 at multiples of 8 bytes, of bf16 at multiples of 16; the package decides likewise."""
    deployment, torch = load(deployed)
    values = values_of(EIGHTS, torch)
    tensor = replace(values[name], address=values[name].address + moved, strides=(pitch, 1))
    values[name] = tensor
    given = {name: value for name, value in values.items() if hasattr(value, "strides")}
    family: Any = registry.find_family("rmsnorm_quantized")
    problem = describe_call(family, given, frozenset({"out", "scale"}))
    assert str(problem) == EIGHTS + ("" if aligned else " unaligned")
    if aligned:
        call(deployment, EIGHTS, values)
        assert log.read_text().count("call") == 1
        return
    with pytest.raises(RuntimeError, match=r"no kernel of rmsnorm_quantized .* unaligned; "):
        call(deployment, EIGHTS, values)


@pytest.mark.parametrize("unaligned", [False, True])
def test_a_manifest_without_alignments_means_16_bytes(
    deployed: Path, tmp_path: Path, log: Path, unaligned: bool
) -> None:
    """Folders have it that were pinned when there were no others; 1000 bytes of fp8 were unaligned then."""
    copy = Path(shutil.copytree(deployed, tmp_path / "deploy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    family = manifest["families"]["rmsnorm_quantized"]
    assert {a["name"]: a.pop("align_bytes") for a in family["arguments"] if "align_bytes" in a} == {"out": 8}
    for record in family["kernels"]:
        record["unaligned"] = unaligned and record["problem"] == EIGHTS
    text = json.dumps(manifest).encode()
    (copy / "manifest.json").write_bytes(text)
    loader = copy / "pinned.py"
    digest = hashlib.sha256((deployed / "manifest.json").read_bytes()).hexdigest()
    loader.write_text(loader.read_text().replace(digest, hashlib.sha256(text).hexdigest()))
    deployment, torch = load(copy)
    if unaligned:
        call(deployment, EIGHTS, values_of(EIGHTS, torch))
        assert log.read_text().count("call") == 1
        return
    with pytest.raises(RuntimeError, match=r"no kernel of rmsnorm_quantized is pinned for m=7 n=1000"):
        call(deployment, EIGHTS, values_of(EIGHTS, torch))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_refused(deployed: Path, log: Path, name: str, warm: bool) -> None:
    """With a reason, before and after a good call, and the next one works."""
    line, change, message = BAD[name]
    torch = Torch()
    torch.grad = True
    deployment, _ = load(deployed, torch)
    values = values_of(line, torch)
    if warm:
        call(deployment, line, values)
    with pytest.raises(RuntimeError, match=message) as caught:
        call(deployment, line, {**values, **change(values, torch)})
    assert type(caught.value).__name__ == "PinnedError"
    call(deployment, line, values)
    assert log.read_text().count("call") == 1 + warm


def test_autograd_is_told_what_is_written(deployed: Path, log: Path) -> None:
    """Outputs of the caller's and what is updated in place; a new output is nobody's yet."""
    deployment, torch = load(deployed)
    values = values_of(MIXED, torch)
    call(deployment, MIXED, {**values, "total": None, "copy": True})
    assert torch.written == [values["state"]]
    call(deployment, MIXED, values)
    assert torch.written[1:] == [values["state"], values["total"], values["copy"]]


@pytest.mark.parametrize("line", [FULL, MIXED])
@pytest.mark.parametrize("place", [Place("cpu"), Place("cuda", 1)], ids=["cpu", "cuda:1"])
def test_devices_of_all_tensors_count_in_every_call(
    deployed: Path, log: Path, line: str, place: Place
) -> None:
    deployment, torch = load(deployed)
    values = values_of(line, torch)
    call(deployment, line, values)
    for name, value in values.items():
        if hasattr(value, "device"):
            with pytest.raises(RuntimeError, match=r"operands are on .*; they must be on one GPU"):
                call(deployment, line, {**values, name: replace(value, device=place)})
    assert log.read_text().count("call") == 1


def test_what_is_written_shares_no_memory(deployed: Path, log: Path) -> None:
    """Outputs and what is updated in place are apart from all else; where a family allows an alias, exactly
    that one."""
    deployment, torch = load(deployed)
    for line, written, allowed in (
        (FULL, ("out", "residual_out", "rstd"), {("out", "x"), ("residual_out", "residual")}),
        (MIXED, ("state", "total", "copy"), {("copy", "x")}),
    ):
        values = values_of(line, torch)
        call(deployment, line, values)
        others = [name for name, value in values.items() if hasattr(value, "address")]
        for name, other in product(written, others):
            if name == other:
                continue
            moved = replace(values[name], address=values[other].address)
            if (name, other) in allowed:
                call(deployment, line, {**values, name: moved})
                moved = replace(moved, address=moved.address + 16)
            with pytest.raises(
                RuntimeError, match=f"({name} shares memory with {other}|{other} .* {name}); "
            ):
                call(deployment, line, {**values, name: moved})
    assert log.read_text().count("call") == 5


@pytest.mark.parametrize(
    ("torch", "field"),
    [
        (Torch(name="NVIDIA H100 80GB HBM3"), "gpu_name=NVIDIA H200, but GPU 0 has gpu_name=NVIDIA H100"),
        (Torch(sm_count=114), "sm_count=132, but GPU 0 has sm_count=114"),
    ],
)
def test_another_gpu_is_refused(deployed: Path, torch: Torch, field: str) -> None:
    deployment, _ = load(deployed, torch)
    with pytest.raises(RuntimeError, match=f"pinned for {field}"):
        call(deployment, NORM, values_of(NORM, torch))


def test_a_family_that_is_not_pinned_is_named(deployed: Path) -> None:
    deployment, _ = load(deployed)
    with pytest.raises(
        RuntimeError,
        match=r"no kernel of family 'attention' is pinned; families: activation, .*mixed, .*beside gemm",
    ):
        deployment.call("attention", x=1)


@pytest.mark.parametrize("name", ["family_calls.py", "library", "source"])
@pytest.mark.parametrize("harm", ["change", "remove"])
def test_changed_files_are_refused_by_name(deployed: Path, tmp_path: Path, name: str, harm: str) -> None:
    """One flipped byte, or a missing file, and the call that would use it is refused."""
    copy = Path(shutil.copytree(deployed, tmp_path / "deploy"))
    path = copy / record_of(copy, NORM).get(name, name)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data) if harm == "change" else path.unlink()
    message = f"{path.name} in .* " + ("has changed" if harm == "change" else "cannot be read")
    deployment, torch = load(copy)
    with pytest.raises(RuntimeError, match=message):
        call(deployment, NORM, values_of(NORM, torch))


# --- rms_norm ---


def test_rms_norm_takes_rows_of_any_rank(deployed: Path, log: Path) -> None:
    """Leading dimensions are flattened; the outputs have the shapes of what was given."""
    deployment, torch = load(deployed)
    x, w, residual = torch.tensor(4, 16, 4096), torch.tensor(4096), torch.tensor(4, 16, 4096)
    y = deployment.rms_norm(x, w)
    assert y.shape == (4, 16, 4096) and "float 1e-06" in log.read_text()
    y, h, rstd = deployment.rms_norm(x, w, 1e-5, residual=residual, residual_out=True, return_rstd=True)
    assert (y.shape, h.shape, rstd.shape) == ((4, 16, 4096), (4, 16, 4096), (4, 16))
    y, h, _ = deployment.rms_norm(x, w, residual=residual, residual_out=residual, out=x, return_rstd=True)
    assert y is x and h is residual
    row = torch.tensor(64, dtype="float32")
    assert deployment.rms_norm(row).shape == (64,)
    assert log.read_text().count("call") == 4


def test_rms_norm_says_what_is_wrong(deployed: Path) -> None:
    deployment, torch = load(deployed)
    x, w = torch.tensor(4, 16, 4096), torch.tensor(4096)
    with pytest.raises(RuntimeError, match="residual_out is given but residual is not; pass both"):
        deployment.rms_norm(x, w, residual_out=True)
    with pytest.raises(RuntimeError, match=r"x has no dimensions; it must have rows"):
        deployment.rms_norm(torch.tensor(), w)
    with pytest.raises(RuntimeError, match=r"x is 1; it must be a torch.Tensor"):
        deployment.rms_norm(1, w)
    with pytest.raises(RuntimeError, match=r"x has shape .*, under which its rows are not evenly spaced"):
        deployment.rms_norm(replace(x, strides=(70000, 4096, 1)), w)
    with pytest.raises(RuntimeError, match=r"no kernel of rmsnorm is pinned for m=3 n=4096"):
        deployment.rms_norm(torch.tensor(3, 4096), w)


def test_rms_norm_of_nothing_launches_nothing(deployed: Path, log: Path) -> None:
    deployment, torch = load(deployed)
    x = torch.tensor(0, 4096)
    y, h, rstd = deployment.rms_norm(x, residual=x, residual_out=True, return_rstd=True)
    assert (y.shape, h.shape, rstd.shape) == ((0, 4096), (0, 4096), (0,)) and not log.exists()


# --- the folder ---


def test_loader_needs_no_cutegen(deployed: Path) -> None:
    """The second part of the loader runs without cutegen, the compiler and tvm_ffi's Python package."""
    code = (
        "import sys\n"
        "for name in ('cutegen', 'cutlass', 'jinja2', 'nvidia_cutlass_dsl'): sys.modules[name] = None\n"
        "import pinned\n"
        "try: pinned.call('rmsnorm', y=1)\n"
        "except pinned.PinnedError as error: print(error)\n"
        "print(len(pinned._deployment().problems), 'tvm_ffi' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=deployed, capture_output=True, text=True)
    said, counted = done.stdout.splitlines()
    assert said.startswith("rmsnorm takes no 'y'; it takes ") and counted == f"{len(LINES) + 1} False"


def test_a_folder_of_gemms_has_and_runs_no_second_part(tmp_path: Path, deployed: Path, log: Path) -> None:
    """Neither is it read where there is one, until a family is called."""
    pin_table(
        write_table(tmp_path / "t.json", GEMMS[:1]), tmp_path / "d", kernels=Workshop(tmp_path).kernels()
    )
    assert not (tmp_path / "d" / "family_calls.py").exists()
    for folder in (tmp_path / "d", deployed):
        deployment, torch = load(folder)
        a, b, options = operands(Problem.parse(GEMMS[0]), torch)
        deployment.gemm(a, b, **options)
        assert deployment._parts == {} and deployment._ranges is None


#: Run by an interpreter of its own, since operators are torch's; what would launch computes on the CPU.
TRACED = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import pinned

calls = []

def call(self, family, /, *, x, state, factor, total=None, window=3, copy=None, shift=None, **words):
    x.data_ptr()  # as the real one does, which a fake tensor refuses
    calls.append((window, shift, words))
    assert copy is None or copy.shape == x.shape
    state += x.sum(0)
    total.copy_(x.float().sum(-1) * factor + (shift or 0))
    if copy is not None:
        copy.copy_(x)

pinned.Deployment.call = call

@torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
def step(x, state):
    total = pinned.call("mixed", x=x, state=state, factor=0.5)
    return total + state.sum()

@torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
def more(x, state, out):
    words = {"shift": -7, "window": 5, "mode": "exact", "causal": True}
    both = pinned.call("mixed", x=x, state=state, factor=2.0, copy=True, total=out, **words)
    return both[1] + 1

for m in (8, 5):
    x = torch.randn(m, 64).bfloat16()
    state, other = torch.zeros(64), torch.zeros(64)
    total = step(x, state)
    want = x.float().sum(-1)
    torch.testing.assert_close(state, x.sum(0).float())
    torch.testing.assert_close(total, 0.5 * want + state.sum())
    out = torch.empty(m)
    torch.testing.assert_close(more(x, other, out), x + 1)
    torch.testing.assert_close(out, 2 * want - 7)
    torch.testing.assert_close(other, state)

class Model(torch.nn.Module):
    def forward(self, x, state):
        return pinned.call("mixed", x=x, state=state, factor=0.5)

assert "cutegen_pinned.mixed" in str(torch.export.export(Model(), (x, state)).graph)

class Sized(torch.nn.Module):
    # Both integers, an argument of the kernel and a size that no tensor tells, follow from a size.
    def forward(self, x, state):
        m = x.shape[0]
        return pinned.call("mixed", x=x, state=state, factor=0.0, shift=m - 10, window=2 * m)

rows = {"x": {0: torch.export.Dim("m", min=2, max=512)}, "state": None}
exported = torch.export.export(Sized(), (x, state), dynamic_shapes=rows).module()
graphs = []
compiled = torch.compile(
    Sized(), backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True, dynamic=True
)
for m in (5, 8, 300):
    for model in (exported, compiled):
        found = model(torch.ones(m, 64).bfloat16(), state)
        torch.testing.assert_close(found, torch.full((m,), m - 10.0))
        assert calls.pop()[:2] == (2 * m, m - 10)
assert len(graphs) == 1, len(graphs)
try:
    torch.compile(Model(), fullgraph=True, backend="aot_eager")(x.half(), state)
except Exception as error:
    assert "no kernel of mixed is pinned for x=fp16 state=fp32" in str(error), error
else:
    raise AssertionError("another dtype was traced")
print(len(calls), str(torch.ops.cutegen_pinned.mixed.default._schema))
"""


def test_traced_calls_are_operators_that_say_what_they_mutate(deployed: Path, tmp_path: Path) -> None:
    """With outputs made in the graph, given, or left out; also for other rows, and in an exported program."""
    command = [sys.executable, "-c", TRACED, str(deployed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    count, _, schema = done.stdout.strip().partition(" ")
    assert count == "4" and schema == (
        "cutegen_pinned::mixed(Tensor? x, Tensor(a1!)? state, Tensor(a2!)? total, Tensor(a3!)? copy, "
        "SymInt? shift, float? factor, str? mode_, bool? causal_, SymInt? window_) -> ()"
    )


def test_the_second_part_comes_with_its_bytecode(deployed: Path) -> None:
    """Python takes it for exactly this source, which is then not compiled."""
    cached = [path.name for path in (deployed / "__pycache__").iterdir()]
    assert sorted(name.partition(".")[0] for name in cached) == ["family_calls", "pinned"]
    module = load_module(deployed)
    compiled: list[object] = []

    class Loader(module.SourceFileLoader):  # type: ignore[misc]
        def source_to_code(self, *words: Any, **options: Any) -> Any:
            compiled.append(words)
            return super().source_to_code(*words, **options)

    module.SourceFileLoader = Loader
    module.Deployment(deployed)._run("family_calls.py")
    assert compiled == []


REAL_CALL = """
import sys
import fake_torch
torch = fake_torch.Torch()
sys.modules["torch"] = torch
sys.path.insert(0, {folder!r})
import pinned
x, r, w = torch.tensor(1, 4096), torch.tensor(1, 4096), torch.tensor(4096)
for rows in (x, torch.tensor(1, 4096, strides=(3, 1)), torch.tensor(4096)):
    out = pinned.rms_norm(rows, w, residual=r, residual_out=r, return_rstd=True)
    print([tensor.shape for tensor in out])
x = torch.tensor(5, 4097, strides=(5001, 1), address=0x7002)
print(pinned.rms_norm(x, torch.tensor(4097, dtype="float32")).shape, "tvm_ffi" in sys.modules)
"""


@pytest.mark.dsl
def test_compiled_kernels_launch_from_their_folder(tmp_path: Path) -> None:
    """The real compiler and loader, and a driver that records; a single row may have any stride."""
    lines = ("rmsnorm 1x4096 bf16 residual residual_out rstd", "rmsnorm 5x4097 bf16 weight=fp32")
    table = write_table(tmp_path / "t.json", lines)
    pin_table(table, tmp_path / "deploy", kernels=Kernels(Store(tmp_path / "cache")))
    code = REAL_CALL.format(folder=str(tmp_path / "deploy"))
    out, log = run_with_driver(build_driver(tmp_path), code, tmp_path / "log")
    assert out.splitlines() == [
        *["[(1, 4096), (1, 4096), (1,)]"] * 2,
        "[(4096,), (1, 4096), ()]",
        "(5, 4097) False",
    ]
    launches = [line for line in log if line.startswith("cuLaunchKernelEx")]
    assert len(launches) == 4 and all(" stream 0x5eed " in line for line in launches)


def test_problems_that_no_call_can_tell_apart_are_left_out(tmp_path: Path) -> None:
    """A weight of the dtype of x is said in two ways; a call has one."""
    lines = ("rmsnorm 8x64 fp32", "rmsnorm 8x64 fp32 weight=fp32", "rmsnorm 8x64 bf16 weight=fp32")
    table = write_table(tmp_path / "t.json", lines)
    left: dict[str, str] = {}
    kernels = Workshop(tmp_path / "cache").kernels()
    pinned = pin_table(
        table, tmp_path / "d", kernels=kernels, leave_out=lambda p, why: left.update({str(p): why})
    )
    assert {str(item.answer.problem) for item in pinned} == {lines[0], lines[2]}
    assert left == {lines[1]: f"no call can tell it from {lines[0]}"}
    with pytest.raises(PinError, match=f"{lines[1]} cannot be pinned: no call can tell it from {lines[0]}"):
        problems = [registry.parse_problem(line) for line in lines[:2]]
        pin_table(table, tmp_path / "d", kernels=kernels, problems=problems)


def test_strides_mean_what_they_mean_to_cutegen() -> None:
    """The loader cannot import the rule, so it repeats it."""
    shapes = [(1,), (4,), (3, 4), (1, 4), (4, 1), (2, 3, 4)]
    steps = (0, 1, 2, 3, 4, 8, 12)
    cases = [(shape, stride) for shape in shapes for stride in product(steps, repeat=len(shape))]
    ours = [family_calls._may_repeat(*case) for case in cases]
    assert ours == [strides.may_repeat(*case) for case in cases] and len({*ours}) == 2
