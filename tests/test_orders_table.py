"""The table of orders of tiles, of kernels whose times are made up."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from tools.benchmark.orders_table import SWEEP_OF_PRODUCTS, Orders
from tools.results_table import main

SPACE = find_space("gemm", find_arch("sm_90a"))


def points(problem: Problem, fastest: tuple[int, bool], others: float) -> list[dict[str, Any]]:
    """Return a kernel of 9 x 3 clusters in all orders: one takes 10 us."""
    knobs = {"tile_shape_mn": (128, 104), "cluster_shape_mn": (4, 1), "mma_warpgroups": 2, "swap_ab": True}
    kernel, found = SPACE.default(problem).replace(**knobs), []
    for order in product(SPACE.domains["swizzle_size"], (False, True)):
        config = kernel.replace(swizzle_size=order[0], raster_along_m=order[1])
        found.append({"config": str(config), "us": 10.0 if order == fastest else others})
    return found


def file(folder: Path) -> Path:
    """A file of three products: with the order of least loads ahead, another one ahead, and of one order."""
    one, other, third = (Problem(m, 4608, 4096) for m in (290, 300, 310))
    rows = [
        {"problem": str(one), "points": points(one, (1, False), 12.0)},
        {"problem": str(other), "points": points(other, (1, True), 11.0)},
        {"problem": str(third), "points": points(third, (1, True), 50.0)[:1]},
    ]
    facts = {"kind": SWEEP_OF_PRODUCTS, "gpu": "A GPU", "commit": "0" * 40, "rows": rows}
    facts |= {"measured_at": "2026-11-27T17:00:00+00:00", "machine": {"driver": "1.2"}}
    facts["conditions"] = {"gpu": {"sm_count": 132}}
    path = folder / "orders.json"
    path.write_text(json.dumps(facts), encoding="utf-8")
    return path


def test_orders_are_compared_kernel_by_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One kernel is at its best as chosen and in bands of one along n, the other is 10 % behind."""
    found = Orders.load(file(tmp_path))
    first, second = found.kernels()
    assert (round(first.chosen(), 6), round(first.first(), 6), round(first.worst(), 6)) == (1.0, 1.0, 1.2)
    assert (round(second.chosen(), 6), round(second.worst(), 6)) == (1.1, 1.1)
    assert main([str(file(tmp_path))]) == 0
    assert "2 kernels of one wave" in capsys.readouterr().out
