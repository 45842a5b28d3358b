"""Protocols broken on purpose: the model says what is wrong, and the same edits fit the kernel's text."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import DEVICE
from patient_bench import PatientBench
from protocols import SMALL_BLACKWELL

from cutegen.arch import find_arch
from tools import break_template, simulate_space
from tools.schedule import Cluster, everything, lengths, protocol_of, simulate_cluster
from tools.schedule.breaks import BREAKS, CASES, OUTCOMES, Break, broken_source, case_of
from tools.schedule.edits import Edit, about, drop, release_first, repeat, settled
from tools.schedule.protocol import Arrive, Commit, Fence, Finish, Free, Multiply, Place, Step, Store, Wait
from tools.schedule.sm90 import HopperProtocol
from tools.schedule.sm100 import BlackwellProtocol

HOPPER = find_arch("sm_90a")


def hopper(case: str) -> HopperProtocol:
    protocol = protocol_of(*case_of(case, HOPPER), HOPPER)
    assert isinstance(protocol, HopperProtocol)
    return protocol


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_clean_before_they_are_broken(case: str) -> None:
    """So what is found below comes from the edits."""
    protocol = hopper(case)
    assert simulate_cluster(protocol.play(lengths(protocol, 4))).clean


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.name)
def test_every_break_is_found_and_named(each: Break) -> None:
    """At least one schedule finds it, and what it finds is what was to be expected."""
    kinds = simulate_cluster(each.model(hopper(each.case))).kinds
    assert kinds and kinds <= each.kinds
    assert each.expected in OUTCOMES
    if each.expected == "hang":
        assert "deadlock" in kinds


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.name)
def test_every_edit_fits_the_text_of_its_kernel_once(each: Break) -> None:
    """Else the GPU would be shown a kernel that is not broken, or broken in two places."""
    source = broken_source(each, HOPPER)
    compile(source.text, each.name, "exec")


# --- Blackwell ---

PAIRS = replace(
    SMALL_BLACKWELL,
    cluster=(4, 2),
    stages=3,
    empty_arrivals=3,
    bytes_b=64,
    expected_bytes=256,
    acc_arrivals=8,
    warps=4,
    store_buffers=2,
    pieces=3,
)

#: The same with tiles that are asked for: six warps of each of eight blocks listen, and the one that asks.
ASKED = {"answers": 1, "answer_arrivals": 8 * 6 + 1}


def same(cluster: Cluster) -> Cluster:
    return cluster


def own_column_only(cluster: Cluster) -> Cluster:
    """MMAs tell their own block only that a stage is free, not those that share it."""
    programs = []
    for program in cluster.programs:
        pairs = [
            (replace(s, barriers=s.barriers[:1]) if isinstance(s, Commit) and not s.fills else s, p)
            for s, p in program.pairs()
        ]
        programs.append(program.edited(pairs))
    return replace(cluster, programs=tuple(programs))


def any_of(kind: type) -> Callable[[Cluster, Step], bool]:
    return lambda _, step: isinstance(step, kind)


def last_tile(place: Place) -> bool:
    return place[0] == 3


def late(kind: type, where: Place, who: str) -> Edit:
    """Let one warp of the first block do what is of a kind, at one place, one step too late."""

    def edit(cluster: Cluster) -> Cluster:
        number = next(i for i, p in enumerate(cluster.programs) if p.name == who)
        pairs = list(cluster.programs[number].pairs())
        at = next(i for i, (step, place) in enumerate(pairs) if isinstance(step, kind) and place == where)
        pairs[at : at + 2] = reversed(pairs[at : at + 2])
        edited = (*cluster.programs[:number], cluster.programs[number].edited(pairs))
        return replace(cluster, programs=(*edited, *cluster.programs[number + 1 :]))

    return edit


def wait_at_the_leader(cluster: Cluster) -> Cluster:
    """Let the second block of a pair wait for sums at the barriers of the first."""
    names = {(barrier.name, barrier.block): i for i, barrier in enumerate(cluster.barriers)}

    def there(step: Step) -> Step:
        if not isinstance(step, Wait) or not str(cluster.barriers[step.barrier]).startswith("sums full"):
            return step
        return replace(step, barrier=names[cluster.barriers[step.barrier].name, 0])

    programs = (
        p.edited([(there(s), at) for s, at in p.pairs()]) if p.block == 1 else p for p in cluster.programs
    )
    return replace(cluster, programs=tuple(programs))


@pytest.mark.parametrize(
    ("changes", "edit", "kinds"),
    [
        ({}, same, ""),
        ({"empty_arrivals": 2}, same, "overrun overwrite"),
        ({"empty_arrivals": 4}, same, "deadlock"),
        ({"acc_arrivals": 4}, same, "overrun overwrite"),
        ({"acc_arrivals": 9}, same, "deadlock"),
        ({"expected_bytes": 128}, same, "overrun unfilled_read"),
        ({}, repeat(about(Arrive, "sums empty")), "overrun overwrite"),
        ({}, drop(about(Wait, "sums empty"), where=lambda place: not settled(place)), "overwrite"),
        ({}, drop(about(Wait, "sums full")), "unfilled_read uninitialised"),
        ({}, drop(about(Wait, "empty")), "overrun overwrite"),
        ({}, drop(about(Wait, "full")), "unfilled_read"),
        ({}, drop(about(Wait, "empty"), where=settled), "dead_block"),
        ({}, drop(about(Wait, "end of reading")), "dead_block"),
        ({}, release_first, "early_release"),
        ({}, own_column_only, "deadlock overrun"),
        ({}, drop(about(Finish, "store buffer"), where=settled), "busy_exit"),
        ({}, wait_at_the_leader, "remote_wait"),
        ({}, drop(any_of(Free)), "leak"),
        ({}, drop(any_of(Store), where=last_tile), "lost overwrite"),
        ({}, drop(any_of(Multiply), where=lambda place: place == (3, 3)), "lost"),
        ({}, late(Multiply, (1, 2), "multiplying warp"), "overwrite unfilled_read"),
        ({}, late(Fence, (2, -1), "epilogue warp 3"), "unfenced"),
        (ASKED, same, ""),
        (ASKED, drop(about(Wait, "answer empty"), where=settled), "dead_block"),
        (ASKED, drop(about(Wait, "answer empty")), "dead_block overrun overwrite"),
        (ASKED, drop(about(Wait, "answer full")), "unfilled_read"),
        (ASKED, drop(about(Arrive, "answer empty"), who="multiplying"), "deadlock"),
        ({**ASKED, "answer_arrivals": 8}, same, "overrun overwrite"),
    ],
)
def test_what_breaks_a_blackwell_kernel(changes: dict[str, object], edit: Edit, kinds: str) -> None:
    """Two pairs along m and two columns; every mistake is found and called what it is."""
    protocol = replace(PAIRS, **changes)  # type: ignore[arg-type]
    found = simulate_cluster(edit(protocol.play((4, 3, 5, 4)))).kinds
    assert bool(found) == bool(kinds)
    assert found <= set(kinds.split())


def test_every_order_finds_what_few_orders_show() -> None:
    """Sums that are read too early, in a world small enough to look at all of it."""
    alone = replace(SMALL_BLACKWELL, cluster=(1, 1), pair=1, acc_arrivals=1, expected_bytes=96, acc_stages=1)
    assert everything(alone.play((1, 1))).violation is None
    violation = everything(drop(about(Wait, "sums full"))(alone.play((1, 1)))).violation
    assert violation is not None and violation.kind == "unfilled_read"


# --- tools ---


def test_the_walk_over_a_space_ends_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per target, and what --set asks for is what is drawn."""
    assert simulate_space.main(["--pairs", "3", "--arch", "sm_90a", "--set", "pingpong=true"]) == 0
    printed = capsys.readouterr().out
    assert "sm_90a: 3 configs, 3 protocols" in printed and "all clean" in printed


def test_the_walk_says_which_config_is_not_clean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the text and the simulation disagree with a wrong count."""
    whole = BlackwellProtocol.of
    monkeypatch.setattr(
        BlackwellProtocol, "of", lambda *arguments: replace(whole(*arguments), acc_arrivals=5)
    )
    assert simulate_space.main(["--pairs", "1", "--arch", "sm_100a"]) == 1
    printed = capsys.readouterr().out
    assert "the kernel creates" in printed and "deadlock" in printed and "1 not clean" in printed


def test_kernels_come_case_by_case_each_case_with_one_that_is_not_broken() -> None:
    """The unbroken ones must pass; a race may show or not."""
    chosen = list(break_template.trials(HOPPER))
    assert len(chosen) == len(CASES) + len(BREAKS)
    controls = [trial for trial in chosen if trial.expected == "ok"]
    assert [trial.outcomes for trial in controls] == [frozenset({"ok"})] * len(CASES)
    assert len({trial.source.digest for trial in chosen}) == len(chosen)
    turns = [trial.expected for trial in break_template.trials(HOPPER, only="turn")]
    assert turns == ["ok", "hang", "hang", "race"]


@pytest.mark.parametrize(
    ("symbol", "outcome"),
    [("ok", "ok"), ("wrong", "wrong_result"), ("hangs", "timeout"), ("crashes", "launch_failed")],
)
def test_what_a_gpu_does_is_recorded(symbol: str, outcome: str, tmp_path: Path) -> None:
    """A kernel that hangs or kills its process is an outcome, and the next one is checked all the same."""
    trial = next(break_template.trials(HOPPER))
    artifact = SimpleNamespace(shared_object=tmp_path / "kernel.so", symbol=symbol)
    with PatientBench(1.0) as bench:
        record = break_template.check(trial, artifact, bench, DEVICE, repeats=1)
        assert record["outcome"] == outcome
        artifact.symbol = "ok"
        assert break_template.check(trial, artifact, bench, DEVICE, repeats=1)["outcome"] == "ok"


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_broken_kernels_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """Three of them and the kernel as it is; the tool compiles all."""
    assert break_template.main(["--compile-only", "--only", "turn"]) == 0
    assert "4 of 4" in capsys.readouterr().out
