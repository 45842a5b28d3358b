"""Peers of the benchmark: who tunes how, what is run again without tuning, and how they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.build import Artifact
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.errors import BuildError, MeasureError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.measure import Candidate, CheckResult, TimingRun
from cutegen.measure.check import Verdict
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.operator_api import Offers, Refused
from cutegen.space import Config
from tools.benchmark import child, operators
from tools.benchmark.child import QuackOrder
from tools.benchmark.operators import Operators, short_name
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


# --- the Operator API ---


def hopper(n: int) -> Config:
    words = f"tile_shape_mn=128x{n} cluster_shape_mn=2x1"
    return Config.parse(f"source=operators operator=Sm90StaticPersistentGemmOperator {words}")


CONFIGS = tuple(map(hopper, (64, 128, 256)))
NAMES = [f"operators {short_name(config)}" for config in CONFIGS]
REFUSED = (Refused("Sm80TensorOpGemmOperator", 4, "too old"),)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An Operator API with three operators, of which the first does not compile; returns what was asked."""
    asked: list[str] = []

    def offers(problem: Problem, arch: object, store: object) -> Offers:
        asked.append(str(problem))
        return Offers(() if problem.unaligned_out or problem.epilogue != Epilogue() else CONFIGS, REFUSED)

    class FakeBuilder:
        def __init__(self, store: object, workers: object) -> None:
            """Nothing to start."""

        def __enter__(self) -> FakeBuilder:
            return self

        def __exit__(self, *error: object) -> None:
            """Nothing to end."""

        def build(self, sources: Sequence[Source]) -> Iterator[tuple[Any, Any]]:
            for source in sources:
                bad = "(128, 64)" in source.text
                artifact = Artifact("0" * 32, "symbol", "sm_90a", tmp_path, None, 1.0, "", None)  # type: ignore[arg-type]
                yield source, SimpleNamespace(message="too large") if bad else artifact

    monkeypatch.setattr(operators, "find_offers", offers)
    monkeypatch.setattr(operators, "Builder", FakeBuilder)
    for module in ("tools.benchmark.operators", "cutegen.families.gemm.family"):
        monkeypatch.setattr(f"{module}.require_package", lambda: "the package")
    return asked


def test_all_operators_are_timed_shortly_and_the_fastest_go_on(api: list[str], tmp_path: Path) -> None:
    """Only these are checked; what did not compile is counted."""
    peer = Operators(Store(tmp_path), ARCH, 132, keep=1)
    peer.prepare([PROBLEM])
    arena = Arena({NAMES[1]: 9.0, NAMES[2]: 8.0})
    entrant = peer.enter(arena, PROBLEM)
    assert arena.policies == [Policy.screen()]
    assert [c.name for c in arena.checked] == [NAMES[2]]
    assert [f.config for f in entrant.finalists] == ["128x256 2x1"]
    assert entrant.details["candidates"] == 2 and entrant.details["failed_to_compile"] == 1
    assert entrant.tuning_s is not None


def test_operators_of_an_earlier_contest_are_run_without_listing_or_timing_all(
    api: list[str], tmp_path: Path
) -> None:
    """Neither the API nor the short rounds are needed."""
    choices = known(CONFIGS[2].to_json(), finalists=[CONFIGS[1].to_json(), CONFIGS[2].to_json()])
    peer = Operators(Store(tmp_path), ARCH, 132, known=choices, known_from="first.json")
    peer.prepare([PROBLEM])
    arena = Arena()
    entrant = peer.enter(arena, PROBLEM)
    assert api == [] and arena.policies == []
    assert [f.config for f in entrant.finalists] == ["128x128 2x1", "128x256 2x1"]
    assert entrant.tuning_s == 20.0 and entrant.details["tuned_in"] == "first.json"


def test_operators_that_cannot_be_timed_or_compiled_say_why(api: list[str], tmp_path: Path) -> None:
    """The first reason stands for all."""
    peer = Operators(Store(tmp_path), ARCH, 132)
    peer.prepare([PROBLEM])
    with pytest.raises(MeasureError, match="none of the operators could be timed: refused"):
        peer.enter(Arena(), PROBLEM)
    only_bad = Operators(Store(tmp_path), ARCH, 132, known=known(CONFIGS[0].to_json()))
    only_bad.prepare([PROBLEM])
    with pytest.raises(BuildError, match="too large"):
        only_bad.enter(Arena(), PROBLEM)
