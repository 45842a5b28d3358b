"""The model of the schedule: what it finds in small worlds, and that every kernel of both spaces is clean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocols import SMALL_BLACKWELL, SMALL_HOPPER, covering_protocols

from cutegen.arch import Arch, find_arch
from cutegen.build.render import render
from cutegen.errors import RenderError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from tools.schedule import (
    KINDS,
    Cluster,
    Pipeline,
    everything,
    lengths,
    pipelines,
    simulate,
    simulate_cluster,
)
from tools.schedule.protocol import (
    Arrive,
    Board,
    Expect,
    Fence,
    Finish,
    Free,
    Init,
    Load,
    Part,
    Read,
    Script,
    Step,
    Store,
    Wait,
    Write,
)

HOPPER, BLACKWELL = find_arch("sm_90a"), find_arch("sm_100a")
PLAIN = Problem.parse("gemm 4096x4096x2048 bf16 kk")


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL], ids=str)
def test_kernels_that_hold_every_pair_of_facts_are_clean(arch: Arch) -> None:
    """Under priorities and at random; and their text creates the pipelines that were simulated."""
    found = covering_protocols(arch, draws=150)
    assert len(found) >= 25
    for protocol, pair in found.items():
        report = simulate_cluster(protocol.play(lengths(protocol, 3)), shuffles=2)
        assert report.clean and len(report.outcomes) == 9, f"{pair[0]} | {pair[1]}\n{report}"
        assert pipelines(render(*pair, arch).text) == protocol.pipelines


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL], ids=str)
@pytest.mark.parametrize(("tiles", "k_tiles"), [(1, 1), (2, 1), (1, 40), (5, 3)])
def test_defaults_are_clean_whatever_the_lengths(arch: Arch, tiles: int, k_tiles: int) -> None:
    """Fewer and more k tiles than stages, one tile and several."""
    config = find_space("gemm", arch).default(PLAIN)
    assert simulate(PLAIN, config, arch, tiles=tiles, k_tiles=k_tiles).clean


@pytest.mark.parametrize(
    ("changes", "units", "states"),
    [
        ({}, (3,), 15714),
        ({"cluster": (1, 1), "empty_arrivals": 1, "groups": 2}, (3, 3, 3), 863),
        ({"cluster": (1, 1), "empty_arrivals": 1, "promote": True}, (3, 2), 268),
    ],
)
def test_small_hopper_kernels_are_clean_in_every_order(
    changes: dict[str, object], units: tuple[int, ...], states: int
) -> None:
    """All states were seen, so there is no order in which anything goes wrong."""
    outcome = everything(replace(SMALL_HOPPER, **changes).play(units))  # type: ignore[arg-type]
    assert (outcome.violation, outcome.complete, outcome.steps) == (None, True, states)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_small_blackwell_kernel_is_clean_in_every_order(answers: int) -> None:
    """With tiles dealt in advance and with tiles that are asked for."""
    alone = replace(
        SMALL_BLACKWELL, cluster=(1, 1), pair=1, acc_arrivals=1, expected_bytes=96, answers=answers
    )
    outcome = everything(replace(alone, answer_arrivals=4 * bool(answers)).play((2, 1)))
    assert outcome.violation is None and outcome.complete


def test_pingpong_needs_tiles_of_one_length() -> None:
    """Each group skips as many k tiles as it had itself: why stream_k and split_k exclude pingpong."""
    lone = replace(SMALL_HOPPER, cluster=(1, 1), empty_arrivals=1, groups=2)
    assert simulate_cluster(lone.play((3, 3, 3))).clean
    assert not simulate_cluster(lone.play((3, 2, 3))).clean


def test_a_dynamic_scheduler_is_clean_and_needs_every_listener() -> None:
    """One answer reaches all roles of all blocks; it is given back by each of them."""
    protocol = replace(
        SMALL_BLACKWELL,
        cluster=(4, 2),
        empty_arrivals=3,
        bytes_b=64,
        expected_bytes=256,
        acc_arrivals=8,
        warps=4,
        answers=2,
        answer_arrivals=8 * 6 + 1,
    )
    assert simulate_cluster(protocol.play((3, 2, 4, 1))).clean
    more = simulate_cluster(replace(protocol, answer_arrivals=8 * 6 + 2).play((1, 1, 1, 1)))
    assert more.kinds == {"deadlock"}
    assert "answer empty[0] of block 0" in str(more)
    fewer = simulate_cluster(replace(protocol, answer_arrivals=8 * 6).play((1, 1, 1, 1)))
    assert not fewer.clean


def test_a_deadlock_is_told_in_words() -> None:
    """Who waits, where, for which barrier, and what that lacks."""
    cluster = replace(SMALL_HOPPER, empty_arrivals=3).play((4,))
    report = simulate_cluster(cluster, shuffles=0)
    violation = report.violations[0]
    assert (violation.kind, violation.tile, violation.k_step) == ("deadlock", 0, 2)
    assert violation.actor == "producer of block 0"
    assert (
        "producer of block 0 at tile 0, k step 2 waits for phase 0 of empty[0] of block 0, "
        "which lacks 1 of 3 arrivals" in violation.text
    )
    assert str(report).startswith("7 of 7 schedules go wrong\nloads first: deadlock: ")


# --- one rule of barriers and buffers each ---


def world(*warps: list[Step], count: int = 1, readers: int = 1) -> Cluster:
    """One block with barriers 0 and 1, buffer 0 of one part, and these warps; the first one initialises."""
    board = Board(1)
    for name in ("first", "second"):
        board.barrier(name, 0, count)
    board.buffer("stage", 0, 1, readers)
    start = board.barrier("start", -1, len(warps))
    for number, steps in enumerate(warps):
        script = Script(board, f"warp {number}", 0)
        if number == 0:
            script.add(Init())
        script.sync(start)
        script.add(*steps)
        script.end()
    return board.finished()


def load(item: int, phase: int) -> Load:
    return Load((Part(0, 1, item, 0, phase, 8),))


FILL = [Expect(0, 0, 8), load(0, 0)]
TAKE = [Wait(0, 0), Read((0,), 0), Finish((0,))]


@pytest.mark.parametrize(
    ("kind", "warps"),
    [
        ("", [FILL, [*TAKE, Arrive((1,), 0, (0,))]]),
        ("deadlock", [FILL, [Wait(1, 0)]]),
        ("overrun", [[Arrive((0,), 0), Arrive((0,), 0)]]),
        ("overrun", [[Arrive((0,), 0), Arrive((0,), 1), Wait(0, 0)]]),
        ("overrun", [[Arrive((0,), 0), Arrive((0,), 1), Arrive((0,), 2), Wait(0, 0)]]),
        ("stale_wait", [[Wait(0, 1)]]),
        ("unfilled_read", [FILL, [Read((0,), 0), Finish((0,))]]),
        ("unfilled_read", [FILL, [Wait(0, 0), Read((0,), 1)]]),
        ("overwrite", [[*FILL, Wait(0, 0), Expect(0, 1, 8), load(1, 1), Wait(0, 1)], [Wait(0, 0)]]),
        ("early_release", [FILL, [Wait(0, 0), Read((0,), 0), Arrive((1,), 0, (0,)), Finish((0,))]]),
        ("busy_exit", [[*FILL, Wait(0, 0), Read((0,), 0)]]),
        ("dead_block", [FILL]),
        ("overrun", [[Wait(1, 0), Arrive((0,), 0), Arrive((0,), 1)], [Arrive((1,), 0), Wait(0, 0)]]),
        ("overwrite", [[Expect(0, 0, 16), load(0, 0), load(0, 0), Wait(0, 0)]]),
        ("overwrite", [[Write(0, 1), Write(0, 1)]]),
        ("unfilled_read", [[Store(0), Finish((0,))]]),
        ("unfenced", [[Write(0, 1), Store(0), Finish((0,))]]),
        ("", [[Write(0, 1), Fence(0, 1), Store(0), Finish((0,))]]),
        ("busy_exit", [[*FILL, Wait(0, 0), Read((0,), 0), Free((0,)), Finish((0,))]]),
        ("uninitialised", [[Free((0,)), *FILL, Wait(0, 0)]]),
        ("lost", [FILL, [Wait(0, 0)]]),
    ],
)
def test_each_rule_is_kept(kind: str, warps: list[list[Step]]) -> None:
    """The orders of priority and those by chance find it, and so does looking at every order."""
    cluster = world(*warps)
    report = simulate_cluster(cluster)
    assert report.kinds == ({kind} if kind else set())
    violation = everything(cluster).violation
    assert (violation.kind if violation else "") == kind
    assert report.kinds <= set(KINDS)


def test_a_buffer_is_full_when_all_its_parts_are_there() -> None:
    """A barrier that expects the bytes of one part lets a reader see half a stage."""
    cluster = world(FILL, TAKE)
    half = replace(cluster, buffers=(replace(cluster.buffers[0], parts=3),))
    assert simulate_cluster(cluster).clean
    violation = simulate_cluster(half).violations[0]
    assert violation.kind == "unfilled_read" and "holds a part of item 0" in violation.text


# --- numbers of the text ---

TEXT = """
TILE_M, STAGES = 128, 4
AB, ACC = cutlass.Float8E4M3FN, cutlass.Float32
WIDTH = made_elsewhere()
def kernel():
    sharers = TILE_M // 64 + 1
    loads = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, sharers * {factor}),
        tx_count=TILE_M * 2 * AB.width // 8,
    )
"""


def test_the_numbers_of_pipelines_are_read_from_the_text() -> None:
    """Whatever constants they are made of."""
    assert pipelines(TEXT.format(factor=4)) == (Pipeline("PipelineTmaAsync", 4, 12, 256),)


def test_numbers_made_at_run_time_are_not_guessed() -> None:
    """The message names what is no constant."""
    with pytest.raises(RenderError, match="line 9: WIDTH is no constant"):
        pipelines(TEXT.format(factor="WIDTH"))
