"""Where Blackwell kernels put their sums: each element of a tile leaves by one register of one thread."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.catalog import find_space
from cutegen.problem import Problem
from cutegen.render import render
from cutegen.space import Config

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
TRACER = Path(__file__).parent / "data" / "ways_out.py"
SPACE = find_space("gemm", find_arch("sm_100a"))
#: One kernel for each way in which tensor memory is laid out and read.
CASES = (
    ("gemm 512x512x4096 bf16 tn", "mma_tiler_mn=128x48"),
    ("gemm 512x512x4096 bf16 tn", "mma_tiler_mn=128x64 use_tma_store=false split_k=2"),
    ("gemm 512x512x4096 bf16 tn", "mma_tiler_mn=64x24 use_tma_store=false split_k=2"),
    ("gemm 512x512x4096 bf16 tn out=fp32", "mma_tiler_mn=64x48"),
    ("gemm 512x512x4096 bf16 tn beta", "mma_tiler_mn=64x40"),
    (
        "gemm 512x512x4096 bf16 tn",
        "mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=2x1 use_tma_store=false",
    ),
    (
        "gemm 512x512x4096 bf16 tn beta",
        "mma_tiler_mn=128x96 use_2cta_instrs=true cluster_shape_mn=2x1 swap_ab=true",
    ),
)


def test_every_sum_leaves_by_one_register_of_one_thread(tmp_path: Path) -> None:
    """Rows and columns together are the tile, each once; neighbours in a vector are neighbours in a row."""
    paths, derived = [], []
    for number, (line, words) in enumerate(CASES):
        problem = Problem.parse(line)
        config = SPACE.default(problem).replace(**Config.parse(words))
        paths.append(tmp_path / f"kernel_{number}.py")
        paths[-1].write_text(render(problem, config, SPACE.arch).text)
        derived.append(SPACE.derive(config, problem, SPACE.arch))
    command = [sys.executable, str(TRACER), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, values, found in zip(CASES, derived, json.loads(done.stdout), strict=True):
        rows, columns = found["tile"]
        where = [(m, n) for *_, m, n in found["places"]]
        assert len(where) == rows * columns, case
        assert set(where) == {(m, n) for m in range(rows) for n in range(columns)}, case
        vector = values["vector"]
        assert isinstance(vector, int)
        for i in range(0, len(where), vector):
            m, n = where[i]
            assert n % vector == 0 and where[i : i + vector] == [(m, n + j) for j in range(vector)], case
