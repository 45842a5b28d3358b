"""Examples hold one short idea each, are named in docs/pytorch.md, and run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_torch import ForkedTorch
from run_example import ROOT, needs_backend, run_example, run_forked

import cutegen

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Those that need the compiler, and those that need neither it nor a GPU; tests/gpu runs the others.
COMPILING = ("predict_without_gpu",)
PLAIN = ("explain_config", "shapes_of_servers")
#: What a program calls, recorded on fake tensors.
FAKE = ("record_without_gpu",)
#: Those that need PyTorch, and leave to it what a kernel would do.
TORCH = ("llama_compiled", "llama_eager", "llama_training")


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedTorch]:
    """Examples import torch first of all; here it was."""
    pytest.importorskip("torch")
    with ForkedTorch(tmp_path_factory.mktemp("printed")) as forked:
        yield forked


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


@pytest.mark.parametrize("name", FAKE)
def test_an_example_on_fake_tensors_runs(name: str, tmp_path: Path, forked: ForkedTorch) -> None:
    said = run_forked(forked, name, tmp_path, tmp_path / "cache")
    assert "gemm 64x28672x8192 bf16 kk" in said and "gemm 64x8192x28672 bf16 kk" in said
    assert (tmp_path / "model.jsonl").is_file()


@pytest.mark.parametrize("name", TORCH)
def test_an_example_of_a_model_runs(name: str, tmp_path: Path, forked: ForkedTorch) -> None:
    """Its layers are swapped or compiled; on a CPU, PyTorch computes them, which is counted."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs it")
    needs_backend(name)
    said = run_forked(forked, name, tmp_path, tmp_path / "cache")
    assert ("the input is on cpu" in said) == (name != "llama_compiled")


@pytest.mark.dsl
@pytest.mark.parametrize("name", COMPILING)
def test_an_example_without_gpu_runs(name: str, tmp_path: Path) -> None:
    assert "predicted" in run_example(name, tmp_path, tmp_path / "cache")
