"""The text of grouped GEMMs, run lane by lane: every tile of every group is visited once."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import bind

HOPPER = find_arch("sm_90a")
#: Rows that there are.
ROWS = 1200


@pytest.mark.parametrize("line", ["grouped_gemm 300x72x64x5 bf16", "grouped_gemm_masked 60x72x64x5 fp16"])
def test_a_launch_passes_what_the_kernel_takes(line: str) -> None:
    problem: Any = parse_problem(line)
    space = find_space(problem.family, HOPPER)
    config = space.default(problem)
    arguments = problem.declared.arguments(problem)
    values = {argument.name: argument.name for argument in arguments}
    found = bind(arguments, values, space.launch(config, problem, 132))
    [launch] = [
        node
        for node in ast.parse(render(problem, config, HOPPER).text).body
        if isinstance(node, ast.FunctionDef) and node.name == "launch"
    ]
    names = [argument.arg for argument in launch.args.args]
    extents = "counts" if "masked" in line else "offs"
    assert names == ["a", "b", extents, "d", "clusters", "swizzle", "along_m", "stream"]
    assert found == (
        "a",
        "b",
        extents,
        "out",
        132,
        config["swizzle_size"],
        1 if config["raster_along_m"] else 0,
    )


class _Warp:
    """Runs functions of a kernel's text on 32 threads, which wait for each other where a warp does."""

    def __init__(self, text: str) -> None:
        self._barrier, self._lane = threading.Barrier(32), threading.local()
        self._values: list[int] = [0] * 32
        arch = SimpleNamespace(
            lane_idx=lambda: self._lane.index,
            shuffle_sync_up=lambda value, by: self._exchange(value)[max(0, self._lane.index - by)],
            vote_ballot_sync=lambda true: sum(
                bool(v) << place for place, v in enumerate(self._exchange(true))
            ),
            popc=lambda value: value.bit_count(),
            make_warp_uniform=lambda value: value,
        )
        names = {"Int32": int, "min": min, "max": max, "range_constexpr": range}
        cute = SimpleNamespace(
            arch=arch, make_rmem_tensor=lambda shape, dtype: [0] * shape[0], jit=lambda f: f
        )
        self.scope: dict[str, Any] = {"cutlass": SimpleNamespace(**names), "cute": cute}
        kept = ("row_range", "count_tiles", "locate")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in kept:
                for argument in node.args.args:
                    argument.annotation = None
            elif not isinstance(node, ast.Assign) or not re.match(
                r"(TILE_M|CLUSTER_M|M?A?X?_?EXPERTS)", ast.unparse(node)
            ):
                continue
            exec(compile(ast.unparse(node), "kernel", "exec"), self.scope)

    def _exchange(self, value: int) -> list[int]:
        self._barrier.wait()
        self._values[self._lane.index] = value
        self._barrier.wait()
        return list(self._values)

    def run(self, function: Callable[[], Any]) -> Any:
        """Return what the first lane gets, which all others do too."""
        found: list[Any] = [None] * 32

        def lane(index: int) -> None:
            self._lane.index = index
            found[index] = function()

        threads = [threading.Thread(target=lane, args=(index,)) for index in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(result == found[0] for result in found)
        return found[0]


class _Extents(list[int]):
    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("form", ["grouped_gemm", "grouped_gemm_masked"])
def test_every_tile_of_every_group_is_visited_once(form: str, swapped: bool) -> None:
    """In any order of tiles; wrong offsets lead to no row that there is not."""
    problem = parse_problem(f"{form} 4000x512x256x100 bf16")
    space = find_space(form, HOPPER)
    changes = {"tile_shape_mn": (64, 64), "swap_ab": swapped, "cluster_shape_mn": (1, 1), "mma_warpgroups": 1}
    config = space.default(problem).replace(**changes)
    warp = _Warp(render(problem, config, space.arch).text)
    masked = "masked" in form
    right = [0, 1, 300, 0, 0, 64, 65, *[31] * 15, 0, 200, 0]
    wrong = [-5, 2**31 - 1, ROWS + 1, 7]
    for counts, width, swizzle, along_m in (
        (right, 5, 2, 0),
        (right, 8, 8, 1),
        ([900], 1, 4, 1),
        (wrong, 3, 1, 0),
    ):
        extents = _Extents(counts if masked or counts is wrong else accumulate(counts))
        ranges = [warp.scope["row_range"](extents, group, ROWS) for group in range(len(extents))]
        assert all(0 <= first <= end <= ROWS for first, end in ranges)
        if counts is not wrong:
            assert [end - first for first, end in ranges] == counts
        before = [-1] * 513
        rows = [-(-(end - first) // 64) for first, end in ranges]

        def visit(
            extents: Any = extents, before: Any = before, order: Any = (width, width, swizzle, along_m)
        ) -> Any:
            warp.scope["count_tiles"](extents, before, ROWS)
            warp.scope["cute"].arch.vote_ballot_sync(True)
            locate = warp.scope["locate"]
            return [locate(work, before, *order) for work in range(before[512] * order[0])]

        found = warp.run(visit)
        tiles = {
            (group, *((w, r) if swapped else (r, w)))
            for group, count in enumerate(rows)
            for r in range(count)
            for w in range(width)
        }
        assert len(found) == len(tiles) and {*found} == tiles
