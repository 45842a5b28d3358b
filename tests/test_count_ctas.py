"""Counting how many CTAs run at a time, of a GPU that is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmark.resident_table import RESIDENT, Resident
from tools.count_ctas import most_at_a_time
from tools.results_table import main


@pytest.mark.parametrize("room", [1, 2, 57, 124, 528, 999, 1000])
def test_what_runs_at_a_time_is_found(room: int) -> None:
    """Each wave takes 20 us, and a launch 4 us more; what is asked for most is found, too."""
    assert most_at_a_time(lambda clusters: 4 + 20 * -(-clusters // room), 1000) == room


def file(folder: Path, by_driver: int) -> Path:
    """A results file of three cases."""
    rows = [
        {"cluster": 1, "threads": 64, "clusters": 4224, "by_driver": 4224},
        {"cluster": 1, "threads": 1024, "clusters": 264, "by_driver": 264},
        {"cluster": 4, "threads": 64, "clusters": 248, "by_driver": by_driver},
        {"cluster": 4, "threads": 1024, "clusters": 60, "by_driver": 60},
    ]
    facts = {"kind": RESIDENT, "sm_count": 132, "gpu": "A GPU", "commit": "0" * 40, "rows": rows}
    facts |= {"measured_at": "2026-11-27T17:00:00+00:00", "machine": {"driver": "1.2"}}
    path = folder / "resident_ctas.json"
    path.write_text(json.dumps(facts), encoding="utf-8")
    return path


def test_a_file_is_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most of each kind, and where the driver counts otherwise."""
    found = Resident.load(file(tmp_path, 250))
    assert "**4224** without clusters, 32 for each of 132" in found.summary()[0]
    assert "**992** in clusters" in found.summary()[0]
    assert found.summary()[1].endswith("in 3 of 4 cases")
    assert "| 4 | 248 (driver: 250) | 60 |" in found.render()
    assert "driver:" not in Resident.load(file(tmp_path, 248)).render()
    assert main([str(file(tmp_path, 248))]) == 0
    assert "| 1 | 4224 | 264 |" in capsys.readouterr().out
