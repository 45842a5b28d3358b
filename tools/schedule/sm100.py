"""What the warps of the Blackwell GEMMs do to each other, as their templates say.

One warp loads, one queues MMAs, four read the sums from tensor memory and store them. Two blocks may share
one MMA: the first of a pair, its leader, issues for both. With a dynamic scheduler a further warp of the
cluster's first block asks for tiles and tells every role of every block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutegen.family import Problem
from cutegen.space import Config, Value, as_integer
from tools.schedule.declared import Pipeline
from tools.schedule.protocol import (
    Alloc,
    Arrive,
    Board,
    Cluster,
    Commit,
    Expect,
    Finish,
    Free,
    Init,
    Load,
    Multiply,
    Part,
    Read,
    Script,
    Wait,
)
from tools.schedule.stores import RING, Stores, StoringWarp

__all__ = ["BlackwellProtocol"]

ANSWER_BYTES = 16
"""Of the answer to a request for a tile. Source: PTX ISA, clusterlaunchcontrol.try_cancel."""


@dataclass(frozen=True)
class BlackwellProtocol:
    """What of a Blackwell GEMM decides who waits for whom.

    Attributes:
        cluster: Thread blocks along m and n.
        pair: Thread blocks that share one MMA: 1, or 2 that lie along m.
        stages: Stages of the load pipeline.
        empty_arrivals: Arrivals that free a stage.
        bytes_a: That one block loads of one stage of A, for itself and its row.
        bytes_b: The same of B and its column.
        bytes_scales: The same of the scale factors of B, which go to both blocks of each pair of the column;
            0 if there are none. Those of A go where A goes.
        expected_bytes: Bytes that the leader announces per stage, for all blocks of the pair.
        acc_stages: Tiles of sums in tensor memory.
        acc_arrivals: Arrivals that free one of them.
        store_buffers: Store buffers of a block, 0 if it stores from registers.
        pieces: Pieces in which a tile leaves tensor memory.
        answers: Buffers for the answers of the dynamic scheduler, 0 if tiles are dealt in advance.
        answer_arrivals: Arrivals that free one of them.
        warps: Warps that store; fewer make a smaller model.
        equal_tiles: The loop over k is as long for every tile.
    """

    cluster: tuple[int, int]
    pair: int
    stages: int
    empty_arrivals: int
    bytes_a: int
    bytes_b: int
    expected_bytes: int
    acc_stages: int
    acc_arrivals: int
    store_buffers: int
    pieces: int
    answers: int = 0
    answer_arrivals: int = 0
    warps: int = 4
    equal_tiles: bool = True
    bytes_scales: int = 0

    @classmethod
    def of(cls, problem: Problem, config: Config, derived: Mapping[str, Value]) -> BlackwellProtocol:
        """Return the protocol of a config."""
        number = {name: as_integer(derived[name], name) for name in _NUMBERS}
        # A space without a dynamic scheduler, or without split_k, derives nothing for them.
        answers, answer_arrivals = (as_integer(derived.get(n, 0), n) for n in ("answers", "answer_arrivals"))
        split = bool(derived.get("split", False))
        rows, columns = config.pair("mma_tiler_mn")
        per_row = number["stage_bytes"] // (rows + columns)
        bytes_a, scales = rows * per_row, 0
        if "bytes_scales" in derived:
            bytes_a, scales = as_integer(derived["bytes_a"]), as_integer(derived["bytes_scales"])
        return cls(
            cluster=config.pair("cluster_shape_mn"),
            pair=2 if config.flag("use_2cta_instrs") else 1,
            stages=number["stages"],
            empty_arrivals=number["empty_arrivals"],
            bytes_a=bytes_a,
            bytes_b=number["stage_bytes"] - bytes_a - scales,
            expected_bytes=number["expected_bytes"],
            acc_stages=number["acc_stages"],
            acc_arrivals=number["acc_arrivals"],
            store_buffers=number["epi_stages"] if config.flag("use_tma_store") and not split else 0,
            pieces=columns // number["epi_n"],
            answers=answers,
            answer_arrivals=answer_arrivals,
            equal_tiles=not split,
            bytes_scales=scales,
        )

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines that the text of the kernel has to create, in its order."""
        loads = Pipeline("PipelineTmaUmma", self.stages, self.empty_arrivals, self.expected_bytes)
        sums = Pipeline("PipelineUmmaAsync", self.acc_stages, self.acc_arrivals, 0)
        stores = Pipeline("PipelineTmaStore", self.store_buffers, 0, 0)
        answers = Pipeline("PipelineClcFetchAsync", self.answers, self.answer_arrivals, ANSWER_BYTES)
        return (
            *(loads, sums),
            *((answers,) if self.answers else ()),
            *((stores,) if self.store_buffers else ()),
        )

    def play(self, units: Sequence[int]) -> Cluster:
        """Return the cluster that works off units of so many k tiles each."""
        return _Play(self, tuple(units)).cluster()


class _Play:
    """One run of the protocol: the board, and the steps of every warp."""

    def __init__(self, protocol: BlackwellProtocol, units: tuple[int, ...]) -> None:
        self.p = protocol
        self.units = units
        rows, columns = protocol.cluster
        self.blocks = rows * columns
        self.board = board = Board(self.blocks)
        warps = self.blocks * (2 + protocol.warps) + bool(protocol.answers)
        self.everybody = board.barrier("the cluster's barrier", -1, warps)
        parts = columns + rows // protocol.pair + (rows if protocol.bytes_scales else 0)
        each = range(self.blocks)
        self.full = [board.ring("full", block, protocol.stages, 1) for block in each]
        self.empty = [board.ring("empty", block, protocol.stages, protocol.empty_arrivals) for block in each]
        self.stages = [
            [board.buffer(f"stage {stage}", block, parts, 1) for stage in range(protocol.stages)]
            for block in each
        ]
        self.acc_full = [board.ring("sums full", block, protocol.acc_stages, 1) for block in each]
        self.acc_empty = [
            board.ring("sums empty", block, protocol.acc_stages, protocol.acc_arrivals) for block in each
        ]
        self.sums = [
            [board.buffer(f"sums {i}", block, 1, protocol.warps, False) for i in range(protocol.acc_stages)]
            for block in each
        ]
        self.allocated = [board.barrier("end of allocation", block, protocol.warps + 1) for block in each]
        self.drained = [board.barrier("end of reading", block, 1) for block in each]
        self.answer_full = [board.ring("answer full", block, protocol.answers, 1) for block in each]
        self.answer_empty = board.ring("answer empty", 0, protocol.answers, protocol.answer_arrivals)
        listeners = 2 + protocol.warps
        self.answer = [
            [board.buffer(f"answer {i}", block, 1, listeners + (block == 0)) for i in range(protocol.answers)]
            for block in each
        ]

    def cluster(self) -> Cluster:
        """Return the cluster with all of its warps."""
        pairs = [self.board.barrier(f"allocation of pair {i}", -1, self.p.pair) for i in range(self.blocks)]
        for block in range(self.blocks):
            self.load_warp(block)
            self.mma_warp(block)
            self.storing_warps(block, pairs[self.leader(block)])
        if self.p.answers:
            self.scheduler_warp()
        return self.board.finished()

    # --- places ---

    def leader(self, block: int) -> int:
        """Return the block that issues for ``block``."""
        return block - block % self.p.cluster[0] % self.p.pair

    def mates(self, block: int) -> tuple[int, ...]:
        """Return the blocks of a pair, its leader first."""
        return tuple(range(self.leader(block), self.leader(block) + self.p.pair))

    def row_and_column(self, block: int) -> tuple[list[int], list[int]]:
        """Return the blocks that get what a block loads of A, and those that get what it loads of B."""
        rows, columns = self.p.cluster
        m, n = block % rows, block // rows
        same_half = range(m % self.p.pair, rows, self.p.pair)
        return [m + other * rows for other in range(columns)], [other + n * rows for other in same_half]

    # --- warps ---

    def listen(self, script: Script, number: int, block: int) -> None:
        """Take the next answer of the dynamic scheduler: every role does, the last one says stop."""
        if not self.p.answers:
            return
        stage, phase = number % self.p.answers, number // self.p.answers
        buffers = (self.answer[block][stage],)
        script.add(
            Wait(self.answer_full[block][stage], phase),
            Read(buffers, number),
            Finish(buffers),
            Arrive((self.answer_empty[stage],), phase, buffers),
        )

    def scheduler_warp(self) -> None:
        """One answer for every tile after the first, and one that says that there is none."""
        script = Script(self.board, "scheduler warp", 0)
        script.sync(self.everybody)
        count = len(self.units)
        for number in range(count):
            script.at(number)
            stage, phase = number % self.p.answers, number // self.p.answers
            script.add(Wait(self.answer_empty[stage], phase - 1))
            for block in range(self.blocks):
                script.add(Expect(self.answer_full[block][stage], phase, ANSWER_BYTES))
            parts = (
                Part(
                    self.answer[block][stage], 1, number, self.answer_full[block][stage], phase, ANSWER_BYTES
                )
                for block in range(self.blocks)
            )
            script.add(Load(tuple(parts)))
            self.listen(script, number, 0)
        script.at(-1)
        for last in range(count, count + self.p.answers):
            script.add(Wait(self.answer_empty[last % self.p.answers], last // self.p.answers - 1))
        script.end()

    def load_warp(self, block: int) -> None:
        """Fill stages: a slice of A for the row, one of B for the column."""
        p, script = self.p, Script(self.board, "loading warp", block)
        rows, columns = p.cluster
        m, n = block % rows, block // rows
        to_a, to_b = self.row_and_column(block)
        slices = [
            (to_a, 1 << n, p.bytes_a // columns),
            (to_b, 1 << columns + m // p.pair, p.bytes_b * p.pair // rows),
        ]
        if p.bytes_scales:
            column = [other + n * rows for other in range(rows)]
            slices.append((column, 1 << columns + rows // p.pair + m, p.bytes_scales // rows))
        script.sync(self.everybody)
        item = 0
        for tile, k_tiles in enumerate(self.units):
            for k in range(k_tiles):
                script.at(tile, k)
                stage, phase = item % p.stages, item // p.stages
                script.add(Wait(self.empty[block][stage], phase - 1))
                if block == self.leader(block):
                    script.add(Expect(self.full[block][stage], phase, p.expected_bytes))
                for targets, part, size in slices:
                    parts = (
                        Part(
                            *(self.stages[to][stage], part, item),
                            *(self.full[self.leader(to)][stage], phase, size),
                        )
                        for to in targets
                    )
                    script.add(Load(tuple(parts)))
                item += 1
            script.at(tile)
            self.listen(script, tile, block)
        script.at(-1)
        for last in range(item, item + p.stages):
            script.add(Wait(self.empty[block][last % p.stages], last // p.stages - 1))
        script.end()

    def mma_warp(self, block: int) -> None:
        """Queue the MMAs of a pair; the other block's warp only counts along."""
        p, script = self.p, Script(self.board, "multiplying warp", block)
        mates = self.mates(block)
        freed = sorted({other for mate in mates for to in self.row_and_column(mate) for other in to})
        script.sync(self.everybody)
        script.sync(self.allocated[block])
        item = 0
        for tile, k_tiles in enumerate(self.units):
            script.at(tile)
            acc, turn = tile % p.acc_stages, tile // p.acc_stages
            sums = tuple(self.sums[mate][acc] for mate in mates)
            if block == mates[0]:
                script.add(Wait(self.acc_empty[block][acc], turn - 1))
                for k in range(k_tiles):
                    script.at(tile, k)
                    stage, phase = item % p.stages, item // p.stages
                    buffers = tuple(self.stages[mate][stage] for mate in mates)
                    script.add(Wait(self.full[block][stage], phase))
                    script.add(Multiply(buffers, item, sums, tile, k == 0))
                    script.add(Commit(tuple(self.empty[other][stage] for other in freed), phase))
                    item += 1
                script.add(Commit(tuple(self.acc_full[mate][acc] for mate in mates), turn, sums))
            self.listen(script, tile, block)
        script.at(-1)
        if block % 2 == 0:  # the DSL's tail goes by the rank, pairs or not
            last = len(self.units) - 1 + p.acc_stages
            script.add(Wait(self.acc_empty[block][last % p.acc_stages], last // p.acc_stages - 1))
        script.end()

    def storing_warps(self, block: int, pair: int) -> None:
        """Read the sums and store them."""
        p = self.p
        pieces = (RING,) * p.pieces if p.store_buffers else ()
        stores = Stores.make(self.board, "the epilogue warps", block, p.store_buffers, pieces, p.warps)
        for warp in range(p.warps):
            self.storing_warp(block, warp, pair, stores)

    def storing_warp(self, block: int, warp: int, pair: int, stores: Stores) -> None:
        """The steps of one of them; warp 0 also allocates and frees."""
        p, script = self.p, Script(self.board, f"epilogue warp {warp}", block)
        storing = StoringWarp(script, stores, warp)
        mine, leader = tuple(self.sums[block]), self.leader(block)
        if warp == 0:
            script.add(Init())
        script.sync(self.everybody)
        if warp == 0:
            script.add(Alloc(mine))
            script.sync(pair)  # the blocks of a pair allocate together (PTX ISA, tcgen05.alloc, cta_group::2)
        script.sync(self.allocated[block])
        for tile in range(len(self.units)):
            script.at(tile)
            acc, turn = tile % p.acc_stages, tile // p.acc_stages
            sums = (self.sums[block][acc],)
            script.add(Wait(self.acc_full[block][acc], turn), Read(sums, tile))
            for piece in range(p.pieces):
                if piece == p.pieces - 1:
                    script.add(Finish(sums), Arrive((self.acc_empty[leader][acc],), turn, sums))
                if p.store_buffers:
                    storing.piece(RING)
            self.listen(script, tile, block)
        script.at(-1)
        storing.end()
        script.sync(stores.barrier)
        if warp == 0:
            others = tuple(mate for mate in self.mates(block) if mate != block)
            if others:  # neither block frees while the other still reads
                script.add(Arrive(tuple(self.drained[mate] for mate in others), 0))
                script.add(Wait(self.drained[block], 0))
            script.add(Free(mine))
        script.end()


_NUMBERS = (
    *("stages", "epi_n", "epi_stages", "acc_stages"),
    *("stage_bytes", "expected_bytes", "empty_arrivals", "acc_arrivals"),
)
