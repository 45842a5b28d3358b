"""Two sources in one sweep: operators and our own kernels compete, and everything names whose kernel won."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from deployments import Workshop, load, operands
from fake_kernels import H200, FakeGpu
from fake_operators import LISTED, OFFERED, PACKAGE, operator, pretend_installed
from fake_torch import Torch
from fake_tuning import Rig, quick_search  # noqa: F401

from cutegen.arch import find_arch
from cutegen.build import Toolchain
from cutegen.build.store import Store
from cutegen.cli.report import document, result_lines, summary_lines
from cutegen.cli.tune import main as tune
from cutegen.deploy import pin_table
from cutegen.errors import ConfigError, MeasureError, ResourceError, TableError, UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.operator_api import Offers, find_offers
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.records.trial import Trial
from cutegen.records.trials import TrialStore
from cutegen.search.defaults import default_config
from cutegen.space import Config
from cutegen.tuning import AutoTuner, TuneResult
from cutegen.tuning.proposals import Proposals

ARCH = find_arch("sm_90a")
PROBLEM = Problem(4096, 4096, 4096)
DEFAULT = default_config(find_space("gemm", ARCH), PROBLEM)
DEFAULT_VIEW = find_space("gemm", ARCH).compile_view(DEFAULT)
BOTH = ("cutegen", "operators")
FIRST, SECOND = OFFERED


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs the real one."""
    pretend_installed(monkeypatch)


def times(theirs: float, ours: float = 150.0) -> object:
    """A behaviour: the first operator takes ``theirs``, the other one 200, each of our kernels ``ours``."""
    return lambda config: f"{theirs if config == FIRST else 200 if config == SECOND else ours:g}"


def rig(folder: Path, behaviour: object, sources: tuple[str, ...] = BOTH, **options: object) -> Rig:
    def offers(problem: Problem) -> Offers:
        return find_offers(problem, ARCH, Store(folder), ask=lambda kind, arch: LISTED)

    return Rig(folder, behaviour, sources=sources, offers=offers, **options)  # type: ignore[arg-type]


def trials_of(folder: Path) -> list[Trial]:
    with TrialStore(folder / "trials.db") as store:
        return list(store.find(PROBLEM))


def entry_of(made: Rig) -> Entry:
    assert made.tuner.setting.table is not None
    return Table.load(made.tuner.setting.table).entries[PROBLEM]


# --- the sweep ---


def test_the_faster_source_wins_and_the_table_names_it(tmp_path: Path) -> None:
    """Both ways; what is measured together carries its source into every trial."""
    for theirs, winner in ((50.0, "operators"), (199.0, "cutegen")):
        folder = tmp_path / winner
        made = rig(folder, times(theirs))
        result = made.tuner.tune_problem(PROBLEM)
        assert result.config.source == winner
        entry = entry_of(made)
        assert (entry.source, entry.config) == (winner, result.config)
        assert {row.config.source for row in result.rows} == set(BOTH)
        assert {trial.origin for trial in trials_of(folder)} == {*BOTH, "torch"}
        assert {t.config for t in trials_of(folder) if t.origin == "operators"} == set(OFFERED)


@pytest.mark.parametrize("count", [1, 4, 24])
def test_each_source_may_try_as_many_as_are_asked_for(tmp_path: Path, count: int) -> None:
    """Twins, kernels of ours with another ``use_pdl``, take no place from operators, which have none."""
    words = "source=operators operator=Sm90StaticPersistentGemmOperator"
    offered = [
        Config.parse(f"{words} tile_shape_mn={m}x{n} cluster_shape_mn={cluster}")
        for m, n in product((64, 128), (64, 128, 256))
        for cluster in ("1x1", "1x2", "2x1", "2x2")
    ]
    request = Rig(tmp_path, sources=BOTH, effort="standard").tuner.request(PROBLEM, count)
    tried = Proposals(request, offered, None).everything()
    assert len([config for config in tried if config.source == "operators"]) == count <= len(offered)


def test_the_best_of_each_source_is_among_the_finalists(tmp_path: Path) -> None:
    """However far behind, so that a result compares them; others of a slow source are not."""
    slow = rig(tmp_path / "slow", times(190.0))
    slow.tuner.tune_problem(PROBLEM)
    assert FIRST.digest in slow.bench.finals and SECOND.digest not in slow.bench.finals
    fast = rig(tmp_path / "fast", lambda c: "9" if c == FIRST else "200" if c == DEFAULT_VIEW else "150")
    rows = fast.tuner.tune_problem(PROBLEM).rows
    own = [row for row in rows if row.config.source == "cutegen" and not row.default]
    assert [row.time_us for row in own] == [150.0]


def test_operators_are_checked_and_timed_in_the_rounds_of_our_kernels(tmp_path: Path) -> None:
    """The winner's evidence is a timing next to the default's and torch's."""
    made = rig(tmp_path, times(90.0))
    result = made.tuner.tune_problem(PROBLEM)
    assert {config.digest for config in OFFERED} <= set(made.bench.checked)
    assert {FIRST.digest, DEFAULT.digest} <= set(made.bench.finals)
    assert result.ratio_to_default is not None and result.ratio_to_default.mid == pytest.approx(150 / 90)
    with TrialStore(tmp_path / "trials.db") as store:
        origins = {trial.origin for name in entry_of(made).trial_ids if (trial := store.get(name))}
    assert origins == {"operators", "cutegen", "torch"}


def test_a_tie_goes_to_our_own_kernel(tmp_path: Path) -> None:
    """Unless the table names theirs already."""

    def behaviour(config: Config) -> str:
        return "100" if config == FIRST else "150" if config == DEFAULT_VIEW else "100.05"

    assert rig(tmp_path / "new", behaviour).tuner.tune_problem(PROBLEM).config.source == "cutegen"
    known = rig(tmp_path / "known", times(90.0)).tuner.tune_problem(PROBLEM)
    assert known.config == FIRST
    assert rig(tmp_path / "known", behaviour, again=True).tuner.tune_problem(PROBLEM).config == FIRST


@pytest.mark.parametrize("what", ["error", "wrong_result", "launch_failed", "timeout", "breaks"])
def test_an_operator_that_fails_costs_itself_only(tmp_path: Path, what: str) -> None:
    """Its outcome is recorded under its source, and the others go on."""

    def behaviour(config: Config) -> str:
        return what if config == FIRST else "95" if config == SECOND else "150"

    result = rig(tmp_path, behaviour).tuner.tune_problem(PROBLEM)
    assert result.config == SECOND
    (failed,) = [t for t in trials_of(tmp_path) if t.config == FIRST and t.outcome != "ok"]
    assert failed.origin == "operators" and failed.error


def test_without_being_asked_for_operators_take_no_part(tmp_path: Path) -> None:
    """Nor is their package looked for."""

    def never(problem: Problem) -> Offers:
        raise AssertionError("nobody asked for operators")

    made = Rig(tmp_path, times(90.0), offers=never)  # type: ignore[arg-type]
    assert made.tuner.tune_problem(PROBLEM).config.source == "cutegen"
    assert {trial.origin for trial in trials_of(tmp_path)} == {"cutegen", "torch"}


def test_operators_alone_meet_the_default(tmp_path: Path) -> None:
    """Of ours only the default is tried, as always."""
    rig(tmp_path, times(90.0), ("operators",)).tuner.tune_problem(PROBLEM)
    tried = {t.config for t in trials_of(tmp_path) if t.config is not None}
    assert tried == {DEFAULT, *OFFERED}


def test_reasons_of_those_that_were_not_tried_are_kept(tmp_path: Path) -> None:
    """The API's, the adapter's, and for a problem that no operator computes the rule's."""
    tuner = rig(tmp_path, times(90.0)).tuner
    first, *_ = tuner.tune_problem(PROBLEM).refused
    assert first == "2 x OldOperator: needs another target"
    fused = tuner.tune_problem(Problem.parse("gemm 4096x4096x4096 bf16 kk bias=n"))
    assert fused.config.source == "cutegen"
    (reason,) = fused.refused
    assert reason.startswith("all: product_is_plain: The operators fuse nothing")


def test_fixed_knobs_hold_for_both_sources(tmp_path: Path) -> None:
    """An operator without such a knob is left out."""
    made = rig(tmp_path / "tile", times(90.0))
    made.tuner.tune_problem(PROBLEM, fixed={"tile_shape_mn": ((64, 64),)})
    assert {t.config for t in trials_of(tmp_path / "tile") if t.origin == "operators"} == {SECOND}
    made = rig(tmp_path / "pdl", times(90.0))
    made.tuner.tune_problem(PROBLEM, fixed={"use_pdl": (True,)})
    assert "operators" not in {t.origin for t in trials_of(tmp_path / "pdl")}


def test_as_many_operators_are_tried_as_own_kernels(tmp_path: Path) -> None:
    """``candidates`` counts for each source."""
    made = rig(tmp_path, times(90.0))
    made.tuner.tune_problem(PROBLEM, candidates=1)
    assert {t.config for t in trials_of(tmp_path) if t.origin == "operators"} == {FIRST}


def test_given_candidates_may_be_operators(tmp_path: Path) -> None:
    """They are the only ones tried beside the default."""
    rig(tmp_path, times(90.0)).tuner.tune_problem(PROBLEM, candidates=[SECOND])
    assert {t.config for t in trials_of(tmp_path) if t.config is not None} == {DEFAULT, SECOND}
    with pytest.raises(ConfigError, match="64x96 is not in its domain"):
        rig(tmp_path, times(90.0)).tuner.tune_problem(PROBLEM, candidates=[operator("64x96")])


# --- again ---


def test_the_same_question_is_answered_from_records(tmp_path: Path) -> None:
    """Winner, source and evidence come back; nothing is compiled or measured."""
    first = rig(tmp_path, times(90.0)).tuner.tune_problem(PROBLEM)
    again = rig(tmp_path, times(90.0))
    result = again.tuner.tune_problem(PROBLEM)
    assert result.reused and not again.started
    assert result.config == first.config == FIRST
    assert list(result.config) == list(FIRST)  # knobs in the order of their own space
    assert {row.config for row in result.rows} == {row.config for row in first.rows}
    assert result.refused == first.refused


def test_other_sources_or_another_package_are_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels were not all tried."""
    names = {rig(tmp_path, times(90.0), which).tuner.tune_problem(PROBLEM).run for which in (BOTH, BOTH[1:])}
    pretend_installed(monkeypatch, "another")
    names.add(rig(tmp_path, times(90.0)).tuner.tune_problem(PROBLEM).run)
    assert len(names) == 3


def test_a_run_for_one_source_does_not_undo_the_others_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's operator competes unasked, unless its package is gone."""
    rig(tmp_path, times(90.0)).tuner.tune_problem(PROBLEM)
    assert rig(tmp_path, times(90.0), ("cutegen",)).tuner.tune_problem(PROBLEM).config == FIRST

    def missing() -> str:
        raise ResourceError("gone")

    for module in ("families.gemm.family", "tuning.sweep"):
        monkeypatch.setattr(f"cutegen.{module}.require_package", missing)
    last = rig(tmp_path, times(90.0), ("cutegen",), again=True).tuner.tune_problem(PROBLEM)
    assert last.config.source == "cutegen"


# --- what is refused ---


@pytest.mark.parametrize("budget", [-1, 0, float("nan"), True, "60"])
def test_budgets_that_are_none_are_refused(tmp_path: Path, budget: Any) -> None:
    """With such a budget nothing would be measured, in silence."""
    with pytest.raises(
        UsageError, match=r"budget_s is .*; valid: seconds, more than 0, or None for no limit"
    ):
        AutoTuner("sm_90a", cache_dir=tmp_path, budget_s=budget)
    tuner = AutoTuner("sm_90a", cache_dir=tmp_path)
    with pytest.raises(UsageError, match="budget_s is"):
        list(tuner.tune_all([PROBLEM], budget_s=budget))


def test_what_is_said_of_a_table_that_none_writes_is_refused(tmp_path: Path) -> None:
    """Without a GPU there is no winner, as ``--arch`` says on the command line."""
    with pytest.raises(UsageError, match=r"table='mine.json' would stay unwritten: with arch='sm_90a'"):
        AutoTuner("sm_90a", cache_dir=tmp_path, table="mine.json")
    with pytest.raises(UsageError, match="fallback='torch' would stay unwritten"):
        AutoTuner("sm_90a", cache_dir=tmp_path, fallback="torch")


def test_sources_that_do_not_exist_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python and on the command line, with the valid ones."""
    with pytest.raises(UsageError, match="sources cublas; valid: cutegen, operators"):
        AutoTuner("sm_90a", cache_dir=tmp_path, sources=("cublas",))
    with pytest.raises(UsageError, match="sources are none"):
        AutoTuner("sm_90a", cache_dir=tmp_path, sources=())
    words = ["gemm", "--arch", "sm_90a", "--shape", "64x64x64", "--cache-dir", str(tmp_path)]
    assert tune([*words, "--sources", "cublas"]) == 2
    assert "valid: cutegen, operators" in capsys.readouterr().err


def test_a_missing_package_ends_the_command_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 3, the environment, and what to install."""
    monkeypatch.undo()
    monkeypatch.setattr("cutegen.families.gemm.operator_package.PACKAGE", "no-such-package-of-operators")
    from cutegen.families.gemm.operator_package import require_package

    require_package.cache_clear()
    words = ["gemm", "--arch", "sm_90a", "--shape", "64x64x64", "--cache-dir", str(tmp_path)]
    assert tune([*words, "--sources", "cutegen,operators"]) == 3
    assert "pip install 'cutegen[operators]'" in capsys.readouterr().err
    assert not list(tmp_path.glob("v1/*"))


def test_entries_and_trials_cannot_name_another_source_than_their_config() -> None:
    """Nor win without a config."""
    for source, config in (("cutegen", FIRST), ("operators", DEFAULT), ("operators", None)):
        with pytest.raises(TableError, match=f"won by {source}"):
            Entry(PROBLEM, config, source=source)
    with pytest.raises(MeasureError, match="of operators was recorded as one of cutegen"):
        Trial(PROBLEM, "ok", FIRST)
    assert Entry(PROBLEM, FIRST, source="torch").config == FIRST


# --- what is shown ---


def test_tables_and_documents_name_the_source(tmp_path: Path) -> None:
    """In every row, in the summary, and for programs."""
    made = rig(tmp_path, times(90.0))
    other = Problem(2048, 2048, 2048)
    results = {"a": made.tuner.tune_problem(PROBLEM), "b": made.tuner.tune_problem(other)}
    lines = result_lines("a", results["a"])
    (best,) = [line for line in lines if line.startswith("  best  ")]
    assert best.endswith("operators  tile_shape_mn=128x256 cluster_shape_mn=2x1")
    assert "  not tried: 2 x OldOperator: needs another target" in lines
    assert sum("  cutegen    tile" in line for line in lines) >= 1
    assert all("operators" in line for line in summary_lines(results)[1:3])
    first = document(results, {})["results"][0]  # type: ignore[index,call-overload]
    assert first["source"] == "operators" and first["winner"]["source"] == "operators"
    assert {row["source"] for row in first["candidates"]} == set(BOTH)
    assert first["refused"][0] == "2 x OldOperator: needs another target"


def test_without_a_gpu_operators_are_shown_without_a_time(tmp_path: Path) -> None:
    """The model knows our kernels only; theirs come after them, with their resources."""
    made = rig(tmp_path, times(90.0), device=None, arch="sm_90a")
    result = made.tuner.tune_problem(PROBLEM)
    assert isinstance(result, TuneResult) and result.config.source == "cutegen"
    kinds = [row.config.source for row in result.rows]
    assert kinds == sorted(kinds) and kinds.count("operators") == 2
    shown = [line for line in result_lines("a", result) if "  operators  " in line]
    assert len(shown) == 2 and all("no model" in line and " 168 " in line for line in shown)
    many = replace(result, rows=result.rows + result.rows[-1:] * 9)
    assert "  ... and 3 more of operators that compile" in result_lines("a", many)


# --- a winner in use ---


def fingerprint() -> Fingerprint:
    return Fingerprint.of(H200, Toolchain.current())


def test_dispatch_answers_with_an_operator_and_launches_it(tmp_path: Path) -> None:
    """Exactly, for kin of the same signature, and for a config that is given; a fused call is ours."""
    torch = pytest.importorskip("torch")
    import cutegen
    from cutegen.torch_ops import gemm as ops

    gpu, problem = FakeGpu(tmp_path), Problem(64, 128, 256)
    table = Table(fingerprint(), [Entry(problem, FIRST, source="operators")])
    dispatcher = gpu.dispatcher(table)
    for asked, how in (((64, 128), "exact"), ((60, 120), "bucket"), ((128, 128), "nearest")):
        answer = dispatcher.explain(Problem(*asked, 256))
        assert (answer.how, answer.config) == (how, FIRST)
    assert "source=operators" in str(dispatcher.explain(problem))
    for line in ("gemm 64x128x256 bf16 kk bias=n", "gemm 64x127x256 bf16 kk", "gemm 64x128x256 fp16 kk"):
        answer = dispatcher.explain(Problem.parse(line))
        assert answer.config is not None and answer.config.source == "cutegen"
    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(dispatcher)
    try:
        a, b = torch.randn(64, 256).bfloat16(), torch.randn(128, 256).bfloat16().t()
        for config in (None, SECOND, str(operator("64x128", "2x2"))):
            torch.testing.assert_close(cutegen.gemm(a, b, config=config), (a.float() @ b.float()).bfloat16())
        assert [call[3:] for call in gpu.calls] == [(66,), (132,), (30,)]
        with pytest.raises(ConfigError, match="product_is_plain"):
            cutegen.gemm(a, b, alpha=2.0, config=FIRST)
    finally:
        cutegen.use(before)
    assert [source.config for source in gpu.compiled] == [FIRST, SECOND, operator("64x128", "2x2")]


def test_an_operator_that_is_not_in_the_cache_needs_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call says what to install; a config that was loaded before needs nothing."""
    dispatcher = FakeGpu(tmp_path).dispatcher(
        Table(fingerprint(), [Entry(PROBLEM, FIRST, source="operators")])
    )
    dispatcher.kernel(PROBLEM, config=SECOND)

    def missing() -> str:
        raise ResourceError("pip install it")

    monkeypatch.setattr("cutegen.families.gemm.family.require_package", missing)
    with pytest.raises(ResourceError, match="pip install it"):
        dispatcher.kernel(PROBLEM)
    assert dispatcher.kernel(PROBLEM, config=SECOND) is not None


def test_a_pinned_operator_launches_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scalar of its space, and with the source that says where it came from."""
    log = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(log))
    problem = Problem(64, 128, 256)
    table = Table(fingerprint(), [Entry(problem, FIRST, source="operators", time_us=1.0)])
    table.save(tmp_path / "t.json")
    deployed = tmp_path / "deploy"
    pin_table(tmp_path / "t.json", deployed, kernels=Workshop(tmp_path / "cache").kernels())
    (record,) = json.loads((deployed / "manifest.json").read_text())["kernels"]
    assert record["config"] == str(FIRST) and record["scalars"] == [66] and not record["workspace_bytes"]
    assert f'PACKAGE = "{PACKAGE}"' in (deployed / record["source"]).read_text()
    deployment, torch = load(deployed, Torch())
    a, b, options = operands(problem, torch)
    deployment.gemm(a, b, **options)
    assert log.read_text().count("call") == 1
