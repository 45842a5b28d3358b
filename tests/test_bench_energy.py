"""The energy benchmark: one knob at a time around the best config, and the table that comes of it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_tuning import FakeCompiler
from patient_bench import PatientBench

from cutegen.arch import find_arch
from cutegen.build import Result
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.space import Config
from cutegen.strategy import Default
from tools import bench_energy, results_table
from tools.benchmark import energy_table, fixed
from tools.benchmark.results import ENERGY, Results
from tools.benchmark.variations import coarse_values, variations

SPACE = find_space("gemm", find_arch("sm_90a"))
PROBLEM = Problem(8192, 8192, 8192)
BASE = SPACE.default(PROBLEM)
Run = Callable[..., int]


# --- variations ---


def test_one_knob_changes_at_a_time() -> None:
    """Every variation is legal and differs in the knob that names it; others follow only where rules ask."""
    wanted = {knob: coarse_values(SPACE, knob) for knob in bench_energy.KNOBS}
    found = variations(SPACE, PROBLEM, BASE, wanted)
    assert len(found) > 20 and BASE not in found.values() and len({*found.values()}) == len(found)
    for name, config in found.items():
        assert SPACE.explain(PROBLEM, config) == ()
        changed = [knob for knob in config if config[knob] != BASE[knob]]
        assert name.split("=")[0] in changed and len(name.split()) == len(changed)
        if len(changed) > 1:
            knob = name.split("=")[0]
            alone = BASE.replace(**{knob: config[knob]})
            assert SPACE.explain(PROBLEM, alone), f"{name}: {knob} alone would do"
    assert {name for name in found if "swizzle" in name} == {f"swizzle_size={n}" for n in (1, 2, 4)}


def test_the_smallest_change_mends_what_a_value_breaks() -> None:
    """Narrow tiles change the warpgroups alone; ping-pong, which no wide tile allows, also the tile."""
    [(name, config)] = variations(SPACE, PROBLEM, BASE, {"tile_shape_mn": [(64, 128)]}).items()
    assert name == "tile_shape_mn=64x128 mma_warpgroups=1" and config["pingpong"] is False
    [(name, config)] = variations(SPACE, PROBLEM, BASE, {"pingpong": [True]}).items()
    assert name == "pingpong=true tile_shape_mn=128x192 mma_warpgroups=1"
    assert variations(SPACE, PROBLEM, BASE, {"swap_ab": [True]}) == {}, "no tile mends that"


def test_long_lists_of_tiles_are_thinned_out_and_short_ones_are_not() -> None:
    """Multiples of 64; clusters are all there."""
    tiles = coarse_values(SPACE, "tile_shape_mn")
    assert 8 <= len(tiles) <= 20 and all(m % 64 == n % 64 == 0 for m, n in tiles)  # type: ignore[misc]
    assert coarse_values(SPACE, "cluster_shape_mn") == SPACE.domains["cluster_shape_mn"]


# --- the command ---


def behaviour(config: Config) -> str:
    """The base takes 20 us at 600 W; one tile less power, one more, one does not build, one is wrong."""
    tile = config["tile_shape_mn"]
    if tile == (128, 128):
        return "ok:21@500"
    if tile == (64, 128):
        return "ok:30@700"
    return {(128, 192): "error", (256, 128): "wrong"}.get(tile, "ok:20@600")  # type: ignore[call-overload, no-any-return]


class FakeBuilder:
    """Compiles nothing; a symbol says what a kernel does."""

    compiled: list[Source] = []

    def __init__(self, store: Store, *, workers: int | None) -> None:
        self._compiler = FakeCompiler(store, behaviour, batch=1)

    def __enter__(self) -> FakeBuilder:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def build(self, sources: Iterable[Source]) -> Iterator[tuple[Source, Result]]:
        FakeBuilder.compiled = list(sources)
        self._compiler.submit(FakeBuilder.compiled)
        for _ in FakeBuilder.compiled:
            yield from self._compiler.poll()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on a fake GPU, with files of its own; returns the exit code."""

    def make_bench(args: argparse.Namespace) -> PatientBench:
        return PatientBench()

    monkeypatch.setattr(bench_energy, "make_bench", make_bench)
    monkeypatch.setattr(bench_energy, "present_device", lambda index: fake_engine.DEVICE)
    monkeypatch.setattr(fixed, "Builder", FakeBuilder)
    monkeypatch.setattr(
        "cutegen.runtime.answer_lookup.choose_default",
        lambda space, problem, sms: Default(space.default(problem), None),
    )

    def call(*arguments: str) -> int:
        files = ["--cache-dir", str(tmp_path / "cache"), "--out", str(tmp_path / "energy.json")]
        return bench_energy.main([*files, "--energy-seconds", "0.1", "--rounds", "5", *arguments])

    return call


TILES = ("--vary", "tile_shape_mn=128x128,64x128")


def test_every_variation_has_its_energy_beside_the_base_and_torch(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 mJ for the base, 10.5 and 21 for the variations, 5 for torch.mm; facts of the session are there."""
    assert run("--commit", "abc", *TILES, "--vary", "swizzle_size=4") == 0
    results: Any = Results.load(tmp_path / "energy.json")
    assert results.kind == ENERGY and results.sessions[0]["commit"] == "abc"
    assert (
        results.conditions["policy"]["objective"] == "energy" and results.conditions["software"]["packages"]
    )
    [row] = results.shapes
    assert row.problem == PROBLEM and list(row.entries) == [
        "cutegen",
        "tile_shape_mn=128x128",
        "tile_shape_mn=64x128 mma_warpgroups=1",
        "swizzle_size=4",
    ]
    found = [entry.timing.energy_mj for entry in row.entries.values()]
    assert found == pytest.approx([12.0, 10.5, 21.0, 12.0], rel=0.01)
    assert row.reference.energy_mj == pytest.approx(5.0, rel=0.01)
    assert row.entries["tile_shape_mn=128x128"].choice["tile_shape_mn"] == [128, 128]
    out = capsys.readouterr().out
    assert "beyond the spread lower: `tile_shape_mn=128x128` 0.87" in out
    assert "swizzle_size=4" not in out, "what is level is named neither lower nor higher"
    assert "beyond the spread higher: `tile_shape_mn=64x128 mma_warpgroups=1` 1.7" in out


def test_what_fails_is_named_and_stops_nobody(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that does not build and one that is wrong have no energy; the exit code says so."""
    assert run("--vary", "tile_shape_mn=128x128,128x192,256x128") == 1
    out = capsys.readouterr().out
    assert "not measured: `tile_shape_mn=128x192` build_failed, `tile_shape_mn=256x128` wrong_result" in out
    text = results_table.render(Results.load(tmp_path / "energy.json"))
    assert "| tile_shape_mn=128x192 | **build_failed** |  |" in text


def test_the_base_is_what_the_table_names(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what --base makes of it."""
    named = BASE.replace(swizzle_size=2)
    table = Table(Fingerprint.of(fake_engine.DEVICE), [Entry(PROBLEM, named)])
    table.save(tmp_path / "t.json")
    files = ("--table", str(tmp_path / "t.json"))
    assert run(*files, "--base", "raster_along_m=false", *TILES) == 0
    base: Any = Results.load(tmp_path / "energy.json").shapes[0].entries["cutegen"].choice
    assert (base["swizzle_size"], base["raster_along_m"]) == (2, False)
    assert run("--table", str(tmp_path / "none.json")) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_dry_run_needs_no_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It lists what would be measured, and for how long."""
    assert bench_energy.main(["--dry-run", "--cache-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "8192x8192x8192: gemm 8192x8192x8192 bf16 kk: base " in out and "  cluster_shape_mn=1x2" in out
    seconds = re.search(r"(\d+) entries, \d+ kernels, (\d+) s or more", out)
    assert seconds is not None and int(seconds[1]) < int(seconds[2]) < 90
    with pytest.raises(SystemExit, match="2"):
        bench_energy.main([])


# --- the table ---


def test_the_table_shows_everyone_and_rounds_against_us(run: Run, tmp_path: Path) -> None:
    """The base first, then torch.mm, then a row per variation; its place in a document is filled."""
    assert run(*TILES) == 0
    file, page = tmp_path / "energy.json", tmp_path / "PAGE.md"
    page.write_text("<!-- results: energy -->\n<!-- end results: energy -->\n")
    assert results_table.main([str(file), "--into", str(page)]) == 0
    assert results_table.main([str(file), "--into", str(page), "--check"]) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        "| base: 128x256 2x1 swizzle_size=8 raster_along_m",
        "| torch.mm",
        "| tile_shape_mn=128x128",
        "| tile_shape_mn=64x128 mma_warpgroups=1",
    ]
    assert len({row.count("|") for row in rows}) == 1
    results = Results.load(file)
    row = results.shapes[0]
    base, ratio = row.entries["cutegen"].timing, energy_table.changes_of_energy(row)["tile_shape_mn=128x128"]
    assert base is not None and base.energy_mj is not None
    assert ratio.low < 10.5 / 12 < ratio.high
    cells = [cell.strip() for cell in rows[2].split("|")]
    picojoules = float(cells[5].split()[0])
    exact = base.energy_mj * 1e9 / PROBLEM.flops
    assert exact <= picojoules < exact + 0.0011
    theirs = float(rows[3].split("|")[5].split()[0])
    exact = (row.reference.energy_mj or 0.0) * 1e9 / PROBLEM.flops
    assert exact - 0.0011 < theirs <= exact
    assert "entry ran alone for at least 0.1 s" in page.read_text() and "Fake GPU" in page.read_text()
