"""Where PyTorch's own call answers: by measurement, by expectation or nowhere; eager, compiled, and said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import H200, FakeGpu
from test_dispatch import SPACE, here, other_than_default

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.cli import main as cli  # noqa: E402
from cutegen.errors import UsageError  # noqa: E402
from cutegen.families.gemm.family import GEMM  # noqa: E402
from cutegen.families.gemm.problem import Epilogue, Problem  # noqa: E402
from cutegen.families.ranges import parse_range  # noqa: E402
from cutegen.records.entry import Entry  # noqa: E402
from cutegen.records.range_entry import Piece, RangeEntry  # noqa: E402
from cutegen.records.table import FALLBACKS, Table  # noqa: E402
from cutegen.runtime.answer_lookup import DEFAULT_FALLBACK, Answer, look_up  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.search.defaults import default_config, predictor  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from cutegen.tuning import AutoTuner  # noqa: E402

PROBLEM = Problem(128, 256, 128)
CONFIG = other_than_default(PROBLEM)
FUSED = replace(PROBLEM, epilogue=Epilogue(activation="relu"))


def table(*ratios: tuple[Problem, float], fallback: str = "", **more: Any) -> Table:
    entries = [Entry(p, CONFIG, ratio_to_baseline=ratio, baseline="torch.mm", **more) for p, ratio in ratios]
    return Table(here(), entries, fallback=fallback)


def ask(source: Table | None, problem: Problem = PROBLEM, fallback: str = "") -> Answer:
    return look_up(source, problem, SPACE, 132, fallback)


@pytest.mark.parametrize("fallback", ["torch", "expected", "measured"])
def test_a_measured_lead_of_torch_decides(fallback: str) -> None:
    """Beyond a percent torch answers, and the answer says why; below it and above it the kernel does."""
    answer = ask(table((PROBLEM, 0.8)), fallback=fallback)
    assert answer.config is None and answer.how == "exact" and answer.entry is not None
    assert answer.because == "torch.mm was measured 1.25 times as good"
    assert str(answer) == f"{PROBLEM}: exact (torch.mm was measured 1.25 times as good): torch"
    for ratio in (0.995, 1.0, 1.3):
        assert ask(table((PROBLEM, ratio)), fallback=fallback).config == CONFIG, ratio
    assert ask(table((PROBLEM, 0.8)), fallback="none").config == CONFIG


def test_what_was_measured_for_another_problem_or_beside_other_work_does_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ratios hold for their own problem, and disturbed ones for none."""
    monkeypatch.setattr(GEMM, "is_fitted", lambda *_: False)  # so that neighbours answer, however good
    near = Problem(127, 256, 128)
    assert ask(table((near, 0.5)), fallback="measured").config == CONFIG
    assert ask(table((PROBLEM, 0.5), contended_by="pid 7"), fallback="measured").config == CONFIG


def test_ranges_know_where_torch_is_faster() -> None:
    """Each piece by its own ratio."""
    pieces = (Piece(1, 64, CONFIG, ratio_to_baseline=0.9), Piece(65, 512, CONFIG, ratio_to_baseline=1.1))
    source = Table(here(), ranges=[RangeEntry(parse_range("gemm 1..512x256x128 bf16 kk"), pieces)])
    assert ask(source, Problem(64, 256, 128)).config is None
    assert ask(source, Problem(65, 256, 128)).config == CONFIG


def test_only_what_calls_of_torch_compute_is_left_to_it() -> None:
    """One call that rounds once, by default; with ``torch`` an activation behind it; else kernels stay."""
    one = ("bias=n", "alpha", "alpha beta", "alpha bias=n")
    several = ("act=relu", "bias=n act=silu", "beta act=gelu")
    for words in (*one, *several, "bias=m", "beta bias=n", "out=fp32"):
        problem = Problem.parse(f"gemm 128x256x128 bf16 kk {words}")
        for fallback in ("expected", "torch"):
            kept = words not in (*one, *(several if fallback == "torch" else ()))
            assert (ask(table((problem, 0.1)), problem, fallback).config == CONFIG) == kept, words
    plain, batched = (Problem.parse(f"gemm {shape}64x64x64 bf16 kk bias=n") for shape in ("", "2x"))
    assert GEMM.is_library_call(plain) and not GEMM.is_library_call(batched)
    assert not GEMM.is_library_calls(Problem.parse("gemm 64x64x64 e4m3 kk bias=n"))


def test_what_is_fused_counts_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls behind the product take torch longer; a bias adds a microsecond to a kernel."""
    arch = find_arch("sm_90a")
    base = GEMM.baseline_us(PROBLEM, arch, 132)
    added = {
        words: (GEMM.baseline_us(Problem.parse(f"{PROBLEM} {words}"), arch, 132) or 0.0) - (base or 0.0)
        for words in ("bias=n", "beta", "act=silu")
    }
    assert added["bias=n"] == 0.0 and all(1.5 < added[words] < 1.6 for words in ("beta", "act=silu"))
    assert GEMM.fused_us(FUSED) == pytest.approx(0.3 + 1.3e-6 * 128 * 256)
    assert GEMM.fused_us(replace(FUSED, k=4096)) == pytest.approx(0.3 + 1.3e-6 * 128 * 256 / 16)
    assert GEMM.fused_us(replace(FUSED, m=32)) < 0.5
    biased = replace(PROBLEM, epilogue=Epilogue(bias="n"))
    own = (predictor(SPACE, biased, 132) or (lambda _: None))(default_config(SPACE, biased, 132))
    assert own is not None
    own += 1.2 + GEMM.hidden_us
    for torch_us, kernel in ((own * 0.99, False), (own * 1.01, True)):
        monkeypatch.setattr(GEMM, "baseline_us", lambda *_, took=torch_us: took)
        assert (ask(None, biased).config is not None) == kernel


def test_what_launches_back_to_back_hide_counts_against_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead of 0.2 us back to back is none behind another kernel; one of 0.6 us is."""
    own = (predictor(SPACE, PROBLEM, 132) or (lambda _: None))(default_config(SPACE, PROBLEM, 132))
    assert own is not None
    for lead_us, kernel in ((0.2, False), (0.6, True)):
        monkeypatch.setattr(GEMM, "baseline_us", lambda *_, took=own + lead_us: took)
        assert (ask(None).config is not None) == kernel


def test_leads_of_products_with_a_along_m_must_be_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectations are off by twice as much there."""
    for layout, least in (("kk", 1.0), ("kn", 1.0), ("mn", 1.1), ("mk", 1.1)):
        problem = replace(PROBLEM, layout=layout)
        own = (predictor(SPACE, problem, 132) or (lambda _: None))(default_config(SPACE, problem, 132))
        assert own is not None
        own += GEMM.hidden_us
        for lead in (least - 0.01, least + 0.01):
            monkeypatch.setattr(GEMM, "baseline_us", lambda *_, took=own * lead: took)
            assert (ask(None, problem).config is not None) == (lead > least), (layout, lead)


def test_expectations_count_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``torch``, a kernel must be expected to be a tenth faster; a measurement outweighs that."""
    config = default_config(SPACE, PROBLEM, 132)
    predict = predictor(SPACE, PROBLEM, 132)
    assert predict is not None
    own = predict(config)
    assert own is not None
    own += GEMM.hidden_us
    for torch_us, kernel in ((own, False), (own * 1.09, False), (own * 1.11, True), (None, True)):
        monkeypatch.setattr(GEMM, "baseline_us", lambda *_, took=torch_us: took)
        answer = ask(None, fallback="torch")
        assert (answer.config == config) == kernel and answer.how == "default"
        assert ask(None, fallback="measured").config == config
        assert bool(answer.because) != kernel
    monkeypatch.setattr(GEMM, "baseline_us", lambda *_: own)
    assert f"expected {own:.1f} us of torch, {own:.1f} us of the kernel" in str(ask(None, fallback="torch"))
    assert ask(table((PROBLEM, 1.2)), fallback="torch").config == CONFIG


def test_by_default_what_nobody_measured_goes_to_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untuned sizes, and those that a neighbour answers, go to the faster one; tuned ones stay."""
    predict, near = predictor(SPACE, PROBLEM, 132), replace(PROBLEM, m=127)
    monkeypatch.setattr(GEMM, "is_fitted", lambda *_: False)  # so that neighbours answer, however good
    assert predict is not None and DEFAULT_FALLBACK == "expected"
    for source, config in ((None, default_config(SPACE, PROBLEM, 132)), (table((near, 1.2)), CONFIG)):
        own = predict(config)
        assert own is not None
        own += GEMM.hidden_us
        for torch_us, kernel in ((own * 0.99, False), (own * 1.01, True)):
            monkeypatch.setattr(GEMM, "baseline_us", lambda *_, took=torch_us: took)
            assert ask(source).config == (config if kernel else None)
    monkeypatch.setattr(GEMM, "baseline_us", lambda *_: 0.001)
    tuned = Table(here(), [Entry(PROBLEM, CONFIG)])
    assert ask(tuned).config == CONFIG and ask(tuned, fallback="torch").config is None


def test_without_an_expectation_the_kernel_answers() -> None:
    """On a GPU of which nothing is known, and for products that were not measured."""
    blackwell = find_arch("sm_100a")
    assert GEMM.baseline_us(PROBLEM, blackwell, 148) is None
    for line in ("gemm 64x64x64 bf16 kk out=fp32", "gemm 64x64x64 e4m3 kk", "gemm 4x64x64x64 bf16 kk"):
        assert GEMM.baseline_us(Problem.parse(line), find_arch("sm_90a"), 132) is None
    assert GEMM.baseline_us(PROBLEM, find_arch("sm_90a"), 132) is not None


def test_the_dispatcher_then_the_table_then_the_default_says_it(tmp_path: Path) -> None:
    """And a new table keeps the dispatcher's setting unless another is given."""
    assert DEFAULT_FALLBACK in FALLBACKS
    slow = ((PROBLEM, 0.5),)
    assert ask(table(*slow)).config is None
    assert ask(table(*slow, fallback="none")).config == CONFIG
    assert ask(table(*slow, fallback="none"), fallback="measured").config is None
    path = tmp_path / "t.json"
    table(*slow, fallback="none").save(path)
    dispatcher = FakeGpu(tmp_path).dispatcher(fallback="").with_table(path)
    assert dispatcher.explain(PROBLEM).config == CONFIG
    again = dispatcher.with_table(path, fallback="measured")
    assert again.explain(PROBLEM).config is None and again.kernel(PROBLEM) is None
    assert again.with_table(path).fallback == "measured"
    assert again.with_table(path, fallback="").explain(PROBLEM).config == CONFIG
    with pytest.raises(UsageError, match="fallback is 'cublas'; valid: torch, expected, measured, none"):
        Dispatcher(fallback="cublas")


def test_a_config_that_the_caller_gives_is_run(tmp_path: Path) -> None:
    """The setting is about choices of ours."""
    gpu = FakeGpu(tmp_path)
    dispatcher = Dispatcher(kernels=gpu.kernels(), device=lambda _: H200, device_type="cpu", fallback="torch")
    choice = dispatcher.kernel(PROBLEM, config=CONFIG)
    assert choice is not None and choice.answer.config == CONFIG


# --- calls ---


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeGpu]:
    """Operators that ask a table in which torch is faster for one product, at kn."""
    fake = FakeGpu(tmp_path)
    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(fake.dispatcher(table((replace(PROBLEM, layout="kn"), 0.5))))
    yield fake
    cutegen.use(before)


def operands(m: int = 128) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.rand(shape, generator=generator) - 0.5 for shape in ((m, 128), (128, 256)))
    return a.to(torch.bfloat16), b.to(torch.bfloat16)


def test_eager_calls_are_torch_calls_then(gpu: FakeGpu) -> None:
    """Equal bits, into new and given outputs, and no kernel is compiled; another m runs a kernel."""
    a, b = operands()
    out = torch.empty(128, 256, dtype=torch.bfloat16)
    assert torch.equal(cutegen.gemm(a, b), torch.mm(a, b))
    assert cutegen.gemm(a, b, out=out) is out and torch.equal(out, torch.mm(a, b))
    assert not gpu.compiled and not gpu.calls
    cutegen.gemm(*operands(64))
    assert len(gpu.compiled) == len(gpu.calls) == 1


def test_fused_calls_run_kernels_all_the_same(gpu: FakeGpu) -> None:
    """Nothing else than the plain product is left to torch."""
    a, b = operands()
    got = cutegen.gemm(a, b, activation="relu")
    assert len(gpu.calls) == 1
    torch.testing.assert_close(got.float(), torch.mm(a.float(), b.float()).relu(), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu"])
def test_activations_are_torch_calls_where_torch_was_asked_for(
    gpu: FakeGpu, tmp_path: Path, name: str
) -> None:
    """Equal bits to what a program without cutegen computes, and no kernel is compiled."""
    fused = replace(PROBLEM, layout="kn", epilogue=Epilogue(bias="n", activation=name))
    cutegen.use(FakeGpu(tmp_path).dispatcher(table((fused, 0.5)), fallback="torch"))
    a, b = operands()
    bias = torch.linspace(-1, 1, 256).to(torch.bfloat16)
    wanted = getattr(torch.nn.functional, name)(torch.addmm(bias, a, b))
    assert torch.equal(cutegen.gemm(a, b, bias=bias, activation=name), wanted)
    assert not gpu.compiled


def test_compiled_functions_honour_it(gpu: FakeGpu) -> None:
    """Through the registered operators, with and without an output."""
    a, b = operands()
    out = torch.empty(128, 256, dtype=torch.bfloat16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Any, y: Any, given: Any) -> Any:
        cutegen.gemm(x, y, out=given)
        return cutegen.gemm(x, y)

    assert torch.equal(run(a, b, out), torch.mm(a, b)) and torch.equal(out, torch.mm(a, b))
    assert not gpu.compiled and not gpu.calls


def test_load_table_takes_the_setting(gpu: FakeGpu, tmp_path: Path) -> None:
    """As an argument; the operators ask the new dispatcher from then on."""
    path = tmp_path / "t.json"
    table((replace(PROBLEM, layout="kn"), 0.5)).save(path)
    assert cutegen.load_table(path, fallback="none").fallback == "none"
    cutegen.gemm(*operands())
    assert len(gpu.calls) == 1
    assert cutegen.load_table(path, fallback="measured").fallback == "measured"
    cutegen.gemm(*operands())
    assert len(gpu.calls) == 1
    assert cutegen.configure(fallback="none").fallback == "none"
    cutegen.gemm(*operands())
    assert len(gpu.calls) == 2
    configured = cutegen.configure(build="never")
    assert (configured.fallback, configured.kernels.build) == ("none", "never")


# --- commands ---


def test_explain_says_that_torch_computes_it_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the table, and as asked on the command line."""
    path = tmp_path / "t.json"
    replaced = replace(here(), compute_capability="9.0a")
    Table(replaced, table((PROBLEM, 0.5)).entries.values()).save(path)
    words = ["explain", "gemm", "--arch", "sm_90a", "--table", str(path), "--shape", "128x256x128"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "torch computes it: torch.mm was measured 2.00 times as good" in " ".join(text.split())
    assert cli.main([*words, "--json", "--fallback", "none"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["config"] == CONFIG.to_json() and found["because"] == ""


def test_a_tuning_run_may_write_it_into_the_table(tmp_path: Path) -> None:
    """Also where nothing is left to tune; without it the table keeps what it says."""
    for given, kept in ((None, None), ("torch", "torch"), (None, "torch"), ("none", "none")):
        tuner = AutoTuner(cache_dir=tmp_path, device=H200, fallback=given)
        assert list(tuner.tune_all([])) == []
        found = Table.find(tuner.setting.table or tmp_path)
        assert (None if found is None else found.fallback) == kept
    with pytest.raises(UsageError, match="fallback is 'cublas'"):
        AutoTuner(cache_dir=tmp_path, device=H200, fallback="cublas")


def test_without_a_gpu_there_is_no_table_to_write_it_into(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is compiled."""
    words = ["tune", "gemm", "--arch", "sm_90a", "--shape", "64x64x64", "--fallback", "torch"]
    assert cli.main(words) == 2
    assert "--fallback torch is a field of the table" in " ".join(capsys.readouterr().err.split())
