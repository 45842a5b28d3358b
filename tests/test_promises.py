"""The tests that documents name for each thing that holds are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
#: How many rows each has.
DOCUMENTS = {"guarantees.md": 41}
TEXTS = {name: (HERE.parent / "docs" / name).read_text(encoding="utf-8") for name in DOCUMENTS}
NAMED = {name: re.findall(r"`((?:gpu/)?test_\w+\.py)::(test_\w+)`", text) for name, text in TEXTS.items()}


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), [*chain(*NAMED.values())], ids=lambda part: part)
def test_a_named_test_is_there(path: str, name: str) -> None:
    assert name in functions(HERE / path)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_there_are_some_for_each_promise(document: str) -> None:
    rows = [line for line in TEXTS[document].splitlines() if line.startswith("|") and "::test_" in line]
    named = NAMED[document]
    assert len(rows) == DOCUMENTS[document] and len(set(named)) == len(named) >= 2 * len(rows)
