"""How much is allocated and launched, and the sizes on which candidates are checked: all without a GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutegen.families.gemm.problem import LAYOUTS, Epilogue, Problem
from cutegen.families.gemm.tail_shapes import tail_problems
from cutegen.measure.sizing import plan_launches, plan_replays, plan_rotation

L2, MEMORY = 60 * 2**20, 140 * 2**30
sizes = st.integers(1, 4000).map(lambda x: x * 8)


@given(sizes, sizes, sizes)
def test_rotation_is_cold_and_affordable(m: int, n: int, k: int) -> None:
    """Operands span three L2 caches unless one set is huge, memory is short, or 512 sets are not enough."""
    problem = Problem(m, n, k)
    rotation = plan_rotation(problem, L2, MEMORY)
    assert 1 <= rotation.sets <= 512
    cold = rotation.footprint_bytes >= 3 * L2 or rotation.sets == 512
    assert cold or rotation.footprint_bytes + problem.min_bytes > MEMORY // 4
    assert rotation.sets == 1 or rotation.footprint_bytes <= MEMORY // 4


@given(st.floats(0.1, 1e5), st.integers(1, 512))
def test_graph_uses_every_set_equally(time_us: float, sets: int) -> None:
    """The launches of a graph are a multiple of the sets, about a millisecond and never very many."""
    launches = plan_launches(time_us, sets)
    assert launches % sets == 0 and launches >= sets
    assert launches <= max(200, 1000 / time_us) + sets


def test_replays_fill_a_round() -> None:
    """A round takes whole replays, at least one."""
    assert [plan_replays(6000, us) for us in (1000, 5000, 20000)] == [6, 1, 1]


signatures = st.builds(
    Problem,
    m=st.sampled_from([8, 16, 56, 64, 4096]),
    n=st.sampled_from([8, 128, 4096]),
    k=st.sampled_from([8, 128, 4096]),
    batch=st.sampled_from([1, 5]),
    ab_dtype=st.sampled_from(["bf16", "fp16"]),
    out_dtype=st.sampled_from(["bf16", "fp32"]),
    layout=st.sampled_from(list(LAYOUTS)),
    unaligned_out=st.booleans(),
    epilogue=st.builds(Epilogue, beta=st.booleans(), bias=st.sampled_from(["", "m", "n"])),
)


@given(signatures)
def test_tails_share_the_signature_and_fit_no_tile(problem: Problem) -> None:
    """There always is a tail; the same artifact runs it; it has remainders in n, k and in a large m."""
    tails = tail_problems(problem)
    assert tails and len(set(tails)) == len(tails)
    for tail in tails:
        assert tail.signature == problem.signature
        assert tail.k % 64 in (8, 16) and tail.n % 16 in (7, 8)
        assert problem.m < 64 or tail.m % 64
    assert [t.flops for t in tails] == sorted(t.flops for t in tails)


def test_tail_of_an_odd_width_stays_odd() -> None:
    """Unaligned outputs by size keep an size that is unaligned."""
    tails = tail_problems(Problem(4096, 4095, 4096))
    assert tails and all(tail.unaligned_out and tail.n % 8 for tail in tails)
    assert tail_problems(Problem(4096, 4100, 4096))[0].n == 391
