"""The text of grouped GEMMs, run lane by lane: every tile of every group is visited once."""

from __future__ import annotations

import ast
import re
import textwrap
import threading
from collections.abc import Callable
from itertools import accumulate, product
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


class _Tiles:
    """The text of a kernel that says where a warpgroup's tile is, and whether it has anything to do there."""

    def __init__(self, text: str) -> None:
        sizes = re.findall(r"^((?:TILE|CLUSTER)_M, .*|MMA_WGS = \d+|REPS = [^#\n]*)", text, re.M)
        self.sizes: dict[str, Any] = {"WG": 128}
        exec("\n".join(sizes), self.sizes)
        consumer = text[text.index("        get = pipeline.make_pipeline_state") :]
        here = consumer[
            consumer.index("            m, n = cm") : consumer.index(
                "            for k in cutlass.range(pass"
            )
        ]
        kept = [line for line in here.splitlines() if "barrier" not in line and "mma.set" not in line]
        if "            ahead = " in consumer:
            last = "skipped = cutlass.Int32(REPS)\n"
            kept += consumer[
                consumer.index("            ahead = ") : consumer.index(last) + len(last)
            ].splitlines()
        else:
            kept.append("            skipped = REPS if passed else 0")
        self._code = compile(textwrap.dedent("\n".join(kept)), "kernel", "exec")
        ends = "\n".join(re.findall(r"^    (last_[mn] = .*|cols = m_d.*|rows = m_d.*)", text, re.M))
        self._ends = compile(ends, "kernel", "exec")

    def at(self, shape: tuple[int, int], group: tuple[int, int], cluster: tuple[int, int], **who: int) -> Any:
        """Return the names that the text gives, for a tile of D of a shape and a group's range of rows."""
        names = {"Int32": int, "min": min, "max": max}
        scope = {
            **self.sizes,
            **who,
            "cutlass": SimpleNamespace(**names),
            "m_d": SimpleNamespace(shape=shape),
            "row_range": lambda *given: group,
            "offs": None,
            "counts": None,
            "expert": 0,
            "k_tiles": 7,
        }
        exec(self._ends, scope)
        scope["cm"], scope["cn"] = cluster
        exec(self._code, scope)
        return SimpleNamespace(**scope)


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_shape_mn": (128, 64), "mma_warpgroups": 2, "cluster_shape_mn": (2, 1)},
        {"tile_shape_mn": (192, 72), "mma_warpgroups": 3, "cluster_shape_mn": (1, 2)},
        {"tile_shape_mn": (256, 64), "mma_warpgroups": 2, "cluster_shape_mn": (1, 1)},
        {"tile_shape_mn": (192, 64), "mma_warpgroups": 1, "pingpong": True, "cluster_shape_mn": (1, 2)},
        {"tile_shape_mn": (128, 64), "mma_warpgroups": 1, "pingpong": True, "cluster_shape_mn": (2, 2)},
        {"tile_shape_mn": (128, 40), "mma_warpgroups": 2, "swap_ab": True, "cluster_shape_mn": (1, 2)},
        {"tile_shape_mn": (64, 24), "mma_warpgroups": 1, "swap_ab": True, "cluster_shape_mn": (2, 1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["grouped_gemm", "grouped_gemm_masked"])
def test_what_passes_by_is_multiplied_by_others(form: str, changes: dict[str, Any]) -> None:
    """Each element of a group is some warpgroup's, and whoever has none of its own lets operands pass by.

    Of several slabs a warpgroup leaves out those that the tile before has.
    """
    problem: Any = parse_problem(f"{form} 4000x512x256x3 bf16")
    space = find_space(form, HOPPER)
    config = space.default(problem).replace(**changes)
    tiles, swapped = _Tiles(render(problem, config, HOPPER).text), config.flag("swap_ab")
    sizes = tiles.sizes
    idle = left_out = 0
    for first, count, width in (
        *((100, count, 152) for count in (1, 63, 64, 65, 128, 130, 200, 257, 400)),
        (0, 300, 40),
        (100, 300, 64),
    ):
        first = 0 if "masked" in form else first
        shape, group = ((width, 700), (700, width))[not swapped], (first, first + count)
        extents = (width, count) if swapped else (count, width)
        step = sizes["TILE_M"] * sizes["CLUSTER_M"], sizes["TILE_N"] * sizes["CLUSTER_N"]
        # Columns of the group's weights by eighths, of which tiles have whole ones.
        everything = set(product(range(first, first + count), range(width // 8)))
        found: set[tuple[int, int]] = set()
        for cm, cn, bx, by, mma_wg in product(
            range(-(-extents[0] // step[0])),
            range(-(-extents[1] // step[1])),
            range(sizes["CLUSTER_M"]),
            range(sizes["CLUSTER_N"]),
            range(sizes["MMA_WGS"]),
        ):
            tile = tiles.at(shape, group, (cm, cn), bx=bx, by=by, mma_wg=mma_wg)
            own = set()
            for rep in range(tile.skipped, sizes["REPS"]):
                m = tile.m_0 + (rep * sizes["MMA_WGS"] + mma_wg) * 64
                across, along = range(m, m + 64), range(tile.n_0, tile.n_0 + sizes["TILE_N"])
                rows, columns = (along, across) if swapped else (across, along)
                own |= set(product(rows, range(columns.start // 8, columns.stop // 8)))
            if tile.passed:
                idle += 1
                assert tile.passed == 7 and not own
            else:
                left_out += tile.skipped
                assert own & everything
                found |= own
        assert everything <= found
    assert idle > 0 or step == (256, 64)
    assert (left_out > 0) == (not swapped and sizes["REPS"] > 1)
