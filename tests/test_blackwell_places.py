"""Where Blackwell kernels put their sums: each element of a tile leaves by one register of one thread."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
TRACER = Path(__file__).parent / "data" / "ways_out.py"
SPACE = find_space("gemm", find_arch("sm_100a"))
#: How a kernel gets from registers to its staging buffer; the tracer does the same.
STAGING = "cute.make_tiled_copy_D(sm100.get_smem_store_op(D_LAYOUT, OUT, ACC, t2r), t2r)"
#: One kernel for each way in which tensor memory is laid out and read.
CASES = (
    ("gemm 512x512x4096 bf16 kk", "mma_tiler_mn=128x48"),
    ("gemm 512x512x4096 bf16 kk", "mma_tiler_mn=128x64 use_tma_store=false split_k=2"),
    ("gemm 512x512x4096 bf16 kk", "mma_tiler_mn=64x24 use_tma_store=false split_k=2"),
    ("gemm 512x512x4096 bf16 kk out=fp32", "mma_tiler_mn=64x48"),
    ("gemm 512x512x4096 bf16 kk beta", "mma_tiler_mn=64x40"),
    (
        "gemm 512x512x4096 bf16 kk",
        "mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=2x1 use_tma_store=false",
    ),
    (
        "gemm 512x512x4096 bf16 kk beta",
        "mma_tiler_mn=128x96 use_2cta_instrs=true cluster_shape_mn=2x1 swap_ab=true",
    ),
)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the tracer says of each case, with what the space derives of it."""
    folder, paths, derived = tmp_path_factory.mktemp("kernels"), [], []
    for number, (line, words) in enumerate(CASES):
        problem = Problem.parse(line)
        config = SPACE.default(problem).replace(**Config.parse(words))
        paths.append(folder / f"kernel_{number}.py")
        text = render(problem, config, SPACE.arch).text
        paths[-1].write_text(text)
        assert (STAGING in text) == config["use_tma_store"]
        derived.append({**config, **SPACE.derive(config, problem, SPACE.arch)})
    command = [sys.executable, str(TRACER), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return [
        {"case": case, "derived": values, **one}
        for case, values, one in zip(CASES, derived, found, strict=True)
    ]


def test_every_sum_leaves_by_one_register_of_one_thread(traced: list[dict[str, Any]]) -> None:
    """Rows and columns together are the tile, each once; neighbours in a vector are neighbours in a row."""
    for one in traced:
        rows, columns = one["tile"]
        where = [(m, n) for *_, m, n in one["places"]]
        assert len(where) == rows * columns, one["case"]
        assert set(where) == {(m, n) for m in range(rows) for n in range(columns)}, one["case"]
        vector = one["derived"]["vector"]
        for i in range(0, len(where), vector):
            m, n = where[i]
            assert n % vector == 0 and where[i : i + vector] == [(m, n + j) for j in range(vector)], one[
                "case"
            ]


def test_what_is_staged_lies_where_the_store_takes_it_from(traced: list[dict[str, Any]]) -> None:
    """A block's piece fills its buffer, each place once, in the order of its rows and columns. Where a pair
    shares 128 rows, a block has half of the columns of two runs, which lie side by side in the buffer."""
    assert sum(bool(one["staged"]) for one in traced) >= 4
    for one in traced:
        assert bool(one["staged"]) == one["derived"]["use_tma_store"], one["case"]
        if not one["staged"]:
            continue
        pair, (rows, columns), width = one["derived"]["use_2cta_instrs"], one["tile"], one["derived"]["epi_n"]
        block_rows, run = rows // (2 if pair else 1), width // 2 if pair and rows == 128 else width
        for half, m, n, row, column in one["staged"]:
            assert row == m - half * block_rows, one["case"]
            assert column == n % (columns // 2) + run * (n // (columns // 2)) if run < width else column == n
        seen = {(half, row, column) for half, _, _, row, column in one["staged"]}
        assert len(seen) == len(one["staged"]) == rows * width, one["case"]
