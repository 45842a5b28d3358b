"""Ratios in the table of experimental operators are those of the results, rounded down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cutegen.measure.statistics import geometric_mean
from tools.benchmark.family_table import FamilyResults
from tools.benchmark.markdown import down

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8").partition("### Experimental operators")[2]
#: Results files by operator.
FILES = {
    "layer_norm": "layernorm",
}
LARGE_BYTES = 256_000_000


def cells(operator: str) -> list[str]:
    """The columns behind the name: shapes, beside a copy, beside the fastest other, geometric mean."""
    [line] = [line for line in TABLE.splitlines() if line.startswith(f"| `{operator}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def results(operator: str) -> tuple[FamilyResults, list[Any]]:
    found = FamilyResults.load(ROOT / "docs" / "results" / f"{FILES[operator]}.json")
    return found, list(found._rows())


def ratios(cell: str) -> list[str]:
    return re.findall(r"\b\d+\.\d+\b", cell)


def as_written(values: list[float], words: list[str]) -> list[str]:
    """Values with as many digits as each word has."""
    return [down(value, len(word.partition(".")[2])) for value, word in zip(values, words, strict=True)]


def test_the_table_has_all_experimental_operators() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", TABLE.partition("\n## ")[0], re.MULTILINE)
    assert rows == list(FILES)


@pytest.mark.parametrize("operator", FILES)
def test_shapes_are_counted(operator: str) -> None:
    found, rows = results(operator)
    conditions: Any = found.facts["conditions"]
    assert cells(operator)[0] == f"{len(rows)} of {len(conditions['shapes']['names'])}"


@pytest.mark.parametrize("operator", FILES)
def test_what_is_slowest_beside_a_copy_is_rounded_down(operator: str) -> None:
    """As many as are named are the slowest, and the shapes that are named are theirs."""
    cell = cells(operator)[1]
    _, rows = results(operator)
    beside = sorted(
        (min(row["entries"][name]["over_cutegen"] for name in ("copy", "copy kernel")), row["problem"])
        for row in rows
        if row["bytes"] >= LARGE_BYTES and {"copy", "copy kernel"} <= row["entries"].keys()
    )
    words = sorted(ratios(cell))
    assert words == as_written([ratio for ratio, _ in beside[: len(words)]], words)
    for word, shape in re.findall(r"(\d\.\d+)[^,(]*\((\d+x\d+)", cell):
        assert any(f" {shape} " in problem and down(ratio, 3) == word for ratio, problem in beside)


@pytest.mark.parametrize("operator", FILES)
def test_what_is_slowest_beside_others_is_rounded_down(operator: str) -> None:
    cell = cells(operator)[2]
    found, rows = results(operator)
    slowest, problem = min((found._best(row), row["problem"]) for row in rows)
    words = ratios(cell)
    assert words == as_written([slowest], words)
    for shape in re.findall(r"\((\d+x\d+)", cell):
        assert f" {shape} " in problem


@pytest.mark.parametrize("operator", FILES)
def test_means_are_rounded_down(operator: str) -> None:
    found, rows = results(operator)
    words = ratios(cells(operator)[3])
    assert words == as_written([geometric_mean([found._best(row) for row in rows])], words)
