"""Every example that needs a GPU runs to its end on one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run_example import ROOT, needs_backend, run_example

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
#: Not here: those that need no GPU, the sweep, which takes minutes, and the model that others run.
ELSEWHERE = {"explain_config", "shapes_of_servers", "predict_without_gpu", "offline_sweep"}
ELSEWHERE |= {"llama", "llama_block", "vllm_plugin"}
NAMES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - ELSEWHERE)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all examples: pinning takes the table that tuning left."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_to_its_end(name: str, cache: Path, tmp_path: Path) -> None:
    needs_backend(name)
    assert run_example(name, tmp_path, cache, waits=False)
