"""The replay of a recorded sweep: curves, groups and sets follow from the points; a worse model is seen."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from cutegen.families.gemm.perf_model.fitted import Fit, load_fit
from cutegen.families.gemm.perf_model.roofline import Rates
from tools import replay
from tools.benchmark.line_plot import line_plot
from tools.benchmark.range_replay import COUNTS, range_regret
from tools.fit_gemm import SWEEP

EVERY = 25


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes of one shape in 25."""
    folder = tmp_path_factory.mktemp("replay")
    words = ["--every", str(EVERY), "--json", str(folder / "out.json"), "--svg", str(folder / "plots")]
    assert replay.main(words) == 0
    for name in ("trials", "seconds"):
        plot = ElementTree.parse(folder / "plots" / f"replay_{name}.svg").getroot()
        lines = [line for line in plot.iter() if line.tag.endswith("polyline")]
        assert [len(line.attrib["points"].split()) for line in lines] == [len(replay.TRIALS)] * 3
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_searches_end_at_the_best_and_begin_near_it(results: dict[str, Any]) -> None:
    """More trials are never worse, and the model is far ahead of chance."""
    curves = results["search"]
    for curve in curves.values():
        assert curve == sorted(curve, reverse=True) and curve[-1] >= 0
    assert curves["model"][0] < 0.03 and curves["model"][5] < 0.005 and curves["search"][9] < 0.002
    assert curves["chance"][0] > 5 * curves["model"][0]
    assert results["seconds"] == sorted(results["seconds"])
    assert curves["model"][0] == pytest.approx(results["model_among_all"]["first"], abs=1e-4)


def test_groups_hold_every_shape_once(results: dict[str, Any]) -> None:
    """By (n, k) and by rows; the groups' means give the mean of all."""
    for name in ("model_among_defaults", "model_among_all"):
        judged = results[name]
        for kind in ("by_matrix", "by_rows"):
            groups = judged[kind].values()
            assert sum(group["shapes"] for group in groups) == judged["shapes"]
            logs = sum(group["shapes"] * np.log1p(group["first"]) for group in groups)
            assert logs / judged["shapes"] == pytest.approx(np.log1p(judged["first"]), abs=2e-4)
            assert max(group["first_worst"] for group in groups) == judged["first_worst"]


def test_a_larger_set_is_no_worse(results: dict[str, Any]) -> None:
    """And sets chosen on these very shapes do better than the default set, of which 106 were timed there."""
    greedy, own = results["sets"]["greedy"], results["sets"]["defaults"]
    values = [greedy[str(count)] for count in (4, 8, 16, 32, 70)]
    assert values == sorted(values, reverse=True)
    assert greedy["70"] <= own["regret"] < greedy["8"] and own["kernels"] == 106


def test_a_worse_model_is_seen() -> None:
    """One that takes the memory for a quarter as fast chooses worse than the shipped one."""
    found, points, configs = replay.read(SWEEP, EVERY)
    everything, firsts = np.ones(len(points.us), bool), []
    for fit in (load_fit(), Fit("sm_90a", {}, load_fit().trees, Rates(memory=0.25))):
        predicted = replay.by_fit(fit, points, configs, found["sm_count"])
        firsts.append(replay.model_regret(replay.Sweep(points, configs, predicted), everything)["first"])
    assert firsts[1] > 1.3 * firsts[0]


def test_a_model_that_has_not_seen_the_matrices_chooses_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """But much better than the roofline alone."""
    monkeypatch.setitem(replay.SETTINGS, "iterations", 40)
    _, points, configs = replay.read(SWEEP, 8)
    everything = np.ones(len(points.us), bool)
    first = [
        replay.model_regret(replay.Sweep(points, configs, predicted), everything)["first"]
        for predicted in (replay.left_out(points), points.roofline_us)
    ]
    assert 0.01 < first[0] < 0.06 and first[0] < 0.7 * first[1]


def test_a_range_measures_what_is_fast_and_answers_what_lies_between() -> None:
    """More contenders leave out less; a model that orders them by chance leaves out much more.

    Sizes are a doubling apart here, so that answers between them are mostly the model's.
    """
    found, points, configs = replay.read(SWEEP, 1)
    numbers, sizes = np.unique(
        points.weights[np.unique(points.shape, return_index=True)[1]], return_counts=True
    )
    long = np.isin(points.weights, numbers[sizes >= 9])
    points, configs = (
        points.only(long),
        [config for config, is_long in zip(configs, long, strict=True) if is_long],
    )
    predicted = replay.by_fit(load_fit(), points, configs, found["sm_count"])
    judged = range_regret(replay.matrices(replay.Sweep(points, configs, predicted)))
    few, more, most = (judged[str(count)] for count in COUNTS)
    assert few["measured"] >= more["measured"] >= most["measured"] and more["measured"] < 0.005
    assert most["measured_worst"] < 0.02 and most["between"] < 0.02
    chance = np.random.default_rng(0).permutation(predicted)
    blind = range_regret(replay.matrices(replay.Sweep(points, configs, chance)))
    assert blind["8"]["measured"] > 3 * more["measured"] and blind["14"]["between"] > 3 * most["between"]


def test_bad_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two models; a calibration that is none or has no fit; a sweep that is none; a folder that cannot be."""
    with pytest.raises(SystemExit) as ended:
        replay.main(["--left-out", "--calibration", "x.json"])
    assert ended.value.code == 2
    assert replay.main(["--calibration", str(tmp_path / "no.json")]) == 3
    assert "no.json" in capsys.readouterr().err
    other = tmp_path / "b200.json"
    other.write_text('{"arch": "sm_100a", "factors": {"clock": 1.0}}')
    assert replay.main(["--calibration", str(other)]) == 3
    assert "b200.json is for 'sm_100a'; times are fitted for sm_90a alone" in capsys.readouterr().err
    for content in (b"{}", lzma.compress(b"{}"), lzma.compress(b'{"kernels": 3}'), lzma.compress(b"{")[:-20]):
        other.write_bytes(content)
        assert replay.main(["--sweep", str(other)]) == 3
        assert "b200.json holds no recorded sweep" in capsys.readouterr().err
    assert replay.main(["--svg", str(other / "plots")]) == 3
    assert "plots" in capsys.readouterr().err


def test_a_plot_names_its_lines_and_places_its_points() -> None:
    """The smallest x is at the left, 0 at the bottom."""
    text = line_plot({"a<b": [(1, 0.0), (10, 5.0)]}, x_label="x", y_label="y", title="t")
    root = ElementTree.fromstring(text)
    [line] = [each for each in root.iter() if each.tag.endswith("polyline")]
    assert line.attrib["points"] == "60.0,340.0 580.0,60.0"
    assert "a<b" in {each.text for each in root.iter()}
