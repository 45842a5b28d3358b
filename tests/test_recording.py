"""Recordings: what is counted, eager, compiled, backward and fake; files that add up; damaged files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import FakeGpu, operators_ask  # noqa: E402
from torch._dynamo.backends.debugging import aot_eager  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import StoreError, UsageError  # noqa: E402
from cutegen.families.registry import parse_problem  # noqa: E402
from cutegen.records.recorded_calls import Call, read_recordings  # noqa: E402
from cutegen.records.table import Entry, Fingerprint, Table  # noqa: E402
from cutegen.runtime.recorder import is_recording  # noqa: E402
from cutegen.space import Config  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from tools.benchmark import model_steps as steps  # noqa: E402

BF16 = torch.bfloat16
#: Forward, gradients of inputs and of weights of one layer of `network` at 8 rows.
UP = ("gemm 8x64x32 bf16 kk", "gemm 8x32x64 bf16 kn", "gemm 64x32x8 bf16 mn")
DOWN = ("gemm 8x16x64 bf16 kk", "gemm 8x64x16 bf16 kn", "gemm 16x64x8 bf16 mn")


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.delenv("RANK", raising=False)
    with operators_ask(AllFamilies(tmp_path / "cache"), monkeypatch) as fake:
        yield fake


def network(**options: Any) -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64, bias=False, dtype=BF16, **options),
        torch.nn.GELU(),
        torch.nn.Linear(64, 16, bias=False, dtype=BF16, **options),
    )


def lines(recording: Any) -> dict[tuple[str, str], int]:
    return {(str(call.problem), call.phase): count for call, count in recording.calls.items()}


def expected(forward: int, backward: int, *, first_input: bool = False) -> dict[tuple[str, str], int]:
    want = {(UP[0], "forward"): forward, (DOWN[0], "forward"): forward}
    if backward:
        want |= {(line, "backward"): backward for line in (UP[2], *DOWN[1:])}
        if first_input:
            want[UP[1], "backward"] = backward
    return want


def test_forward_and_backward_of_a_model_are_counted(gpu: FakeGpu) -> None:
    """Each problem once with its count; nothing of what ran before or after, though its plans were made."""
    model, x = network(), torch.randn(8, 32).to(BF16)
    cutegen.optimize(model)
    model(x).sum().backward()
    with cutegen.record() as recording:
        for _ in range(3):
            model(x).sum().backward()
        with torch.inference_mode():
            model(x)
    model(x).sum().backward()
    want = expected(4, 3)
    assert lines(recording) == want
    assert recording.problems == {parse_problem(line): count for (line, _), count in want.items()}
    assert list(recording.problems.values()) == sorted(recording.problems.values(), reverse=True)
    assert {(call.how, call.source) for call in recording.calls} == {("default", "cutegen")}


def test_recording_leaves_no_trace_in_plans(gpu: FakeGpu) -> None:
    """Plans made outside launch the kernel itself, whatever was recorded before."""
    a, b = torch.randn(8, 32).to(BF16), torch.randn(16, 32).to(BF16).t()
    cutegen.gemm(a, b)
    [plain] = ops._plans.values()
    with cutegen.record() as recording:
        cutegen.gemm(a, b)
        [counting] = ops._plans.values()
    cutegen.gemm(a, b)
    [after] = ops._plans.values()
    assert plain.launch.__code__.co_code == after.launch.__code__.co_code != counting.launch.__code__.co_code
    assert list(recording.problems.values()) == [1] and not is_recording()
    assert len(gpu.loaded) == 1, "kernels stay loaded"


def test_autocast_and_checkpointing_are_seen_as_they_run(gpu: FakeGpu) -> None:
    """dtypes after autocast; what checkpointing computes again belongs to the backward pass."""
    w1, w2 = (torch.randn(n, k, requires_grad=True) for n, k in ((64, 32), (16, 64)))
    x = torch.randn(8, 32, requires_grad=True)

    def forward(x: Any) -> Any:
        return cutegen.linear(torch.nn.functional.gelu(cutegen.linear(x, w1)), w2)

    with cutegen.record() as plain, torch.autocast("cpu", BF16):
        forward(x).sum().backward()
    assert lines(plain) == expected(1, 1, first_input=True)
    with cutegen.record() as again, torch.autocast("cpu", BF16):
        checkpoint(forward, x, use_reentrant=False).sum().backward()
    recomputed = {(UP[0], "backward"): 1, (DOWN[0], "backward"): 1}
    found = lines(again)
    found.pop((DOWN[0], "backward"), None)  # torch may stop early, having what the gradients need
    recomputed.pop((DOWN[0], "backward"))
    assert found == {**expected(1, 1, first_input=True), **recomputed}


def test_a_transformer_is_recorded_completely(gpu: FakeGpu) -> None:
    """Two layers and a head: every product of the forward pass and its gradients; twice where blocks are
    checkpointed; without gradients in ``inference_mode``, where nothing else is recorded."""
    model = steps.make_model("tiny", 2, "cpu")
    tokens, at = torch.zeros(1, 16, dtype=torch.long), torch.arange(16)
    forward = {
        "gemm 16x384x256 bf16 kk": 2,
        "gemm 16x256x256 bf16 kk": 2,
        "gemm 16x256x512 bf16 kk": 2,
        "rmsnorm 16x256 bf16 rstd": 5,
        "gated_gemm 16x512x256 bf16 pre": 2,
    }
    backward = {
        "gemm 16x256x384 bf16 kn": 2,
        "gemm 384x256x16 bf16 mn": 2,
        "gemm 16x256x256 bf16 kn": 2,
        "gemm 256x256x16 bf16 mn": 2,
        "gemm 16x256x1024 bf16 kn": 2,
        "gemm 1024x256x16 bf16 mn": 2,
        "gemm 16x512x256 bf16 kn": 2,
        "gemm 256x512x16 bf16 mn": 2,
        "gated_backward 16x512 bf16": 2,
    }
    cutegen.optimize(model)
    with cutegen.record() as recording:
        model(tokens, at, head=False).float().sum().backward()
    want = {(line, "forward"): n for line, n in forward.items()}
    want |= {(line, "backward"): n for line, n in backward.items()}
    assert lines(recording) == want
    with cutegen.record() as inference, torch.inference_mode():
        model(tokens, at)
    head = {("gemm 1x1024x256 bf16 kk", "forward"): 1}
    # What gradients need is not kept.
    plain = {line.removesuffix(" rstd").removesuffix(" pre"): n for line, n in forward.items()}
    assert lines(inference) == {(line, "forward"): n for line, n in plain.items()} | head
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda *given, inner=inner: checkpoint(inner, *given, use_reentrant=True)
    with cutegen.record() as again:
        model(tokens, at, head=False).float().sum().backward()
    norm, kept = "rmsnorm 16x256 bf16", "rmsnorm 16x256 bf16 rstd"  # the last norm is in no block
    norms = {(norm, "forward"): 4, (kept, "forward"): 1, (kept, "backward"): 4}
    want["gated_gemm 16x512x256 bf16", "forward"] = want.pop(("gated_gemm 16x512x256 bf16 pre", "forward"))
    assert lines(again) == want | {(line, "backward"): n for line, n in forward.items()} | norms


def test_compiled_code_is_compiled_and_counted(gpu: FakeGpu) -> None:
    """Tracing counts nothing, calls of the compiled graph do, and recording switches no compilation off."""
    model, x = network(), torch.randn(8, 32).to(BF16)
    cutegen.optimize(model)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with cutegen.record() as recording:
        for _ in range(2):
            compiled(x).sum().backward()
    assert lines(recording) == expected(2, 2)
    assert len(graphs) == 1
    with cutegen.record() as later:
        compiled(x).sum().backward()
    assert lines(later) == expected(1, 1)
    assert len(graphs) == 1


def test_fake_tensors_are_recorded_without_memory(gpu: FakeGpu) -> None:
    """Same problems as with real ones; a large model takes no memory; nothing is compiled or launched."""
    with FakeTensorMode():
        model, x = network(), torch.empty(8, 32, dtype=BF16)
        cutegen.optimize(model)
        with cutegen.record() as recording:
            for _ in range(2):
                model(x).sum().backward()
        large = torch.nn.Linear(2**20, 2**20, bias=False, dtype=BF16)
        cutegen.optimize(large)
        with cutegen.record() as of_large, torch.no_grad():
            large(torch.empty(4, 2**20, dtype=BF16))
            cutegen.rms_norm(torch.empty(4, 4096, dtype=BF16))
    assert lines(recording) == expected(2, 2)
    assert [str(problem) for problem in of_large.problems] == [
        "gemm 4x1048576x1048576 bf16 kk",
        "rmsnorm 4x4096 bf16 weight=none",
    ]
    assert not gpu.calls and not gpu.compiled


def test_without_a_gpu_nobody_can_tell_the_answer() -> None:
    from cutegen.errors import DeviceError
    from cutegen.runtime.dispatch import Dispatcher

    def no_gpu(index: int) -> Any:
        raise DeviceError("there is no GPU")

    cutegen.use(Dispatcher(device=no_gpu))
    with FakeTensorMode(), cutegen.record() as recording:
        cutegen.gemm(torch.empty(8, 32, dtype=BF16), torch.empty(32, 16, dtype=BF16))
    assert list(recording.calls) == [Call(parse_problem("gemm 8x16x32 bf16 kn"), "forward", "unknown")]


def test_the_answers_of_the_table_and_of_callers_are_told_apart(gpu: FakeGpu) -> None:
    problem = parse_problem("gemm 8x16x32 bf16 kk")
    config = gpu.dispatcher().explain(problem).config
    assert config is not None
    table = Table(Fingerprint(*["*"] * 7), [Entry(problem, config)])
    cutegen.use(gpu.dispatcher(table))
    a, b = torch.randn(8, 32).to(BF16), torch.randn(16, 32).to(BF16).t()
    with cutegen.record() as recording:
        cutegen.gemm(a, b)
        cutegen.gemm(a, b)
        cutegen.gemm(a, b, config=config)
    assert {(call.how, count) for call, count in recording.calls.items()} == {("exact", 2), ("given", 1)}
    assert recording.problems == {problem: 3}
    assert isinstance(config, Config) and "exact (cutegen)" in recording.report()


def test_a_kernel_that_comes_later_counts_each_call_once(gpu: FakeGpu) -> None:
    """In the background: the launcher of the plan changes, and the counter with it."""
    cutegen.use(gpu.dispatcher(build="background"))
    gpu.gate.clear()
    a, b = torch.randn(8, 32).to(BF16), torch.randn(16, 32).to(BF16).t()
    with cutegen.record() as recording:
        cutegen.gemm(a, b)
        gpu.gate.set()
        assert cutegen.wait_for_kernels(120)
        cutegen.gemm(a, b)
        cutegen.gemm(a, b)
    assert len(gpu.calls) == 2 and list(recording.problems.values()) == [3]


def test_families_threads_and_nested_recordings(gpu: FakeGpu) -> None:
    a, b = torch.randn(8, 32).to(BF16), torch.randn(16, 32).to(BF16).t()

    def work() -> None:
        for _ in range(200):
            cutegen.gemm(a, b)

    with cutegen.record() as outer:
        cutegen.gemm(a, b)
        with cutegen.record() as inner:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        cutegen.gemm(a, b)
        with pytest.raises(UsageError, match="runs already"), outer:
            pass
    assert list(inner.problems.values()) == [800] and list(outer.problems.values()) == [802]


def test_what_torch_computes_is_reported_with_its_reason(gpu: FakeGpu) -> None:
    model = network()
    cutegen.optimize(model)
    with cutegen.record() as recording:
        model(torch.randn(8, 64).to(BF16)[:, ::2])
    assert "1 by torch: the input is not contiguous along its rows" in recording.report()
    assert list(map(str, recording.problems)) == [DOWN[0]]


# --- files ---

ROW = {
    "problem": "gemm 64x7168x2048 bf16 kk",
    "phase": "forward",
    "count": 32,
    "how": "default",
    "source": "cutegen",
}


def recorded(path: Path, m: int, *, rank: int | None = None, calls: int = 1) -> None:
    a, b = torch.randn(m, 32).to(BF16), torch.randn(16, 32).to(BF16).t()
    with cutegen.record(path, rank=rank):
        for _ in range(calls):
            cutegen.gemm(a, b)


def counts(*paths: Path, gpu: str = "") -> dict[str, int]:
    return {str(problem): count for problem, count in read_recordings(paths, gpu).problems.items()}


def test_files_of_ranks_and_runs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four ranks has other shapes; each writes its own file; a second run is appended."""
    path = tmp_path / "new" / "model.jsonl"
    for rank in range(3):
        recorded(path, 8, rank=rank)
    monkeypatch.setenv("RANK", "3")
    recorded(path, 64, calls=5)
    recorded(path, 8)
    assert sorted(each.name for each in path.parent.iterdir()) == [f"model.rank{r}.jsonl" for r in range(4)]
    assert counts(path) == {"gemm 64x16x32 bf16 kk": 5, "gemm 8x16x32 bf16 kk": 4}
    assert counts(path.with_name("model.rank3.jsonl"), path) == counts(path), "no file counts twice"
    header = json.loads(path.with_name("model.rank0.jsonl").read_text().splitlines()[0])
    assert header["cutegen_recording"] == 1 and header["gpu"] == "NVIDIA H200"
    assert not read_recordings([path], "NVIDIA H200").notes
    with pytest.raises(UsageError, match="rank=-1"):
        cutegen.record(path, rank=-1)


def test_saving_twice_adds_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "model.jsonl"
    a, b = torch.randn(8, 32).to(BF16), torch.randn(16, 32).to(BF16).t()
    with cutegen.record(path) as recording:
        cutegen.gemm(a, b)
        recording.save()
        recording.save()
        cutegen.gemm(a, b)
    assert counts(path) == {"gemm 8x16x32 bf16 kk": 2} and len(path.read_text().splitlines()) == 4


def test_damaged_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    """A line cut off by a crash, another version, another GPU, a family that is not here."""
    path = tmp_path / "model.jsonl"
    recorded(path, 8)
    recorded(path, 64)
    path.write_bytes(path.read_bytes()[:-20])
    recorded(path, 16)
    row = {"problem": "wavelet 8x8", "phase": "forward", "count": 2, "how": "default", "source": "cutegen"}
    gemm = {**row, "problem": "gemm 128x16x32 bf16 kk"}
    more = [row, {**gemm, "count": -1}, [1], {"cutegen_recording": 99}, gemm]
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in more))
    found = read_recordings([path], "NVIDIA B200")
    assert {str(problem): count for problem, count in found.problems.items()} == {
        "gemm 8x16x32 bf16 kk": 1,
        "gemm 16x16x32 bf16 kk": 1,
    }
    said = "\n".join(found.notes)
    assert "line 4 is not JSON" in said and "'wavelet 8x8' names no kernel family" in said
    assert "count is -1" in said and "not an object" in said and "version 99" in said
    assert "was made on 'NVIDIA H200', not on NVIDIA B200" in said and len(found.notes) == 6


def test_rows_before_any_header_are_noted(tmp_path: Path) -> None:
    """Those of a section of another version have its note already."""
    path = tmp_path / "model.jsonl"
    path.write_text(2 * (json.dumps(ROW) + "\n"))
    assert read_recordings([path]).notes == (f"recording {path}: 2 rows before any header: left out",)
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"cutegen_recording": 99}, ROW)))
    [note] = read_recordings([path]).notes
    assert "version 99" in note


def test_a_file_counts_once_by_however_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.jsonl"
    recorded(path, 8)
    (tmp_path / "link.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    names = (Path("model.jsonl"), path, tmp_path / "link.jsonl", tmp_path.parent / tmp_path.name / path.name)
    assert counts(*names) == counts(path) == {"gemm 8x16x32 bf16 kk": 1}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": 0}, "count is 0, not a number of calls"),
        ({"how": "zzz"}, "how is 'zzz'; valid: exact, range, bucket, nearest, default, given, unknown"),
        ({"source": "qqq"}, "source is 'qqq'; valid: cutegen, operators, torch, ''"),
    ],
)
def test_rows_that_nothing_writes_are_left_out(wrong: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.jsonl"
    rows = [{"cutegen_recording": 1}, {**ROW, **wrong}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_recordings([path])
    assert not found.calls and said in found.notes[0]


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_recordings([tmp_path / "none.jsonl"])
    with pytest.raises(UsageError, match="cannot be read"):
        read_recordings([tmp_path / "none" / "model.jsonl"])
    with pytest.raises(StoreError, match="cannot be written"):
        recorded(tmp_path, 8)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = {
        tmp_path: "it is a folder; name a file, such as model.jsonl",
        tmp_path / "file" / "model.jsonl": "file is no folder",
    }
    with pytest.raises(StoreError, match=r"'a\\x00b' is not a valid file name"), cutegen.record("a\0b"):
        pytest.fail("it began")
    for path, why in wrong.items():
        with pytest.raises(StoreError, match=f"cannot be written: .*{why}"), cutegen.record(path):
            pytest.fail("it began")
    assert not is_recording()
    with cutegen.record(tmp_path / "new" / "model.jsonl"):
        assert is_recording()


def test_a_file_of_something_else_is_described_in_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "model.jsonl"
    path.write_bytes(b"\xff\n" * 1000)
    notes = read_recordings([path]).notes
    assert len(notes) == 9 and notes[-1].endswith("model.jsonl: 992 more lines left out")


# --- layers and alignment ---


def test_calls_are_told_apart_by_the_layers_of_a_model(gpu: FakeGpu, tmp_path: Path) -> None:
    """Forward calls and gradients of inputs; numbers become one name; weight gradients have no layer."""
    model = torch.nn.ModuleList([network() for _ in range(2)])
    cutegen.optimize(model)
    x = torch.randn(8, 32, dtype=BF16)
    with cutegen.record(tmp_path / "m.jsonl", model=model) as recording:
        for part in model:
            part(x).sum().backward()
    found = {(str(call.problem), call.phase, call.module): count for call, count in recording.calls.items()}
    assert found == {
        (UP[0], "forward", "*.*"): 2,
        (DOWN[0], "forward", "*.*"): 2,
        (DOWN[1], "backward", "*.*"): 2,
        (UP[2], "backward", ""): 2,
        (DOWN[2], "backward", ""): 2,
    }
    assert f"{UP[0]} of *.*" in recording.report()
    read = read_recordings([tmp_path / "m.jsonl"])
    assert dict(read.calls) == dict(recording.calls) and dict(read.alignments) == dict(recording.alignments)
    with FakeTensorMode(), cutegen.record(model=network()) as recording:
        pass
    assert recording.calls == {}


def test_the_least_alignment_of_all_operands_is_kept(gpu: FakeGpu, tmp_path: Path) -> None:
    """Of each kind of call; files keep the least as well."""
    pool = torch.zeros(4096, dtype=torch.int8)
    start = -pool.data_ptr() % 256
    aligned = pool[start : start + 1024].view(BF16)
    shifted = pool[start + 16 : start + 16 + 1024].view(BF16)
    path, out = tmp_path / "m.jsonl", torch.empty(2048, dtype=torch.int8)
    out = out[-out.data_ptr() % 256 :][:1024].view(BF16)[:256].view(16, 16)
    for operand, want in ((aligned, 256), (shifted, 16), (aligned, 256)):
        with cutegen.record(path) as recording:
            cutegen.gemm(operand[:512].view(16, 32), aligned[:512].view(32, 16), out=out)
        assert [*recording.alignments.values()] == [want]
    assert [*read_recordings([path]).alignments.values()] == [16]
    row = json.loads(path.read_text().splitlines()[1])
    assert row["aligned"] == 256 and "module" not in row
    with path.open("a") as file:
        file.write(json.dumps({**row, "aligned": 3}) + "\n" + json.dumps({**row, "module": 7}) + "\n")
        file.write(json.dumps({key: row[key] for key in row if key != "aligned"}) + "\n")
    found = read_recordings([path])
    assert sum(found.calls.values()) == 4 and len(found.notes) == 2 and "aligned 3" in found.notes[0]


def test_a_recording_of_nothing_says_why(tmp_path: Path) -> None:
    with cutegen.record(tmp_path / "model.jsonl") as recording:
        torch.nn.Linear(4, 4)(torch.ones(2, 4))
    assert "after cutegen.optimize(model)" in recording.report()
