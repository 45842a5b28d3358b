"""What the model of the schedule describes is what the kernels say: lines in which their warps synchronise.

Whoever changes these lines in a template changes cutegen/schedule/sm90.py or cutegen/schedule/sm100.py too.
"""

from __future__ import annotations

import re
from difflib import ndiff

import pytest

from cutegen.arch import find_arch
from cutegen.catalog import find_space
from cutegen.problem import Problem
from cutegen.render import render
from cutegen.space import Config

CALLS = re.compile(
    r"\b(pipeline_init_\w+|producer_\w+|consumer_\w+|acquire\w*|try_\w+|wait_and_advance|advance|reset|tail|release"
    r"|barrier|barrier_arrive|arrive_and_wait|sync_threads|commit_group|wait_group|gemm|fence_proxy|store_piece"
    r"|fence_view_async_tmem_load|allocate|wait_for_alloc|free)\("
)
CONTROL = re.compile(r"(while|if|for|else|with)\b.*:$")


def skeleton(text: str) -> list[str]:
    """The synchronising lines of the kernel, inside the loops and conditions in which they stand."""
    body = re.split(r"^@cute.kernel\ndef kernel\(", text, flags=re.MULTILINE)[1]
    body = re.split(r"^\S", body.split('"""', 2)[2], flags=re.MULTILINE)[0]
    body = re.sub(r"cute\.copy\(\n +(tma_\w+,)", r"cute.copy(\1", body)
    kept: list[tuple[int, str]] = []
    for line in reversed(body.splitlines()):
        words, depth = line.split("#")[0].strip(), len(line) - len(line.lstrip())
        opens = CONTROL.fullmatch(words) and kept and kept[-1][0] > depth
        calls = CALLS.search(words) and "= pipeline." not in words
        if opens or calls or words.startswith("cute.copy(tma_"):
            kept.append((depth, words))
    return [" " * (depth - 4) + words for depth, words in reversed(kept)]


def kernel(arch: str, line: str, words: str) -> list[str]:
    problem = Problem.parse(line)
    target = find_arch(arch)
    config = find_space("gemm", target).default(problem).replace(**Config.parse(words))
    return skeleton(render(problem, config, target).text)


TEAMS = """
pipeline_init_arrive(cluster_shape_mn=(CLUSTER_M, CLUSTER_N), is_relaxed=True)
pipeline_init_wait(cluster_shape_mn=(CLUSTER_M, CLUSTER_N))
if wg == 0:
    if warp == 0:
        while work < total:
            for k in cutlass.range(k_tiles, unroll=1):
                loads.producer_acquire(put)
                full = loads.producer_get_barrier(put)
                cute.copy(tma_a,
                cute.copy(tma_b,
                loads.producer_commit(put)
                put.advance()
        loads.producer_tail(put)
else:
    while work < total:
        for k in cutlass.range(k_tiles, unroll=1):
            loads.consumer_wait(get)
            for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                cute.gemm(mma, acc, r_a[at], r_b[at], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if k > 0:
                loads.consumer_release(free)
                free.advance()
            get.advance()
        warpgroup.wait_group(0)
        loads.consumer_release(free)
        free.advance()
        for rep in cutlass.range_constexpr(REPS):
            for sub in cutlass.range_constexpr(SUBTILES):
                if store_warp:
                    stores.producer_acquire()
                cute.arch.barrier(barrier_id=wg, number_of_threads=WG)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=wg, number_of_threads=WG)
                if store_warp:
                    store_piece(tma_d, g_d, sm_d, first_buffer + buffer, EPI_N, (row, col))
                    stores.producer_commit()
    stores.producer_tail()
"""
VARIANTS = {
    "pingpong": (
        "gemm 4096x4096x2048 bf16 tn",
        "tile_shape_mn=64x128 cluster_shape_mn=2x1 mma_warpgroups=1 pingpong=true",
        """
+     if group == 1:
+         cute.arch.barrier_arrive(barrier_id=8, number_of_threads=2 * WG)
+         get.advance(k_tiles)
+         free.advance(k_tiles)
+         cute.arch.barrier(barrier_id=my_turn, number_of_threads=2 * WG)
+         cute.arch.barrier_arrive(barrier_id=9 - group, number_of_threads=2 * WG)
+         get.advance(k_tiles)
+         free.advance(k_tiles)
""",
    ),
    "promote": (
        "gemm 4096x4096x2048 e4m3 tn promote",
        "tile_shape_mn=128x128 cluster_shape_mn=2x1",
        """
-         for k in cutlass.range(k_tiles, unroll=1):
+         for _ in cutlass.range(k_tiles, unroll=1):
-                 cute.gemm(mma, acc, r_a[at], r_b[at], acc)
+                 cute.gemm(mma, tile_acc, r_a[at], r_b[at], tile_acc)
-             warpgroup.wait_group(1)
+             warpgroup.wait_group(0)
-             if k > 0:
-                 loads.consumer_release(free)
+             loads.consumer_release(get)
-                 free.advance()
-         warpgroup.wait_group(0)
-         loads.consumer_release(free)
-         free.advance()
""",
    ),
    "narrow last piece": (
        "gemm 4096x4096x2048 bf16 tn",
        "tile_shape_mn=128x72",
        """
+             if store_warp:
+                 stores.producer_acquire()
+             cute.arch.barrier(barrier_id=wg, number_of_threads=WG)
+             cute.arch.fence_proxy("async.shared", space="cta")
+             cute.arch.barrier(barrier_id=wg, number_of_threads=WG)
+             if store_warp:
+                 store_piece(tma_t, g_t, sm_t, wg - 1, TAIL_N, (row, col))
+                 stores.producer_commit()
""",
    ),
    "registers": (
        "gemm 4096x4096x2048 bf16 tn",
        "tile_shape_mn=128x128 cluster_shape_mn=2x1 use_tma_store=false",
        """
-         for rep in cutlass.range_constexpr(REPS):
-             for sub in cutlass.range_constexpr(SUBTILES):
-                 if store_warp:
-                     stores.producer_acquire()
-                 cute.arch.barrier(barrier_id=wg, number_of_threads=WG)
-                 cute.arch.fence_proxy("async.shared", space="cta")
-                 cute.arch.barrier(barrier_id=wg, number_of_threads=WG)
-                 if store_warp:
-                     store_piece(tma_d, g_d, sm_d, first_buffer + buffer, EPI_N, (row, col))
-                     stores.producer_commit()
-     stores.producer_tail()
""",
    ),
}
PAIRS = """
pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)
pipeline_init_wait(cluster_shape_mn=cluster)
if warp == TMA_WARP:
    while work < total:
        put.reset()
        ready = put.try_acquire()
        for k in cutlass.range(k_tiles, unroll=1):
            stage = put.acquire_and_advance(ready)
            cute.copy(tma_a,
            cute.copy(tma_b,
            if stage.count + 1 < k_tiles:
                ready = put.try_acquire()
    put.tail()
if warp == MMA_WARP:
    tmem.wait_for_alloc()
    while work < total:
        if leader:
            get.reset()
            ready = get.try_wait()
            sums.producer_acquire(fill)
            for _ in cutlass.range(k_tiles, unroll=1):
                stage = get.wait_and_advance(ready)
                for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                    cute.gemm(mma, tile, r_a[at], r_b[at], tile)
                stage.release()
                if stage.count + 1 < k_tiles:
                    ready = get.try_wait()
            sums.producer_commit(fill)
        fill.advance()
    sums.producer_tail(fill)
if warp < EPI_WARPS:
    tmem.allocate(TMEM_COLUMNS)
    tmem.wait_for_alloc()
    while work < total:
        sums.consumer_wait(drain)
        for piece in cutlass.range(count, unroll=1):
            cute.arch.fence_view_async_tmem_load()
            if piece == count - 1:
                with cute.arch.elect_one():
                    sums.consumer_release(drain)
            if warp == 0:
                stores.producer_acquire()
            together.arrive_and_wait()
            cute.arch.fence_proxy("async.shared", space="cta")
            together.arrive_and_wait()
            if warp == 0:
                cute.copy(tma_d, ts_d[(None, buffer)], target[(None, piece)])
                stores.producer_commit()
        drain.advance()
    stores.producer_tail()
    together.arrive_and_wait()
    tmem.free(tmem_ptr)
"""


def test_the_hopper_kernel_synchronises_as_it_is_simulated() -> None:
    """Two warpgroups share a tile, and everything is stored by TMA."""
    words = "tile_shape_mn=128x128 cluster_shape_mn=2x1 mma_warpgroups=2 use_tma_store=true"
    assert kernel("sm_90a", "gemm 4096x4096x2048 bf16 tn", words) == TEAMS.strip().splitlines()


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_differ_where_their_models_differ(variant: str) -> None:
    """Lines that a variant has more, and those that it lacks."""
    line, words, changes = VARIANTS[variant]
    found = kernel("sm_90a", line, words)
    changed = [each for each in ndiff(TEAMS.strip().splitlines(), found) if each[0] in "+-"]
    assert changed == changes.strip().splitlines()


def test_the_blackwell_kernel_synchronises_as_it_is_simulated() -> None:
    """Two blocks share an MMA, and everything is stored by TMA."""
    assert (
        kernel("sm_100a", "gemm 4096x4096x2048 bf16 tn", "use_tma_store=true") == PAIRS.strip().splitlines()
    )


LISTEN = """
+         answers.consumer_wait(turn)
+         cute.arch.fence_proxy("async.shared", space="cta")
+         with cute.arch.elect_one():
+             answers.consumer_release(turn)
+         turn.advance()
"""
ASK = """
+ if warp == CLC_WARP and in_cluster == 0:
+     while work < total:
+         answers.producer_acquire(ask)
+         with cute.arch.elect_one():
+             cute.arch.issue_clc_query(answers.producer_get_barrier(ask), answer + ask.index)
+         ask.advance()
"""


def test_with_a_dynamic_scheduler_every_role_listens_as_it_is_simulated() -> None:
    """The loading, the multiplying, the asking and the storing warps, once per tile each."""
    found = kernel("sm_100a", "gemm 4096x4096x2048 bf16 tn", "use_tma_store=true use_clc=true")
    changed = [each for each in ndiff(PAIRS.strip().splitlines(), found) if each[0] in "+-"]
    asking = ASK + LISTEN + "+     answers.producer_tail(ask)\n"
    expected = LISTEN * 2 + asking + LISTEN
    assert changed == [line for line in expected.splitlines() if line]
