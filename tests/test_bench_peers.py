"""Peers of the benchmark: who tunes how, what is run again without tuning, and how they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.check import Verdict
from cutegen.errors import BuildError, LaunchError, MeasureError
from cutegen.measure import Candidate, CheckResult, TimingRun
from cutegen.policy import Policy, Timing
from cutegen.problem import Epilogue, Problem
from cutegen.store import Store
from tools.benchmark import child, operators
from tools.benchmark.child import QuackCall, QuackOrder
from tools.benchmark.contest import UnsupportedError
from tools.benchmark.operators import Operators, Point, ask_space, kernel_source
from tools.benchmark.quack import Quack
from tools.benchmark.results import Entry

PROBLEM = Problem(256, 512, 1024)
ARCH = find_arch("sm_90a")
CONFIG = {"tile_m": 128, "tile_n": 192, "cluster_m": 2, "cluster_n": 1, "pingpong": True, "split_k": 1}


class Arena:
    """Right answers from everyone, times by name; writes the note that QuACK's child would."""

    def __init__(
        self, times: Mapping[str, float] | None = None, note: Mapping[str, Any] | None = None
    ) -> None:
        self.times = times or {}
        self.note = note
        self.checked: list[Candidate] = []
        self.policies: list[Policy] = []
        self.wrong: set[str] = set()

    def open(self, problem: Problem, seed: int = 0) -> None:
        """Nothing to make."""

    def check(self, candidate: Candidate) -> CheckResult:
        self.checked.append(candidate)
        if candidate.name in self.wrong:
            return CheckResult("wrong_result", "nan")
        if self.note is not None:
            Path(json.loads(candidate.symbol)["note"]).write_text(json.dumps(self.note))
        return CheckResult("ok", verdict=Verdict(True))

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        self.policies.append(policy)
        timings = {
            c.name: Timing.of([self.times[c.name]] * 3, [10.0] * 3)
            for c in candidates
            if c.name in self.times
        }
        failures = {
            c.name: CheckResult("launch_failed", "refused") for c in candidates if c.name not in timings
        }
        return TimingRun(timings, Timing.of([10.0] * 3), failures)


def known(choice: Mapping[str, Any], **details: Any) -> dict[Problem, Entry]:
    return {PROBLEM: Entry("ok", "", Timing.of([9.0]), "", choice, 20.0, details)}


# --- QuACK, seen from the parent ---


def test_quack_is_tuned_in_the_child_and_timed_by_the_config_it_found() -> None:
    """Its seconds and counts are kept; a child that is replaced need not tune again."""
    arena = Arena(note={"config": CONFIG, "tuning_s": 20.123, "candidates": 44, "failed": 1})
    entrant = Quack(split_k=0, timed_calls=40).enter(arena, PROBLEM)
    order = QuackOrder.from_json(json.loads(arena.checked[0].symbol))
    assert (order.config, order.split_k, order.timed_calls) == (None, 0, 40)
    assert entrant.tuning_s == 20.12 and entrant.details == {"candidates": 44, "failed": 1}
    (finalist,) = entrant.finalists
    assert (finalist.choice, finalist.config) == (CONFIG, "128x192 2x1 pingpong")
    assert QuackOrder.from_json(json.loads(finalist.candidate.symbol)) == QuackOrder(config=CONFIG)


def test_quack_runs_what_an_earlier_contest_found_without_tuning() -> None:
    """The record says where it was tuned, and how long that took then."""
    arena = Arena()
    entrant = Quack(known=known(CONFIG, candidates=44), known_from="first.json").enter(arena, PROBLEM)
    assert [json.loads(c.symbol)["config"] for c in arena.checked] == [CONFIG]
    assert entrant.tuning_s == 20.0
    assert entrant.details == {"candidates": 44, "tuned_in": "first.json"}


def test_quack_without_a_note_is_an_error() -> None:
    """Nobody knows what ran."""
    with pytest.raises(MeasureError, match="left no note"):
        Quack().enter(Arena(), PROBLEM)


@pytest.mark.parametrize("peer", [Quack(), Operators(Store(Path("unused")), ARCH)])
def test_peers_compare_plain_products_only(peer: Quack | Operators) -> None:
    """What is fused behind a product is not theirs to match."""
    with pytest.raises(UnsupportedError, match="plain products"):
        peer.enter(Arena(), Problem(256, 512, 1024, epilogue=Epilogue(beta=True)))


# --- QuACK, in the child ---


@dataclass(frozen=True)
class GemmConfig:
    tile_m: int = 128
    split_k: int = 1


class Tuner:
    """QuACK's autotuner, as far as we look at it."""

    def __init__(self) -> None:
        self.tuned = 0
        self.ran: list[tuple[GemmConfig, int]] = []
        self.times: list[float] = [1.0, float("inf"), 3.0]
        self.error: Exception | None = None

    def tune(self) -> None:
        self.tuned += 1
        self.configs_timings = {str(i): [seconds] for i, seconds in enumerate(self.times)}
        self.best_config = SimpleNamespace(kwargs={"config": GemmConfig(256)})

    def fn(self, a: Any, b: Any, d: Any, *, config: GemmConfig, split_k: int) -> None:
        if self.error:
            raise self.error
        self.ran.append((config, split_k))


class DSLBaseError(Exception):
    """As the compiler's."""


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuner]:
    """A QuACK that is not there."""
    made = Tuner()
    calls: list[dict[str, Any]] = []

    def gemm(a: Any, b: Any, **options: Any) -> None:
        calls.append(options)
        if not made.tuned:
            made.tune()

    interface = SimpleNamespace(gemm=gemm, gemm_tuned=made, calls=calls)
    autotuner = SimpleNamespace(_bench_cuda_graph_l2_rotate=lambda **options: options)
    quack: Any = ModuleType("quack")
    quack.gemm_interface, quack.autotuner = interface, autotuner
    quack.gemm_config = SimpleNamespace(GemmConfig=GemmConfig)
    common: Any = ModuleType("cutlass.base_dsl.common")
    common.DSLBaseError = DSLBaseError
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(synchronize=lambda: None)
    modules = {"quack": quack, "cutlass.base_dsl.common": common, "torch": torch}
    modules |= {name: ModuleType(name) for name in ("cutlass", "cutlass.base_dsl")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    made.autotuner = autotuner  # type: ignore[attr-defined]
    made.calls = calls  # type: ignore[attr-defined]
    yield made


def test_the_first_call_tunes_and_leaves_a_note(tuner: Any, tmp_path: Path) -> None:
    """Later calls do not tune; the note holds config, counts and seconds."""
    order = QuackOrder(str(tmp_path / "note.json"))
    call = child.load(Path("/anywhere") / child.QUACK_CALL, json.dumps(order.to_json()))
    call("a", "b", "d")
    call("a", "b", "d")
    assert tuner.tuned == 1 and len(tuner.calls) == 2
    assert tuner.calls[0] == {"out": "d", "tuned": True, "split_k": 1}
    note = json.loads((tmp_path / "note.json").read_text())
    assert note["config"] == {"tile_m": 256, "split_k": 1}
    assert (note["candidates"], note["failed"]) == (3, 1) and note["tuning_s"] >= 0


def test_split_k_is_left_to_its_autotuner_when_asked_for(tuner: Any) -> None:
    """None is its word for that."""
    QuackCall(QuackOrder(split_k=0))("a", "b", "d")
    assert tuner.calls[0]["split_k"] is None


def test_a_given_config_is_run_without_tuning(tuner: Any) -> None:
    """With its own split."""
    QuackCall(QuackOrder(config={"tile_m": 64, "split_k": 4}))("a", "b", "d")
    assert tuner.tuned == 0 and tuner.ran == [(GemmConfig(64, 4), 4)]


def test_a_tuner_whose_configs_all_failed_has_no_winner(tuner: Any) -> None:
    """It would name the first one."""
    tuner.times = [float("inf")] * 2
    with pytest.raises(LaunchError, match="all 2 configs"):
        QuackCall(QuackOrder())("a", "b", "d")


def test_errors_of_its_compiler_are_failures_of_the_candidate(tuner: Any) -> None:
    """They are no subclass of what a launch raises."""
    tuner.error = DSLBaseError("no layout")
    with pytest.raises(LaunchError, match="does not compile: no layout"):
        QuackCall(QuackOrder(config={}))("a", "b", "d")


def test_fewer_timed_calls_reach_its_benchmark_and_do_not_pile_up(tuner: Any) -> None:
    """Only that number changes."""
    for count in (40, 20):
        QuackCall(QuackOrder(timed_calls=count))
        found = tuner.autotuner._bench_cuda_graph_l2_rotate(quantiles=(0.5,))
        assert found == {"quantiles": (0.5,), "n_timed_calls": count}


def test_a_missing_quack_is_a_failed_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child lives on."""
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(LaunchError, match="QuACK cannot be imported"):
        QuackCall(QuackOrder())


def test_the_library_call_is_made_with_the_table_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name leaves the cache's table."""
    import cutegen

    seen: list[Any] = []
    monkeypatch.setattr(cutegen, "load_table", seen.append, raising=False)
    monkeypatch.setattr(cutegen, "gemm", lambda a, b, out: seen.append((a, b, out)), raising=False)
    child.load(Path(child.GEMM_CALL), "t.json")("a", "b", "d")
    child.load(Path(child.GEMM_CALL), "")("a", "b", "d")
    assert seen == ["t.json", ("a", "b", "d"), ("a", "b", "d")]


# --- the Operator API ---


POINTS = tuple(Point((128, n), (2, 1), 66) for n in (64, 128, 256))
NAMES = [f"operators {point}" for point in POINTS]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An Operator API with three operators, of which the first does not compile; returns what was asked."""
    asked: list[str] = []

    def space(problems: Sequence[Problem], arch: object) -> dict[str, tuple[Point, ...]]:
        asked.extend(map(str, problems))
        return {operators._kind(problem): POINTS for problem in problems}

    class FakeBuilder:
        def __init__(self, store: object, workers: object) -> None:
            """Nothing to start."""

        def __enter__(self) -> FakeBuilder:
            return self

        def __exit__(self, *error: object) -> None:
            """Nothing to end."""

        def build(self, sources: Mapping[Any, Point]) -> Iterator[tuple[Any, Any]]:
            for source in sources:
                bad = "(128, 64)" in source.text
                artifact = Artifact("0" * 32, "symbol", "sm_90a", tmp_path, None, 1.0, "", None)  # type: ignore[arg-type]
                yield source, SimpleNamespace(message="too large") if bad else artifact

    monkeypatch.setattr(operators, "ask_space", space)
    monkeypatch.setattr(operators, "Builder", FakeBuilder)
    monkeypatch.setattr(operators, "_kernel_text", lambda: "# kernel")
    return asked


def test_all_operators_are_timed_shortly_and_the_fastest_go_on(api: list[str], tmp_path: Path) -> None:
    """Only these are checked; what did not compile is counted."""
    peer = Operators(Store(tmp_path), ARCH, keep=1)
    peer.prepare([PROBLEM])
    arena = Arena({NAMES[1]: 9.0, NAMES[2]: 8.0})
    entrant = peer.enter(arena, PROBLEM)
    assert arena.policies == [Policy.screen()]
    assert [c.name for c in arena.checked] == [NAMES[2]]
    assert [f.config for f in entrant.finalists] == ["128x256 2x1"]
    assert entrant.details["candidates"] == 2 and entrant.details["failed_to_compile"] == 1
    assert entrant.tuning_s is not None


def test_a_wrong_operator_leaves_the_other_finalists(api: list[str], tmp_path: Path) -> None:
    """With all of them wrong, the peer is."""
    peer = Operators(Store(tmp_path), ARCH)
    peer.prepare([PROBLEM])
    arena = Arena({NAMES[1]: 9.0, NAMES[2]: 8.0})
    arena.wrong = {NAMES[2]}
    assert [f.config for f in peer.enter(arena, PROBLEM).finalists] == ["128x128 2x1"]
    arena.wrong = {NAMES[1], NAMES[2]}
    with pytest.raises(Exception, match="nan"):
        peer.enter(arena, PROBLEM)


def test_operators_of_an_earlier_contest_are_run_without_listing_or_timing_all(
    api: list[str], tmp_path: Path
) -> None:
    """Neither the API nor the short rounds are needed."""
    choices = known(POINTS[2].to_json(), finalists=[POINTS[1].to_json(), POINTS[2].to_json()])
    peer = Operators(Store(tmp_path), ARCH, known=choices, known_from="first.json")
    peer.prepare([PROBLEM])
    arena = Arena()
    entrant = peer.enter(arena, PROBLEM)
    assert api == [] and arena.policies == []
    assert [f.config for f in entrant.finalists] == ["128x128 2x1", "128x256 2x1"]
    assert entrant.tuning_s == 20.0 and entrant.details["tuned_in"] == "first.json"


def test_operators_that_cannot_be_timed_or_compiled_say_why(api: list[str], tmp_path: Path) -> None:
    """The first reason stands for all."""
    peer = Operators(Store(tmp_path), ARCH)
    peer.prepare([PROBLEM])
    with pytest.raises(MeasureError, match="none of the operators could be timed: refused"):
        peer.enter(Arena(), PROBLEM)
    only_bad = Operators(Store(tmp_path), ARCH, known=known(POINTS[0].to_json()))
    only_bad.prepare([PROBLEM])
    with pytest.raises(BuildError, match="too large"):
        only_bad.enter(Arena(), PROBLEM)


@pytest.mark.parametrize(
    ("problem", "words"),
    [(Problem(256, 512, 1024, 2), "batches"), (Problem(256, 511, 1024), "multiples of 16 bytes")],
)
def test_operators_refuse_what_they_do_not_do(
    problem: Problem, words: str, api: list[str], tmp_path: Path
) -> None:
    """Such problems are not compiled for either."""
    peer = Operators(Store(tmp_path), ARCH)
    peer.prepare([problem])
    with pytest.raises(UnsupportedError, match=words):
        peer.enter(Arena(), problem)


def test_sources_differ_in_everything_that_is_compiled_in() -> None:
    """Tile, cluster, number of clusters, dtype and layout."""
    problems = [
        Problem(256, 512, 1024, ab_dtype=ab, layout=at) for ab in ("bf16", "fp16") for at in ("tn", "nt")
    ]
    points = [*POINTS, Point((128, 64), (1, 2), 66), Point((128, 64), (2, 1), 64)]
    texts = {kernel_source("# kernel", point, p, ARCH).text for point in points for p in problems}
    assert len(texts) == len(points) * len(problems)


def installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(installed(operators.PACKAGE), reason="there is something to list")
def test_a_failed_listing_shows_its_last_words() -> None:
    """Without the package there is nothing to list."""
    with pytest.raises(MeasureError, match=r"operators cannot be listed: .*operators"):
        ask_space([PROBLEM], ARCH, gpu=False)


@pytest.mark.dsl
@pytest.mark.skipif(
    not (installed(operators.PACKAGE) and installed("nvidia-cutlass-dsl")),
    reason="nvidia-cutlass-operators is not installed",
)
def test_the_hopper_space_is_listed_and_compiles(tmp_path: Path) -> None:
    """24 operators for each kind of product; one of them becomes an artifact."""
    problem = Problem(256, 512, 1024, ab_dtype="fp16", layout="nt")
    points = ask_space([problem], ARCH, gpu=False)[operators._kind(problem)]
    assert len(set(points)) == 24
    source = kernel_source(operators._kernel_text(), points[-1], problem, ARCH)
    with Builder(Store(tmp_path), workers=1) as builder:
        ((_, result),) = builder.build([source])
    assert isinstance(result, Artifact), result.message
