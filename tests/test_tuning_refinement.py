"""How a run searches: refinement in rounds, and how groups of candidates compare."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
from fake_tuning import SMALL, FakeCompiler, Rig, quick_search, remembered_rank  # noqa: F401
from test_tuning import DEFAULT, PROBLEM, view

from cutegen.arch import find_arch
from cutegen.build.render import Source
from cutegen.errors import LaunchError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.space import Config, Space
from cutegen.tuning import EFFORTS, Request, TuneResult
from cutegen.tuning.finalists import comparable_us
from cutegen.tuning.problem_run import ProblemRun


def test_refinement_goes_on_while_it_finds_something_better(tmp_path: Path) -> None:
    """If every new kernel is faster it takes all its turns; if none is, one."""

    def count(behaviour: Callable[[Config], str], refinements: int) -> int:
        effort = replace(SMALL, classes=1, refine=1, refinements=refinements)
        folder = tmp_path / f"{behaviour.__name__}{refinements}"
        rig = Rig(folder, behaviour, effort=effort)
        request = rig.tuner.request(Problem(4096, 4096, 4096), None, {"cluster_shape_mn": ((1, 1),)})
        (result,) = rig.tuner.run([request])
        assert isinstance(result, TuneResult)
        return sum(result.outcomes.values())

    def all_alike(config: Config) -> str:
        return "200"

    def never_enough(config: Config) -> str:
        fresh = view(config)
        return f"{1000 * 0.9 ** met.setdefault(fresh, len(met)):g}"

    met: dict[Config, int] = {}
    assert count(all_alike, 1) == count(all_alike, 3)
    assert count(never_enough, 1) < count(never_enough, 3)


@pytest.mark.parametrize(
    ("time_us", "always", "refined"),
    [("90", False, False), ("99.8", False, True), ("200", False, True), ("90", True, True)],
)
def test_under_load_a_search_refines_where_the_library_is_ahead(
    tmp_path: Path, time_us: str, always: bool, refined: bool
) -> None:
    """Or as fast as the best, or where the effort says so: else the first kernels hold the best one."""
    tried = {}
    for turns in (0, 1):
        effort = replace(SMALL, refine=2, refinements=turns, refines_under_load=always)
        rig = Rig(tmp_path / str(turns), lambda config: time_us, effort=effort)
        tried[turns] = rig.tuner.tune(4096, 4096, 4096).candidates
    assert (tried[1] > tried[0]) == refined


def test_what_is_refined_in_any_case() -> None:
    """Problems that power does not limit, what no fit has ranked, configs of the caller, other objectives."""
    arch, square = find_arch("sm_90a"), Problem(4096, 4096, 4096)
    request = Request(square, arch, 132)
    assert not request.refines_always
    assert not replace(request, effort=EFFORTS["quick"]).refines_always
    assert replace(request, effort=EFFORTS["exhaustive"]).refines_always
    assert replace(request, problem=Problem(64, 4096, 4096)).refines_always
    assert replace(request, problem=replace(square, ab_dtype="e4m3")).refines_always
    assert replace(request, arch=find_arch("sm_100a")).refines_always
    assert replace(request, problem=replace(square, epilogue=Epilogue(activation="silu"))).refines_always
    assert replace(request, explicit=(DEFAULT,)).refines_always
    assert replace(request, objective="energy").refines_always


def test_what_refinement_asks_for_comes_before_the_kernels_of_the_next_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These were asked for early and can wait; what a search begins with is in nobody's way."""
    asked: list[tuple[bool, int]] = []
    submit = FakeCompiler.submit

    def noting(compiler: FakeCompiler, sources: Iterable[Source], *, urgent: bool = False) -> None:
        some = list(sources)
        asked.append((urgent, len(some)))
        submit(compiler, some, urgent=urgent)

    monkeypatch.setattr(FakeCompiler, "submit", noting)
    rig = Rig(tmp_path, effort=replace(SMALL, refine=2, refinements=1))
    (result,) = rig.tuner.run([rig.tuner.request(Problem(4096, 4096, 4096))])
    assert isinstance(result, TuneResult)
    first, last = asked[0], asked[-1]
    assert not first[0] and last[0] and last[1] > 0


@pytest.mark.parametrize("refinements", [0, 1])
def test_the_next_problem_waits_for_what_refinement_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refinements: int
) -> None:
    """Its kernels are submitted behind those, so that they share the compiler with none; else at once."""
    asked: list[tuple[bool, str]] = []
    submit = FakeCompiler.submit

    def noting(compiler: FakeCompiler, sources: Iterable[Source], *, urgent: bool = False) -> None:
        some = list(sources)
        asked.extend((urgent, str(source.signature)) for source in some[:1])
        submit(compiler, some, urgent=urgent)

    monkeypatch.setattr(FakeCompiler, "submit", noting)
    rig = Rig(tmp_path, effort=replace(SMALL, refine=2, refinements=refinements))
    first, second = Problem(64, 4096, 4096), Problem(128, 4096, 4096, layout="mn")
    results = rig.tuner.run([rig.tuner.request(problem) for problem in (first, second)])
    assert all(isinstance(result, TuneResult) for result in results)
    refined = [at for at, (urgent, kind) in enumerate(asked) if urgent and kind == asked[0][1]]
    next_at = next(at for at, (_, kind) in enumerate(asked) if kind != asked[0][1])
    assert bool(refined) == bool(refinements) and all(at < next_at for at in refined)


def test_what_ends_the_next_problem_does_not_end_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is prepared while this one runs, and its error comes after this one's result."""
    prepare = ProblemRun.prepare

    def failing(run: ProblemRun) -> None:
        if run.runner.request.problem == COMING[1]:
            raise LaunchError("no kernel today")
        prepare(run)

    monkeypatch.setattr(ProblemRun, "prepare", failing)
    rig = Rig(tmp_path)
    results = rig.tuner.run([rig.tuner.request(problem) for problem in COMING])
    assert isinstance(next(results), TuneResult)
    with pytest.raises(LaunchError, match="no kernel today"):
        next(results)


def test_neighbours_of_the_best_have_bursts_in_the_finals_only(tmp_path: Path) -> None:
    """Those of other kinds were found by bursts before; near the best, settled times choose finalists."""
    rig = Rig(tmp_path, effort=replace(SMALL, refine=2, refinements=1))
    (result,) = rig.tuner.run([rig.tuner.request(Problem(4096, 4096, 4096))])
    assert isinstance(result, TuneResult)
    bursts = [policy.burst_rounds for policy, _ in rig.bench.timed]
    screened = bursts.index(0)
    assert 0 < screened < len(bursts) - 1 and all(bursts[:screened])
    assert not any(bursts[screened:-1]) and bursts[-1] > bursts[0]


def test_groups_compare_by_what_is_common_to_them() -> None:
    """In bursts that is the clock, whatever the vendor library took; under load it is the library."""
    calm = Timing.of([10.0] * 3, [12.0] * 3)
    odd = Timing.of([10.0] * 3, [13.0] * 3)
    burst, loaded = Policy.screen(), Policy.screen(loaded=True)
    assert comparable_us(calm, burst) == comparable_us(odd, burst) == 10.0
    assert comparable_us(calm, loaded) == pytest.approx(comparable_us(odd, loaded) * 13 / 12)
    slower_clock = Timing.of([11.0] * 3, [13.2] * 3)
    assert comparable_us(calm, loaded) == pytest.approx(comparable_us(slower_clock, loaded))


def test_given_kernels_are_varied_in_what_needs_no_compiler(tmp_path: Path) -> None:
    """A bundle's kernel wins with another rasterization than it came with, if that is asked for."""
    given = DEFAULT.replace(tile_shape_mn=(128, 128), swizzle_size=1, raster_along_m=False)

    def prefers_a_walk(config: Config) -> str:
        return "50" if view(config) == view(given) else "200"

    def tune(name: str, *, vary: bool) -> tuple[Rig, TuneResult]:
        rig = Rig(tmp_path / name, prefers_a_walk)
        request = replace(rig.tuner.request(PROBLEM, [given]), vary=vary)
        (result,) = rig.tuner.run([request])
        assert isinstance(result, TuneResult)
        return rig, result

    rig, result = tune("varied", vary=True)
    kernels = {view(row.config) for row in result.rows}
    walks = {(row.config["swizzle_size"], row.config["raster_along_m"]) for row in result.rows}
    assert kernels == {view(given), view(DEFAULT)} and len(walks) > 2
    assert len({source.digest for source in rig.compiler.compiled}) == 2
    _, fixed = tune("fixed", vary=False)
    assert {row.config for row in fixed.rows} == {given, DEFAULT}


COMING = [Problem(512 * n, 4096, 4096) for n in (1, 2, 3, 4)]


def count_winners(rig: Rig) -> int:
    """Tune ``COMING`` in a row and return how many winners came out of it."""
    results = rig.tuner.run([rig.tuner.request(problem) for problem in COMING])
    return sum(isinstance(result, TuneResult) for result in results)


def test_the_problem_that_may_be_next_is_ranked_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranking, in a thread, is complete before its candidates are asked for."""
    events: list[tuple[str, Problem]] = []
    awaited = threading.Event()

    def precompute(space: Space, problem: Problem, *rest: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        awaited.wait(10)  # as slow as can be: until the loop stands still for it
        awaited.clear()
        time.sleep(0.05)
        events.append(("ranked", problem))

    def propose(space: Space, problem: Problem, *rest: object, **options: object) -> list[Config]:
        events.append(("proposed", problem))
        return remembered_rank(space, problem, *rest, **options)  # type: ignore[arg-type]

    def stand_still(futures: object) -> None:
        awaited.set()
        wait(futures)  # type: ignore[arg-type]

    monkeypatch.setattr("cutegen.tuning.lookahead.precompute", precompute)
    monkeypatch.setattr("cutegen.tuning.lookahead.wait", stand_still)
    monkeypatch.setattr("cutegen.tuning.proposals.rank", propose)
    assert count_winners(Rig(tmp_path)) == len(COMING)
    ranked = [problem for what, problem in events if what == "ranked"]
    assert ranked == COMING[1:]
    assert all(events.index(("ranked", p)) < events.index(("proposed", p)) for p in ranked)


def test_nothing_is_ranked_for_problems_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that was run before answers from its records, at once."""
    begun: list[Problem] = []
    monkeypatch.setattr(
        "cutegen.tuning.lookahead.Lookahead.begin", lambda self, request: begun.append(request.problem)
    )
    assert count_winners(Rig(tmp_path)) == len(COMING)
    assert begun == COMING[1:]
    assert count_winners(Rig(tmp_path)) == len(COMING)
    assert begun == COMING[1:]


@pytest.mark.parametrize("vary", [False, True])
def test_given_candidates_are_ranked_only_to_be_varied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vary: bool
) -> None:
    """A bundle's configs need no proposals, but predictions say how their run-time knobs may do better."""
    ranked: list[Problem] = []
    monkeypatch.setattr(
        "cutegen.tuning.lookahead.precompute", lambda space, problem, *rest: ranked.append(problem)
    )
    rig = Rig(tmp_path)
    given = [replace(rig.tuner.request(p), explicit=(DEFAULT,), vary=vary) for p in COMING]
    assert len(list(rig.tuner.run(given))) == len(COMING)
    assert ranked == (COMING[1:] if vary else [])


def test_what_cannot_be_ranked_beside_is_found_out_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the thread touches no other problem, and the loop meets it itself if it is real."""

    def precompute(*question: object) -> None:
        raise ValueError("not now")

    monkeypatch.setattr("cutegen.tuning.lookahead.precompute", precompute)
    assert count_winners(Rig(tmp_path)) == len(COMING)
