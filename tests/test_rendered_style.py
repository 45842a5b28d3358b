"""Rendered kernels keep to the rules of this repository."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.families.registry import find_space
from tools.bringup_parts.random_problems import random_pairs

ROOT = Path(__file__).resolve().parents[1]
KERNELS = (
    ("gemm", "sm_90a"),
    ("gemm", "sm_100a"),
    ("gemm_blockscaled", "sm_100a"),
    ("gemm_blocks", "sm_90a"),
    ("rmsnorm", "sm_90a"),
    ("rmsnorm", "sm_100a"),
    ("activation", "sm_90a"),
    ("activation_backward", "sm_100a"),
    ("gated", "sm_90a"),
    ("gated_gemm", "sm_90a"),
    ("gated_backward", "sm_100a"),
    ("softmax", "sm_90a"),
    ("layernorm", "sm_90a"),
    ("rmsnorm_quantized", "sm_90a"),
    ("cross_entropy", "sm_90a"),
    ("rope", "sm_90a"),
    ("grouped_gemm", "sm_90a"),
    ("grouped_gemm_masked", "sm_90a"),
    ("grouped_gemm_blocks", "sm_90a"),
    ("grouped_gated_gemm", "sm_90a"),
    ("grouped_gated_gemm_masked", "sm_90a"),
)


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff")
def test_ruff_finds_nothing_to_report_and_nothing_to_format(tmp_path: Path) -> None:
    for family, arch in KERNELS:
        space = find_space(family, find_arch(arch))
        for problem, config in random_pairs(space, seed=4, count=80):
            source = render(problem, config, space.arch)
            (tmp_path / f"k_{source.digest}.py").write_text(source.text)
    for command in ("check", "format --check"):
        line = [sys.executable, "-m", "ruff", *command.split(), "--config", ROOT / "pyproject.toml", tmp_path]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
