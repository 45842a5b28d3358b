"""A warm-up for a model, recording or table prepares what calls use: a frozen program then misses none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import H200, FakeGpu, operators_ask  # noqa: E402
from test_fuzz_calibrations import GOOD as CALIBRATION  # noqa: E402
from test_warming import Compiler  # noqa: E402

import cutegen  # noqa: E402
from cutegen.build import Toolchain  # noqa: E402
from cutegen.errors import UsageError  # noqa: E402
from cutegen.families.registry import find_space, is_legal, parse_problem  # noqa: E402
from cutegen.records.calibrations import calibrated_arch, made_on  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.paths import calibration_path  # noqa: E402
from cutegen.records.recorded_calls import Call, append_calls  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.runtime import warming  # noqa: E402
from cutegen.runtime.answer_lookup import look_up  # noqa: E402
from cutegen.runtime.needs import Needs  # noqa: E402
from cutegen.search.defaults import default_config, default_set  # noqa: E402
from cutegen.torch_ops import warmup as warmup_module  # noqa: E402
from cutegen.torch_ops.warm_sources import CAPTURE_SIZES, read_source  # noqa: E402

BF16 = torch.bfloat16
SPACE = find_space("gemm", H200.arch)
LINE = "gemm 16x24x32 bf16 kk"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path / "cache"), monkeypatch) as fake:
        monkeypatch.setattr(warming, "Builder", Compiler(fake))
        monkeypatch.setattr(warmup_module, "new_workspace", lambda device, n, zeroed=False: torch.zeros(n))
        yield fake


def network() -> Any:
    layers = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 24, bias=False)
    )
    return layers.to(BF16)


def winner(line: str) -> Entry:
    """An entry whose kernel is not the default's."""
    problem = parse_problem(line)
    default = SPACE.compile_view(default_config(SPACE, problem, 132))
    known = [c for _, c in default_set(SPACE, problem, 132) if is_legal(c, problem, SPACE.arch)]
    return Entry(problem, next(c for c in known if SPACE.compile_view(c) != default))


def save(path: Path, *entries: Entry) -> Path:
    Table(Fingerprint.of(H200, Toolchain.current()), entries).save(path)
    return path


@pytest.mark.parametrize("swapped", [False, True])
def test_a_model_is_warmed_up_for_its_rows(gpu: FakeGpu, swapped: bool) -> None:
    """Frozen right after, it compiles, loads and misses nothing."""
    model = network()
    if swapped:
        cutegen.optimize(model)
    warmed = cutegen.warmup(model, m=iter([1, 7, 300]))
    assert warmed.wanted and warmed.launched == len(warmed.wanted)
    cutegen.optimize(model)
    cutegen.freeze("error")
    with torch.no_grad():
        for rows in (1, 7, 300):
            model(torch.ones(rows, 32, dtype=BF16))
    assert cutegen.counters()["calls"] == {"default": 6} and cutegen.counters()["late_compiles"] == 0


def test_a_model_is_warmed_up_for_what_a_calibration_chooses(gpu: FakeGpu) -> None:
    """Calls choose by the calibration of the cache folder, so the kernels that they find are those."""
    path = calibration_path(gpu.store.root, H200)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**CALIBRATION, "made_on": made_on(H200)}))
    space = find_space("gemm", calibrated_arch(gpu.store.root, H200))
    layer = torch.nn.Linear(512, 1024, bias=False, dtype=BF16)
    rows = next(
        m
        for m in range(100, 8192, 100)
        if default_config(space, (p := parse_problem(f"gemm {m}x1024x512 bf16 kk")), 132)["tile_shape_mn"]
        != default_config(SPACE, p, 132)["tile_shape_mn"]
    )
    cutegen.use(gpu.dispatcher(build="background"))
    assert len(cutegen.warmup(layer, m=rows).wanted) == 1
    cutegen.freeze("error")
    with torch.no_grad():
        cutegen.linear(torch.ones(rows, 512, dtype=BF16), layer.weight)


def test_a_recording_is_warmed_up_from_its_file_and_as_it_is(gpu: FakeGpu, tmp_path: Path) -> None:
    """Calls with a config of their own are no problems; other rows are asked for by m."""
    a, b = torch.ones(16, 32, dtype=BF16), torch.ones(32, 24, dtype=BF16)
    path = tmp_path / "model.jsonl"
    given = default_config(SPACE, parse_problem("gemm 8x8x8 bf16 kn"), 132)
    with cutegen.record(path, rank=3) as recording:
        cutegen.gemm(a, b)
        cutegen.gemm(a[:8, :8], b[:8, :8].contiguous(), config=given)
    other = gpu.dispatcher(build="background")
    for source in (recording, path, str(path)):
        cutegen.use(other)
        assert [str(p) for p in read_source(source, None, None).problems] == ["gemm 16x24x32 bf16 kn"]
        assert len(cutegen.warmup(source).wanted) == 1
        assert len(read_source(source, [1, 2, 3], None).problems) == 3
    cutegen.freeze("error")
    cutegen.gemm(a, b)


def test_a_table_is_warmed_up_and_then_swapped_in(gpu: FakeGpu, tmp_path: Path) -> None:
    """Frozen all the time: one call prepares it, one swaps it, and nothing is missed."""
    first, second = save(tmp_path / "1.json"), save(tmp_path / "2.json", winner(LINE))
    cutegen.load_table(first)
    x, w = torch.ones(16, 32, dtype=BF16), torch.ones(24, 32, dtype=BF16)
    cutegen.linear(x, w)
    cutegen.freeze("error")
    cutegen.linear(x, w)
    warmed = cutegen.warmup(second)
    assert len(warmed.wanted) == 1 and cutegen.counters()["frozen"] == "error"
    cutegen.load_table(second)
    loaded = len(gpu.loaded)
    cutegen.linear(x, w)
    assert cutegen.counters()["calls"] == {"default": 1, "exact": 1} and len(gpu.loaded) == loaded
    assert cutegen.counters()["late_compiles"] == 1  # the first call of all


def test_a_missed_problem_is_served_once_it_is_warmed_up(gpu: FakeGpu) -> None:
    x, w = torch.ones(16, 32, dtype=BF16), torch.ones(24, 32, dtype=BF16)
    cutegen.freeze()
    cutegen.linear(x, w)
    model = torch.nn.Linear(32, 24, bias=False).to(BF16)
    cutegen.warmup(model, m=16)
    cutegen.linear(x, w)
    assert cutegen.counters()["calls"] == {"missed": 1, "default": 1}


def test_rows_are_numbers_ranges_or_what_a_server_captures(tmp_path: Path) -> None:
    table = Table.load(save(tmp_path / "t.json", winner("gemm 100x24x32 bf16 kk")))
    model = torch.nn.Linear(32, 24, bias=False).to(BF16)

    def rows(m: Any) -> list[int]:
        return [problem.sizes["m"] for problem in read_source(model, m, table).problems]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutegen.torch_ops.linear_modules._DEVICE", "cpu")
        assert rows(7) == [7] and rows(iter([2, 2, 5])) == [2, 5]
        assert rows("vllm") == list(CAPTURE_SIZES["vllm"]) and rows("sglang")[:5] == [1, 2, 4, 8, 12]
        assert rows("3..300") == rows("3:300")
        assert [len(read_source(model, m, table).kinds) for m in (7, "vllm", "3..300")] == [0, 0, 1]
        found = rows("3:300")
        assert {3, 4, 5, 8, 9, 100, 256, 257, 300} <= set(found) and found == sorted(found) and found[0] == 3
        for wrong in ("9:1", "all", "0:4"):
            with pytest.raises(UsageError, match=r"FIRST\.\.LAST"):
                rows(wrong)


def test_a_range_of_rows_misses_none_of_them(gpu: FakeGpu, tmp_path: Path) -> None:
    """A model chooses another kernel at more sizes than a warm-up visits, and tables answer beside theirs."""
    lines = ("gemm 90x1024x512 bf16 kk", "gemm 300x1040x504 bf16 kk", "gemm 2000x900x600 bf16 kk")
    table = Table.load(save(tmp_path / "t.json", *map(winner, lines)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutegen.torch_ops.linear_modules._DEVICE", "cpu")
        source = read_source(torch.nn.Linear(512, 1024, bias=False, dtype=BF16), "1..8192", table)
    wanted = warmup_module._of_source(source, Needs(table, H200.arch, 132, "none"))
    prepared = {SPACE.compile_view(each.config) for each in wanted if not each.config.algorithm}
    generator, asked = Random(7), set()
    for rows in {int(2 ** (13 * generator.random())) for _ in range(200)}:
        answer = look_up(table, parse_problem(f"gemm {rows}x1024x512 bf16 kk"), SPACE, 132, "none")
        if answer.config is not None and not answer.config.algorithm:
            asked.add(SPACE.compile_view(answer.config))
    assert len(asked) > 20 and asked <= prepared


def test_layers_that_no_kernel_takes_are_left_out(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(31, 16).to(BF16), torch.nn.Linear(32, 16))
    assert read_source(layers, 4, None).problems == ()
    assert cutegen.warmup(layers, m=4).wanted == ()
    assert "no layer of the model calls a kernel, so none is prepared: of the first" in caplog.text
    assert "rows of its weight do not start at multiples of 16 bytes" in caplog.text


@pytest.mark.parametrize(
    ("source", "m", "message"),
    [
        ("gemmm", None, "no family, and no file"),
        (network(), 0, r"m has 0; valid: numbers of rows from 1 on"),
        (network(), [8, 1.5], "m has 1.5"),
        (network(), "8192..1", "m is '8192..1'"),
        ("gemm", 8, "name one"),
        (network(), None, "pass m"),
        (3.0, None, "source is a float"),
    ],
)
def test_other_sources_are_refused(gpu: FakeGpu, source: Any, m: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cutegen.warmup(source, m=m)


def test_rows_of_tables_and_files_of_ranks(gpu: FakeGpu, tmp_path: Path) -> None:
    """A table's problems at other rows; a recording that only ranks wrote."""
    table = save(tmp_path / "t.json", winner(LINE))
    assert len(read_source(table, [1, 16], None).problems) == 2
    call = Call(parse_problem(LINE), "forward", "default", "cutegen")
    for rank in range(2):
        append_calls(tmp_path / f"m.rank{rank}.jsonl", {"gpu": None}, {call: 1})
    assert len(read_source(tmp_path / "m.jsonl", None, None).problems) == 1


def test_one_word_is_a_list_of_one(gpu: FakeGpu) -> None:
    """A text is no list of letters; fewer compilations than one at a time would never end."""
    wrong: Any = 3
    for named, said in (
        ({"problems": wrong}, "problems is 3; valid: one text, or several"),
        ({"problems": [wrong]}, "3 is no problem; valid: problems, and lines such as"),
        ({"dtypes": wrong}, "dtypes is 3"),
        ({"observe": wrong}, "observe is 3; it must be a function"),
    ):
        with pytest.raises(UsageError, match=said):
            cutegen.warmup(arch="sm_90a", **named)
    one = cutegen.warmup("gemm", dtypes="fp16", options="bias=n", arch="sm_90a", budget_s=0.001)
    assert {(w.problem.ab_dtype, w.problem.epilogue.bias) for w in one.wanted} == {("fp16", "n")}
    line = "gemm 8x64x64 fp16 kk"
    named = cutegen.warmup(problems=line, arch="sm_90a", budget_s=0.001)
    assert str(named.wanted[0].problem) == line
    for workers in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match=r"workers is .*; valid: 1 and more"):
            cutegen.warmup(problems=line, arch="sm_90a", workers=workers)  # type: ignore[arg-type]


def test_a_kernel_that_is_wanted_twice_is_compiled_and_counted_once(gpu: FakeGpu) -> None:
    """As the answer to a model's call, and as one of those that may answer a problem of its kind."""
    layer = torch.nn.Linear(32, 24, bias=False, dtype=BF16)
    warmed = cutegen.warmup(layer, m=16, problems="gemm 4096x24x32 bf16 kk")
    kernels = [(each.problem.signature, SPACE.compile_view(each.config)) for each in warmed.wanted]
    assert len(set(kernels)) == len(kernels) == len(warmed.compiled) == warmed.launched
    assert warmed.missing == 0
