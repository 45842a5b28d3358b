"""Kernels in other orders of rows, and the table of what they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.families.registry import find_space, parse_problem
from tools.bench_row_order import PROBLEMS, variants
from tools.benchmark.row_order_table import AS_CHOSEN, ROW_ORDERS, VARIANTS, RowOrders
from tools.results_table import main

ARCH = find_arch("sm_90a")
FIRST, LAST, FIRST_LEAVING, LAST_LEAVING = VARIANTS


@pytest.mark.parametrize("line", PROBLEMS)
def test_each_order_is_a_kernel_of_its_own(line: str) -> None:
    """Only the constants differ; rows that wait in shared memory do not leave L2 first."""
    problem = parse_problem(line)
    config = find_space(problem.family, ARCH).default(problem)
    found = variants(render(problem, config, ARCH))
    in_registers = config.get("row_in", "registers") == "registers"
    assert list(found) == [AS_CHOSEN, *(VARIANTS if in_registers else (FIRST, LAST))]
    assert len({source.text for source in found.values()}) == len(found)
    allowed = {"ROWS_HELD", "PASSING_FROM, PASSING_TO"}
    for name, source in found.items():
        pairs = zip(source.text.splitlines(), found[AS_CHOSEN].text.splitlines(), strict=True)
        changed = {line.split(" = ")[0] for line, before in pairs if line != before}
        assert changed <= allowed and bool(changed) == (name != AS_CHOSEN)
    held, passing = ("ROWS_HELD = 0 ", "PASSING_FROM, PASSING_TO = 0, 2147483647 ")
    assert [held in source.text for source in found.values()][1:3] == [False, True]
    assert all((passing in found[name].text) == VARIANTS[name][1] for name in found if name != AS_CHOSEN)


def test_a_file_is_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios are rounded down; what a kernel cannot do has no time."""
    rows = [
        {
            "problem": "rmsnorm 8192x4096 bf16",
            "config": "",
            "bytes": 134_225_920,
            "times": {AS_CHOSEN: 40.0, FIRST: 46.0, LAST: 42.0, FIRST_LEAVING: 41.0, LAST_LEAVING: 39.0},
        },
        {
            "problem": "layernorm 4096x32768 bf16",
            "config": "",
            "bytes": 537_001_984,
            "times": {AS_CHOSEN: 192.0, FIRST: 180.0, LAST: 192.0},
        },
    ]
    facts = {"kind": ROW_ORDERS, "gpu": "A GPU", "commit": "0" * 40, "rows": rows}
    facts |= {"measured_at": "2026-11-28T03:00:00+00:00", "machine": {"driver": "1.2"}}
    path = tmp_path / "row_order.json"
    path.write_text(json.dumps(facts), encoding="utf-8")
    usual, best = RowOrders.load(path).summary()
    assert "geometric mean **1.038**, smallest 0.937, largest 1.149" in usual
    assert "geometric mean **0.956**, smallest 0.937" in best
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| `rmsnorm 8192x4096 bf16` | 134 | 46.00 | 42.00 | 41.00 | 39.00 | 40.00 |" in printed
    assert "| `layernorm 4096x32768 bf16` | 537 | 180.00 | 192.00 |  |  | 192.00 |" in printed
