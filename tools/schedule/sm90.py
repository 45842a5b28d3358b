"""What the warps of the Hopper GEMM do to each other; the text of that is templates/gemm/sm90.py.j2.

One warp loads; the warps of one, two or three warpgroups multiply and store. With pingpong two warpgroups
work on a tile each, and named barriers hand the tensor cores from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Value, as_integer
from tools.schedule.declared import Pipeline
from tools.schedule.protocol import (
    Arrive,
    Board,
    Cluster,
    Expect,
    Finish,
    Init,
    Load,
    Meet,
    Part,
    Read,
    Script,
    Wait,
)
from tools.schedule.stores import RING, TAIL, Stores, StoringWarp

__all__ = ["HopperProtocol"]

LANES = 32
"""Threads of a warp; each of those that load factors arrives for itself."""


@dataclass(frozen=True)
class HopperProtocol:
    """What of a Hopper GEMM decides who waits for whom.

    Attributes:
        cluster: Thread blocks along m and n.
        stages: Stages of the load pipeline.
        warpgroups: Multiplying warpgroups of one tile.
        groups: Sets of them, each on a tile of its own: 2 with pingpong.
        promote: A stage is read to its end before the next one is begun.
        empty_arrivals: Arrivals that free a stage.
        bytes_a: Of one stage of A.
        bytes_b: Of one stage of B.
        expected_bytes: Bytes that the producer announces per stage.
        store_buffers: Store buffers of one warpgroup, 0 if it stores from registers.
        pieces: What one warpgroup stores of one tile, in order.
        warps: Warps of a warpgroup; fewer make a smaller model.
        equal_tiles: The loop over k is as long for every tile.
        bytes_factors: Of one stage of what a second warp loads beside the tiles; 0 without such a warp.
    """

    cluster: tuple[int, int]
    stages: int
    warpgroups: int
    groups: int
    promote: bool
    empty_arrivals: int
    bytes_a: int
    bytes_b: int
    expected_bytes: int
    store_buffers: int
    pieces: tuple[str, ...]
    warps: int = 4
    equal_tiles: bool = True
    bytes_factors: int = 0

    @classmethod
    def of(cls, problem: Problem, config: Config, derived: Mapping[str, Value]) -> HopperProtocol:
        """Return the protocol of a config."""
        tile, warpgroups = config.pair("tile_shape_mn"), config.integer("mma_warpgroups")
        number = {name: as_integer(derived[name], name) for name in _NUMBERS}
        element = config.integer("tile_k") * DTYPE_BYTES[problem.ab_dtype]
        pieces: tuple[str, ...] = ()
        staged = config.flag("use_tma_store") and not derived["split"]
        if staged:
            slab = (RING,) * (tile[1] // number["epi_n"]) + (TAIL,) * bool(number["epi_tail"])
            pieces = slab * (tile[0] // (64 * warpgroups))
        return cls(
            cluster=config.pair("cluster_shape_mn"),
            stages=number["stages"],
            warpgroups=warpgroups,
            groups=number["groups"],
            promote=problem.promote,
            empty_arrivals=number["empty_arrivals"],
            bytes_a=tile[0] * element,
            bytes_b=number["loaded_n"] * element,
            expected_bytes=number["expected_bytes"],
            store_buffers=number["epi_stages"] if staged else 0,
            pieces=pieces,
            equal_tiles=not (config["stream_k"] or derived["split"]),
            bytes_factors=as_integer(derived.get("bytes_factors", 0), "bytes_factors"),
        )

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines that the text of the kernel has to create, in its order."""
        fillers = 1 + (LANES if self.bytes_factors else 0)
        loads = Pipeline("PipelineTmaAsync", self.stages, self.empty_arrivals, self.expected_bytes, fillers)
        stores = Pipeline("PipelineTmaStore", self.store_buffers, 0, 0)
        return (loads, stores) if self.pieces else (loads,)

    def play(self, units: Sequence[int]) -> Cluster:
        """Return the cluster that works off units of so many k tiles each."""
        (rows, columns), blocks = self.cluster, self.cluster[0] * self.cluster[1]
        board = Board(blocks)
        loaders = 2 if self.bytes_factors else 1
        warps = loaders + self.warps * self.warpgroups * self.groups
        everybody = board.barrier("the cluster's barrier", -1, warps * blocks)
        parts = rows + columns + loaders - 1
        full = [board.ring("full", block, self.stages, loaders) for block in range(blocks)]
        empty = [board.ring("empty", block, self.stages, self.empty_arrivals) for block in range(blocks)]
        readers = self.warps * self.warpgroups
        stages = [
            [board.buffer(f"stage {stage}", block, parts, readers) for stage in range(self.stages)]
            for block in range(blocks)
        ]
        rings = _Rings(everybody, full, empty, stages)
        for block in range(blocks):
            self._producer(board, rings, block, units)
            if self.bytes_factors:
                self._loader_of_factors(board, rings, block, sum(units))
            self._consumers(board, rings, block, units)
        return board.finished()

    def sharers(self, block: int) -> tuple[int, ...]:
        """Return the blocks that load for ``block`` and for which it loads: its row and its column."""
        rows, columns = self.cluster
        m, n = block % rows, block // rows
        return tuple(other for other in range(rows * columns) if other % rows == m or other // rows == n)

    def _producer(self, board: Board, rings: _Rings, block: int, units: Sequence[int]) -> None:
        rows, columns = self.cluster
        m, n = block % rows, block // rows
        to_a = [m + other * rows for other in range(columns)]
        to_b = [other + n * rows for other in range(rows)]
        script = Script(board, "producer", block)
        script.add(Init())
        script.sync(rings.everybody)
        item = 0
        for tile, k_tiles in enumerate(units):
            for k in range(k_tiles):
                script.at(tile, k)
                stage, phase = item % self.stages, item // self.stages
                script.add(Wait(rings.empty[block][stage], phase - 1))
                script.add(Expect(rings.full[block][stage], phase, self.expected_bytes))
                for targets, part, size in (
                    (to_a, 1 << n, self.bytes_a // columns),
                    (to_b, 1 << columns + m, self.bytes_b // rows),
                ):
                    script.add(
                        Load(
                            tuple(
                                Part(rings.stages[to][stage], part, item, rings.full[to][stage], phase, size)
                                for to in targets
                            )
                        )
                    )
                item += 1
        script.at(-1)
        for last in range(item, item + self.stages):
            script.add(Wait(rings.empty[block][last % self.stages], last // self.stages - 1))
        script.end()

    def _loader_of_factors(self, board: Board, rings: _Rings, block: int, items: int) -> None:
        """Lanes arrive as their copies land; here the warp arrives, and announces bytes that land later."""
        script = Script(board, "loader of factors", block)
        script.sync(rings.everybody)
        bit = 1 << sum(self.cluster)
        for item in range(items):
            stage, phase = item % self.stages, item // self.stages
            full = rings.full[block][stage]
            script.add(Wait(rings.empty[block][stage], phase - 1))
            script.add(Expect(full, phase, self.bytes_factors))
            part = Part(rings.stages[block][stage], bit, item, full, phase, self.bytes_factors)
            script.add(Load((part,)))
        script.end()

    def _consumers(self, board: Board, rings: _Rings, block: int, units: Sequence[int]) -> None:
        turns: tuple[int, ...] = ()
        if self.groups == 2:
            turns = tuple(board.barrier(f"turn {group}", block, 2 * self.warps) for group in range(2))
        for group in range(self.groups):
            for warpgroup in range(self.warpgroups):
                number = group * self.warpgroups + warpgroup
                stores = Stores.make(
                    board, f"warpgroup {number}", block, self.store_buffers, self.pieces, self.warps
                )
                for warp in range(self.warps):
                    script = Script(board, f"warp {warp} of warpgroup {number}", block)
                    self._consumer(script, rings, block, group, warp, units, turns, stores)

    def _consumer(
        self,
        script: Script,
        rings: _Rings,
        block: int,
        group: int,
        warp: int,
        units: Sequence[int],
        turns: tuple[int, ...],
        stores: Stores,
    ) -> None:
        storing = StoringWarp(script, stores, warp)
        script.sync(rings.everybody)
        at = 0
        if group == 1:
            script.add(Meet(turns[0]))
            at = units[0]
        first_items = [sum(units[:tile]) for tile in range(len(units))]
        for tile in range(group, len(units), self.groups):
            k_tiles = units[tile]
            script.at(tile)
            if turns:
                script.sync(turns[group])
            for k in range(k_tiles):
                script.at(tile, k)
                stage, phase = at % self.stages, at // self.stages
                script.add(Wait(rings.full[block][stage], phase))
                script.add(Read((rings.stages[block][stage],), first_items[tile] + k))
                if self.promote:
                    self._release(script, rings, block, at)
                elif k:
                    self._release(script, rings, block, at - 1)
                at += 1
            script.at(tile)
            if turns:
                script.add(Meet(turns[1 - group]))
            if not self.promote:
                self._release(script, rings, block, at - 1)
            if turns:
                at += k_tiles  # the other group's tile, taken to be as long
            storing.tile()
        script.at(-1)
        storing.end()
        script.end()

    def _release(self, script: Script, rings: _Rings, block: int, at: int) -> None:
        stage, phase = at % self.stages, at // self.stages
        buffers = (rings.stages[block][stage],)
        targets = tuple(rings.empty[other][stage] for other in self.sharers(block))
        script.add(Finish(buffers), Arrive(targets, phase, buffers))


@dataclass(frozen=True)
class _Rings:
    """Numbers of barriers and buffers, by block and stage."""

    everybody: int
    full: list[tuple[int, ...]]
    empty: list[tuple[int, ...]]
    stages: list[list[int]]


_NUMBERS = (
    *("stages", "groups", "epi_n", "epi_tail", "epi_stages"),
    *("empty_arrivals", "loaded_n", "expected_bytes"),
)
