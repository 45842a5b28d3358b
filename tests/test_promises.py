"""The tests that docs/pytorch.md names for each thing that holds are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DOCUMENT = (HERE.parent / "docs" / "pytorch.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:gpu/)?test_\w+\.py)::(test_\w+)`", DOCUMENT)


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_a_named_test_is_there(path: str, name: str) -> None:
    assert name in functions(HERE / path)


def test_there_is_one_for_each_promise() -> None:
    rows = [line for line in DOCUMENT.splitlines() if "::test_" in line]
    assert len(rows) == 20 and len(set(NAMED)) == len(NAMED) > 40
