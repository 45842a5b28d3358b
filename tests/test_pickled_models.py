"""Swapped models that go to another process by pickle, where nothing of cutegen was called before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

MODEL = """
import torch

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

def parts():
    torch.manual_seed(0)
    made = {"layer": torch.nn.Linear(32, 16), "norm": torch.nn.RMSNorm(32), "mlp": Mlp()}
    return {name: part.bfloat16() for name, part in made.items()}

x = (torch.arange(96.0).view(3, 32) / 96).bfloat16()
"""
WRITE = """
import sys, torch, cutegen, model
name = sys.argv[1]
swapped = torch.nn.Sequential(model.parts()[name])
found = cutegen.optimize(swapped)
assert found.layers or found.norms, found
torch.save(swapped, "swapped.pt")
"""
READ = """
import sys, torch, model
name, operator = sys.argv[1:]
swapped = torch.load("swapped.pt", weights_only=False)
assert torch.equal(swapped(model.x), model.parts()[name](model.x))
swapped(model.x).sum().backward()
assert hasattr(torch.ops.cutegen, operator)
import cutegen
assert all("input is on cpu" in reason for reason in cutegen.counters()["fallbacks"]), cutegen.counters()
assert cutegen.restore(swapped) and torch.equal(swapped(model.x), model.parts()[name](model.x))
"""


@pytest.mark.parametrize(
    ("name", "operator"), [("layer", "gemm"), ("norm", "rmsnorm"), ("mlp", "gated_gemm")]
)
def test_a_process_that_called_nothing_yet_runs_a_pickled_model(
    tmp_path: Path, name: str, operator: str
) -> None:
    """As one that torch.multiprocessing starts with a model for an argument."""
    (tmp_path / "model.py").write_text(MODEL)
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
    for code in (WRITE, READ):
        command = [sys.executable, "-c", code, name, operator]
        if code is WRITE:
            command.pop()
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
