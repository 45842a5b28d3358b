"""Rows of a family's results file join those measured before, and say where each came from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from cutegen.errors import StoreError, UsageError
from tools.benchmark.family_rows import joined, row_slice
from tools.benchmark.family_table import FamilyResults

NAMES = ["a", "b", "c", "d"]


def facts(day: int, commit: str, **conditions: Any) -> dict[str, Any]:
    return {
        "kind": "family",
        "family": "rmsnorm",
        "measured_at": f"2026-11-0{day}T00:00:00+00:00",
        "commit": commit,
        "gpu": "NVIDIA H200",
        "machine": {"driver": f"58{day}"},
        "software": {"packages": {"torch": "2.11.0"}},
        "conditions": {"policy": {"rounds": 21}, "shapes": {"names": NAMES[:day]}, **conditions},
    }


def row(name: str, time_us: float) -> dict[str, Any]:
    entry = {"median_us": time_us, "gb_per_s": 1.0, "over_cutegen": 1.0}
    return {"name": name, "config": "threads=1", "entries": {"cutegen": entry, "torch": entry}}


def save(path: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({**about, "rows": rows}), encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "names"), [("0:2", "ab"), ("2:", "cd"), (":1", "a"), (":", "abcd"), ("3:9", "d")]
)
def test_rows_are_counted_from_0_without_the_last(text: str, names: str) -> None:
    assert "".join(NAMES[row_slice(text)]) == names


@pytest.mark.parametrize("text", ["", "3", "a:b", "-1:2", "1:2:3"])
def test_rows_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"names no rows; valid: A:B, such as 0:20 or 20:"):
        row_slice(text)


def test_a_row_stays_with_its_origin_until_it_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    save(path, facts(1, "first"), joined(path, facts(1, "first"), NAMES, [row("c", 7.0), row("a", 5.0)]))
    again = facts(2, "second")
    rows = joined(path, again, NAMES, [row("b", 6.0), row("c", 8.0)])
    save(path, again, rows)
    assert [(r["name"], r["entries"]["cutegen"]["median_us"], r["commit"]) for r in rows] == [
        ("a", 5.0, "first"),
        ("b", 6.0, "second"),
        ("c", 8.0, "second"),
    ]
    assert {(r["measured_at"][:10], r["machine"]["driver"], r["gpu"]) for r in rows} == {
        ("2026-11-01", "581", "NVIDIA H200"),
        ("2026-11-02", "582", "NVIDIA H200"),
    }
    text = FamilyResults.load(path).render()
    assert "driver 581, 582; torch 2.11.0; commit first, second; 2026-11-01, 2026-11-02." in text


def test_rows_of_an_older_file_come_from_where_it_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    save(path, facts(1, "first"), [row("a", 5.0)])
    assert "driver 581; torch 2.11.0; commit first; 2026-11-01." in FamilyResults.load(path).render()
    kept, new = joined(path, facts(2, "second"), NAMES, [row("d", 6.0)])
    assert (kept["commit"], new["commit"]) == ("first", "second")


def test_rows_of_other_conditions_are_not_joined(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    save(path, facts(1, "first"), [row("a", 5.0)])
    with pytest.raises(
        UsageError, match=r"were measured with other policy; valid: the same, or another --out"
    ):
        joined(path, facts(1, "first", policy={"rounds": 5}), NAMES, [])


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="is no results file of a family"):
        joined(path, facts(1, "first"), NAMES, [])
    with pytest.raises(StoreError, match="cannot be read"):
        joined(tmp_path, facts(1, "first"), NAMES, [])


def test_what_is_in_place_is_compared_with_what_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    one = row("a", 8.0)
    over = {
        "cutegen": 1.0,
        "cutegen in place": 0.5,
        "torch": 2.0,
        "quack": 1.5,
        "quack in place": 0.75,
        "copy": 1.25,
        "copy kernel": 1.0,
    }
    one["entries"] = {
        name: {"median_us": 8 * r, "gb_per_s": 1.0, "over_cutegen": r} for name, r in over.items()
    }
    save(path, facts(1, "first"), [one])
    text = FamilyResults.load(path).render()
    assert "- torch / cutegen: geometric mean **2.000**" in text
    assert "- copy / cutegen in place: geometric mean **2.000**" in text
    assert "- quack in place / cutegen in place: geometric mean **1.500**" in text
    assert "- the fastest of these / cutegen: geometric mean **1.500**" in text
    assert "| a | 8.00 | 1 | 1.000 | 2.000 | 1.500 | 2.000 | 1.500 | `threads=1` |" in text


def test_ratios_in_bursts_have_columns_and_do_not_count_as_settled_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    slower = {"median_us": 6.0, "gb_per_s": 1.0, "over_cutegen": 1.25}
    found = row("a", 5.0)
    found["entries"]["torch"] = {**slower, "burst_us": 4.5, "burst_over_cutegen": 0.9}
    save(path, facts(1, "first", copies="none"), [found, row("b", 5.0)])
    text = FamilyResults.load(path).render()
    assert "- torch / cutegen in bursts: geometric mean **0.900**, at least 1 on 0 of 1" in text
    assert "the fastest of these / cutegen: geometric mean **1.118**, smallest 1.000" in text
    assert "| shape | time us | GB/s | torch / cutegen | torch / cutegen in bursts | config |" in text
    assert "| a | 5.00 | 1 | 1.250 | 0.900 | `threads=1` |" in text
    assert "| b | 5.00 | 1 | 1.000 |  | `threads=1` |" in text
    assert "No copies are in the rounds" in text
