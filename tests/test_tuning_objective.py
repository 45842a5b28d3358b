"""Tuning for energy, or for energy times time: who wins, who competes, and what records answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import DEVICE
from fake_tuning import SMALL, Rig, quick_search  # noqa: F401
from test_tuning import ARCH, DEFAULT, PROBLEM, SHAPE, SPACE, rivals, trials_of, view

from cutegen.errors import MeasureError, TableError, UsageError
from cutegen.measure.policy import OBJECTIVES, Policy
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.space import Config
from cutegen.tuning import Effort, Failed, Request
from cutegen.tuning.finalists import choose_winner, pick_finalists
from cutegen.tuning.winner import recorded_result


def thrifty(fast: str = "90@700", cool: str = "95@500", rest: str = "200@700") -> Callable[[Config], str]:
    """A behaviour: one kernel is fast, another needs less energy, the rest are neither."""
    first, second = map(view, rivals(2))
    return lambda config: {first: fast, second: cool}.get(config, rest)


def entry_of(rig: Rig) -> Entry:
    table = rig.tuner.setting.table
    assert table is not None
    return Table.load(table).entries[PROBLEM]


@pytest.mark.parametrize(
    ("objective", "behaviour", "winner"),
    [
        ("time", thrifty, 0),
        ("energy", thrifty, 1),
        ("edp", thrifty, 1),
        ("energy", lambda: thrifty("90@600", "100@520"), 1),
        ("edp", lambda: thrifty("90@600", "100@520"), 0),
    ],
)
def test_each_objective_has_its_winner(
    tmp_path: Path, objective: str, behaviour: Callable[[], Callable[[Config], str]], winner: int
) -> None:
    """90 us at 700 W beat 95 us at 500 W by time only; at 600 W they beat 100 us at 520 W but by energy."""
    rig = Rig(tmp_path, behaviour())
    result = rig.tuner.tune(*SHAPE, objective=objective)
    assert view(result.config) == view(rivals(2)[winner])
    assert result.objective == objective == entry_of(rig).objective
    costs = [row.timing.cost(objective).mid for row in result.rows if row.timing]  # type: ignore[union-attr]
    assert costs == sorted(costs)
    assert result.ratio_to_default is not None and result.ratio_to_default.mid > 1


def test_ratios_are_of_the_objective(tmp_path: Path) -> None:
    """torch.mm takes 100 us at 500 W: 1.05 times the time of 95 us at 400 W, and 1.32 times the energy."""
    rig = Rig(tmp_path, thrifty(cool="95@400"))
    result = rig.tuner.tune(*SHAPE, objective="energy")
    timing = result.winner.timing
    assert timing is not None and timing.ratio == pytest.approx(100 / 95)
    ratio = result.against_baseline(timing)
    assert ratio is not None and ratio.mid == pytest.approx(50 / 38) and ratio.low < ratio.mid < ratio.high
    entry = entry_of(rig)
    assert entry.energy_mj == pytest.approx(38.0) and entry.ratio_to_baseline == pytest.approx(50 / 38)
    assert entry.ratio_to_default == pytest.approx(200 * 0.7 / 38)


def test_baseline_wins_by_the_objective(tmp_path: Path) -> None:
    """A library that is slower but needs less energy wins for energy, if it may, and not for time."""
    hungry = thrifty(fast="90@700", cool="95@600")
    for objective, source in (("time", "cutegen"), ("energy", "torch")):
        rig = Rig(tmp_path / objective, hungry, allow_torch=True)
        rig.tuner.tune(*SHAPE, objective=objective)
        assert entry_of(rig).source == source
    assert entry_of(rig).energy_mj == pytest.approx(50.0) and entry_of(rig).ratio_to_baseline == 1.0


def test_overlapping_energies_are_a_tie(tmp_path: Path) -> None:
    """What does not beat the default's energy outside the intervals is no win, however fast it is."""
    first = view(rivals(1)[0])
    behaviour = {first: "90@556", view(DEFAULT): "100@500"}
    rig = Rig(tmp_path, lambda config: behaviour.get(config, "200@700"))
    assert rig.tuner.tune(*SHAPE, objective="energy").config == DEFAULT
    assert view(rig.tuner.tune(*SHAPE, objective="time").config) == first


def test_another_objective_is_another_question(tmp_path: Path) -> None:
    """Screening is remembered, finals are not; a table tuned for one does not answer for the other.

    What is new is what refinement finds around the incumbent.
    """
    first = Rig(tmp_path, thrifty())
    fast = first.tuner.tune(*SHAPE)
    rig = Rig(tmp_path, thrifty())
    cool = rig.tuner.tune(*SHAPE, objective="energy")
    assert not cool.reused and cool.config != fast.config and cool.run != fast.run
    assert first.bench.checked and not set(rig.bench.checked) & set(first.bench.checked)
    assert [policy.objective for policy, _ in rig.bench.timed if policy.clock == "settled"][-1] == "energy"
    assert {fast.config.digest, cool.config.digest} <= set(rig.bench.finals), "the incumbent competes"
    edp = Rig(tmp_path, thrifty())
    assert not edp.tuner.tune(*SHAPE, objective="edp").reused and edp.bench.finals
    again = Rig(tmp_path, thrifty())
    assert again.tuner.tune(*SHAPE, objective="edp").reused and not again.started


def test_going_back_rewrites_the_table(tmp_path: Path) -> None:
    """The finals of the first objective still hold for it; the entry says what it was chosen by."""
    fast = Rig(tmp_path, thrifty()).tuner.tune(*SHAPE)
    Rig(tmp_path, thrifty()).tuner.tune(*SHAPE, objective="energy")
    rig = Rig(tmp_path, thrifty())
    assert entry_of(rig).objective == "energy"
    back = rig.tuner.tune(*SHAPE)
    assert back.config == fast.config and not rig.started["bench"]
    assert entry_of(rig).objective == "time" and entry_of(rig).config == fast.config


def test_an_entry_for_another_objective_finishes_no_run(tmp_path: Path) -> None:
    """Even if its evidence were there."""
    rig = Rig(tmp_path, thrifty())
    rig.tuner.tune(*SHAPE)
    finals = [t for t in trials_of(tmp_path) if t.policy and t.policy.energy_s]  # type: ignore[attr-defined]
    request, entry = rig.tuner.request(PROBLEM), entry_of(rig)
    assert recorded_result(request, SPACE, DEVICE, entry, finals) is not None  # type: ignore[arg-type]
    other = replace(entry, objective="energy")
    assert recorded_result(request, SPACE, DEVICE, other, finals) is None  # type: ignore[arg-type]


def test_finals_say_what_they_were_for(tmp_path: Path) -> None:
    """The policy of a final names the objective; screening reads no energy."""
    Rig(tmp_path, thrifty()).tuner.tune(*SHAPE, objective="energy")
    trials = [t for t in trials_of(tmp_path) if t.timing]  # type: ignore[attr-defined]
    finals = [t for t in trials if t.policy.energy_s]  # type: ignore[attr-defined]
    assert {t.policy.objective for t in finals} == {"energy"}  # type: ignore[attr-defined]
    assert all(t.timing.energy for t in finals)  # type: ignore[attr-defined]
    screened = [t for t in trials if t not in finals]
    assert screened and all(t.timing.energy is None for t in screened)  # type: ignore[attr-defined]


def test_a_gpu_that_hides_its_energy_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Nothing is chosen by a number that nobody read; time works all the same."""
    rig = Rig(tmp_path, lambda config: "90@")
    with pytest.raises(MeasureError, match=r"energy counter cannot be read.*valid here: time"):
        rig.tuner.tune(*SHAPE, objective="energy")
    [failed] = rig.tuner.run([rig.tuner.request(PROBLEM, objective="edp")])
    assert isinstance(failed, Failed)
    result = rig.tuner.tune(*SHAPE)
    assert result.winner.timing is not None and result.winner.timing.energy is None
    assert entry_of(rig).energy_mj is None


def test_configs_of_unknown_energy_do_not_compete(tmp_path: Path) -> None:
    """The fastest of them all cannot win by energy if its energy could not be read; it is shown last."""
    rig = Rig(tmp_path, thrifty(fast="90@"))
    result = rig.tuner.tune(*SHAPE, objective="energy")
    assert view(result.config) == view(rivals(2)[1])
    assert view(result.rows[-1].config) == view(rivals(2)[0])


def test_finalists_are_timed_in_the_order_in_which_they_would_win_a_tie(tmp_path: Path) -> None:
    """Only the first few of many equals have their energy read, and the winner must be one of them."""
    rig = Rig(tmp_path, lambda config: "100")
    result = rig.tuner.tune(*SHAPE)
    configs = {row.config.digest: row.config for row in result.rows}
    order = [configs[name] for name in rig.bench.finals]
    assert order[0] == DEFAULT == result.config and len(order) > 3
    assert order[1:] == sorted(order[1:], key=SPACE.simplicity)


def test_mistaken_objectives_are_named(tmp_path: Path) -> None:
    """Anything but the three is refused, and so is energy where nothing is measured."""
    with pytest.raises(UsageError, match="unknown objective 'watts'; valid: time, energy, edp"):
        Rig(tmp_path).tuner.tune(*SHAPE, objective="watts")
    with pytest.raises(UsageError, match="valid: time, energy, edp"):
        Rig(tmp_path, objective="joules")
    with pytest.raises(UsageError, match="valid: time, energy, edp"):
        Request(PROBLEM, ARCH, 132, objective="joules")
    with pytest.raises(UsageError, match="energy needs a GPU; valid without one: time"):
        Rig(tmp_path, device=None, arch="sm_90a").tuner.tune(*SHAPE, objective="energy")


def test_the_tuner_remembers_by_objective(tmp_path: Path) -> None:
    """What it found out for one is not its answer for another; its own is the default of a call."""
    tuner = Rig(tmp_path, thrifty(), objective="energy").tuner
    cool = tuner.tune(*SHAPE)
    assert cool.objective == "energy" and tuner.get_cached(*SHAPE, objective="time") is None
    fast = tuner.tune(*SHAPE, objective="time")
    assert fast.config != cool.config
    assert tuner.get_cached(*SHAPE) is cool and tuner.get_cached(*SHAPE, objective="time") is fast
    assert (tuner.cache_size, tuner.cache[PROBLEM]) == (2, fast)
    assert [entry.objective for entry in tuner.get_tuning_history()] == ["energy", "time"]


def test_more_finalists_further_behind_compete_for_energy() -> None:
    """Screening is by time in either case, so what it loses must not be lost too early."""
    time, energy = (Request(PROBLEM, ARCH, 132, objective=name) for name in ("time", "energy"))
    effort = Effort()
    assert time.finalists == (effort.finalists, effort.final_band)
    assert energy.finalists == (effort.energy_finalists, effort.energy_band)
    assert energy.finalists > time.finalists and energy.finalists[1] > time.finalists[1]
    assert energy.screen_policy == time.screen_policy
    assert energy.final_s > time.final_s + 20 * energy.final_policy.energy_s
    slow = rivals(1)[0]
    times = {DEFAULT: 100.0, slow: 112.0}
    assert slow in pick_finalists(times, *energy.finalists, [])
    assert slow not in pick_finalists(times, *time.finalists, [])


def test_runs_for_different_objectives_have_different_names() -> None:
    """Or one would continue the other."""
    names = {
        Request(PROBLEM, ARCH, 132, SMALL, objective=o).run_name(None, "t") for o in ("time", "edp", "energy")
    }
    assert len(names) == 3


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("energy_mj", [None, 12.5])
def test_an_entry_keeps_its_objective_and_energy_in_the_file(
    tmp_path: Path, objective: str, energy_mj: float | None
) -> None:
    """A table round trip; entries from before there were objectives were tuned for time."""
    entry = Entry(PROBLEM, DEFAULT, objective=objective, energy_mj=energy_mj)
    Table(Fingerprint.of(DEVICE), [entry]).save(tmp_path / "t.json")
    assert Table.load(tmp_path / "t.json").entries == {PROBLEM: entry}
    data = entry.to_json()
    assert (data["objective"], data["energy_mj"]) == (objective, energy_mj)
    old = json.loads(json.dumps({k: v for k, v in data.items() if k not in ("objective", "energy_mj")}))
    assert Entry.from_json(PROBLEM, old) == Entry(PROBLEM, DEFAULT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "watts"}, "objective is 'watts'; valid: time, energy, edp"),
        ({"objective": 3}, "objective is 3, not text"),
        ({"energy_mj": 0}, "energy_mj is 0, not a positive number"),
    ],
)
def test_a_malformed_entry_is_explained(change: dict[str, object], message: str) -> None:
    """As with its other fields."""
    data = {**json.loads(json.dumps(Entry(PROBLEM, DEFAULT).to_json())), **change}
    with pytest.raises(TableError, match=message):
        Entry.from_json(PROBLEM, data)


def test_choosing_from_nothing_is_an_error_whatever_the_objective() -> None:
    """As for time."""
    with pytest.raises(MeasureError, match="no timing"):
        choose_winner(SPACE, {}, default=DEFAULT, objective="energy")
    assert Policy.final(objective="energy") != Policy.final(objective="edp")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "speed"}, "objective is 'speed'; valid: time, energy, edp"),
        ({"objective": None}, "objective is None, not text"),
        ({"source": "operators"}, "won by operators has a config of 'cutegen'"),
        ({"energy_mj": -1.0}, "energy_mj is -1.0, not a positive number"),
        ({"time_us": 0.0}, "time_us is 0.0, not a positive number"),
    ],
)
def test_a_table_whose_evidence_makes_no_sense_is_malformed(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    """The entry is named; the number and the rule too."""
    rig = Rig(tmp_path)
    rig.tuner.tune(*SHAPE)
    path = rig.tuner.setting.table
    assert path is not None
    table = json.loads(path.read_text())
    table["entries"][str(PROBLEM)] |= fields
    path.write_text(json.dumps(table))
    with pytest.raises(TableError) as caught:
        Table.load(path)
    assert message in str(caught.value) and str(PROBLEM) in str(caught.value)
