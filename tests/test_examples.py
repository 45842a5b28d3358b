"""Examples hold one short idea each, are named in docs/pytorch.md, and run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from run_example import ROOT, run_example

import cutegen

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Those that need the compiler, and those that need neither it nor a GPU; tests/gpu runs the others.
COMPILING = ("predict_without_gpu",)
PLAIN = ("explain_config",)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_its_idea_and_the_documents_name_it(path: Path) -> None:
    summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert summary.endswith(".")
    assert "\n" not in summary
    assert f"examples/{path.name}" in (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_only_public_names(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cutegen"
    }
    assert used - set(cutegen.__all__) == set()


@pytest.mark.parametrize("name", PLAIN)
def test_an_example_without_compiler_runs(name: str, tmp_path: Path) -> None:
    assert run_example(name, tmp_path, tmp_path / "cache")


@pytest.mark.dsl
@pytest.mark.parametrize("name", COMPILING)
def test_an_example_without_gpu_runs(name: str, tmp_path: Path) -> None:
    assert "predicted" in run_example(name, tmp_path, tmp_path / "cache")
