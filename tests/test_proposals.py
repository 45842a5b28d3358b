"""The search: legal, diverse, deterministic lists with the default first, and steps from what won."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.arch import find_arch
from cutegen.errors import ConfigError, UsageError
from cutegen.families.gemm.perf_model import proposals as search
from cutegen.families.gemm.perf_model.estimator import Estimator
from cutegen.families.gemm.perf_model.fitted import fitted_times_us, fitted_us, load_fit
from cutegen.families.gemm.perf_model.kernel_set import kernel_set
from cutegen.families.gemm.perf_model.proposals import promising, rank, refine
from cutegen.families.gemm.perf_model.strategy import GemmStrategy
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import is_heavy
from cutegen.search import strategies as survey
from cutegen.search.defaults import default_config
from cutegen.space import Config, Query, Value

SM90 = find_arch("sm_90a")
SPACE = find_space("gemm", SM90)
LIMIT = 16
pytestmark = pytest.mark.xdist_group("test_proposals.py")  # most tests ask for the same ranked lists

T1, T2, T6 = Problem(4096, 4096, 4096), Problem(1024, 1024, 1024), Problem(8192, 8192, 512)
S1, L1, D9 = Problem(256, 256, 65536), Problem(1, 6144, 4096), Problem(4096, 256, 7168)
L4, D10 = Problem(256, 6144, 4096), Problem(4096, 2112, 7168)


def _views(configs: list[Config]) -> set[Config]:
    return {SPACE.compile_view(config) for config in configs}


@cache
def _ranked(problem: Problem) -> list[Config]:
    return rank(Query(SPACE, problem, 132), LIMIT)


def _predicted(problem: Problem, config: Config) -> float:
    derived = SPACE.derive(config, problem, SM90)
    return Estimator(problem, SM90, 132).estimate(config, derived).time_us


@settings(max_examples=8, deadline=None)
@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 600).map(lambda x: 8 * x),
    k=st.integers(1, 600).map(lambda x: 8 * x),
    limit=st.integers(1, 20),
    layout=st.sampled_from(["kk", "kn"]),
    out=st.sampled_from(["bf16", "fp32"]),
    bias=st.sampled_from(["", "n"]),
)
def test_every_ranked_config_is_legal_and_kernels_stay_within_the_limit(
    m: int, n: int, k: int, limit: int, layout: str, out: str, bias: str
) -> None:
    """Whatever the problem: the default leads, all is legal, nothing repeats, at most `limit` kernels."""
    problem = Problem(m, n, k, out_dtype=out, layout=layout, epilogue=Epilogue(bias=bias))
    configs = rank(Query(SPACE, problem, 132), limit)
    assert configs[0] == SPACE.default(problem)
    assert all(not SPACE.explain(problem, config) for config in configs)
    assert len(set(configs)) == len(configs)
    assert 1 <= len(_views(configs)) <= limit


def test_the_same_question_gets_the_same_list() -> None:
    """Ranking twice gives the same configs in the same order."""
    assert rank(Query(SPACE, T1, 132), LIMIT) == _ranked(T1)


def test_what_was_precomputed_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking and refining after it look the predictions up; a target without a model has none to make."""
    problem, fixed = Problem(4000, 2000, 1000), {"pingpong": (False,)}
    expected = survey.rank(SPACE, problem, 132, LIMIT, fixed)
    search._ranked.cache_clear()
    survey.precompute(SPACE, problem, 132, fixed)
    monkeypatch.setattr(search, "Ranker", lambda *question: pytest.fail("ranked once more"))
    assert survey.rank(SPACE, problem, 132, LIMIT, fixed) == expected
    assert survey.refine(SPACE, problem, {expected[0]: 10.0}, 2, sm_count=132, fixed=fixed)
    scaled = parse_problem("gemm_blockscaled 4096x4096x4096 mxfp8_e4m3 kk")
    survey.precompute(find_space("gemm_blockscaled", find_arch("sm_100a")), scaled, 148)


def test_the_limit_counts_kernels_and_variants_are_free() -> None:
    """The limit is used up by kernels; run-time variants come on top, after every kernel had its turn."""
    configs = _ranked(S1)
    assert len(_views(configs)) == LIMIT
    assert len(_views(configs[:LIMIT])) == LIMIT
    assert LIMIT < len(configs) <= LIMIT * 3 + 1
    plain = rank(Query(SPACE, S1, 132), LIMIT, variants=0)
    assert _views(plain) == _views(configs)
    assert len(plain) <= LIMIT + 1


def test_the_model_chooses_run_time_arguments() -> None:
    """A deep GEMM on few tiles is split until it fills the GPU, and large ones are rasterized in bands."""
    best = _ranked(S1)[1]
    tile, split = best["tile_shape_mn"], best["split_k"]
    assert isinstance(tile, tuple) and isinstance(split, int)
    assert 100 <= -(-256 // tile[0]) * -(-256 // tile[1]) * split <= 132
    large = _ranked(Problem(8192, 8192, 8192))
    assert all(config["swizzle_size"] != 1 for config in large[1:4])


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (T1, {"tile_shape_mn": (128, 256), "pingpong": False}),
        (T1, {"pingpong": True}),
        (T2, {"tile_shape_mn": (64, 128)}),
        (T6, {"tile_shape_mn": (128, 192), "pingpong": True}),
        (L4, {"tile_shape_mn": (128, 96)}),
        (D9, {"tile_shape_mn": (64, 128)}),
        (D10, {"tile_shape_mn": (128, 176)}),
        (L1, {"tile_shape_mn": (64, 8), "swap_ab": True}),
        (Problem(8192, 8192, 8192), {"tile_shape_mn": (128, 256)}),
        (Problem(8192, 8192, 8192), {"tile_shape_mn": (128, 192), "pingpong": True}),
        (Problem(16, 8192, 8192), {"tile_shape_mn": (64, 16), "swap_ab": True}),
        (Problem(128, 7168, 2048), {"tile_shape_mn": (64, 112)}),
    ],
)
def test_known_good_kernels_are_among_the_first_sixteen(problem: Problem, wanted: dict[str, object]) -> None:
    """Tiles that cuBLAS, QuACK or NVIDIA's kernel win with on an H200 are compiled in a small budget."""
    configs = _ranked(problem)
    assert any(all(config[knob] == value for knob, value in wanted.items()) for config in configs)


#: What cuBLAS takes on one H200 in microseconds, settled.
CUBLAS = {
    T1: 205.09,
    T2: 6.25,
    Problem(2048, 2048, 2048): 29.09,
    Problem(8192, 8192, 8192): 1692.5,
    T6: 128.85,
    L1: 15.54,
    Problem(16, 28672, 4096): 55.57,
    Problem(64, 4096, 14336): 35.54,
    L4: 21.49,
    Problem(64, 2112, 7168): 14.75,
    Problem(128, 24576, 1536): 24.54,
    Problem(128, 32768, 512): 13.21,
    Problem(128, 7168, 2048): 10.59,
    Problem(1, 129280, 7168): 408.09,
    D9: 28.37,
    D10: 180.55,
    S1: 24.57,
    Problem(3000, 5000, 1000): 56.45,
    Problem(16, 8192, 8192): 33.13,
    Problem(1, 8192, 8192): 33.47,
}


@pytest.mark.parametrize("problem", CUBLAS, ids=str)
def test_the_best_prediction_is_near_what_a_good_library_reaches(problem: Problem) -> None:
    """The fastest ranked config is predicted within a factor of 1.5 of cuBLAS, either way."""
    best = min(_predicted(problem, config) for config in _ranked(problem))
    assert 1 / 1.55 < best / CUBLAS[problem] < 1.5


@pytest.mark.parametrize("problem", [T1, Problem(16, 28672, 4096)], ids=str)
def test_the_list_is_not_one_cut_in_many_schedules(problem: Problem) -> None:
    """Of sixteen kernels three quarters cut up the work in ways of their own; there are several families."""
    configs = rank(Query(SPACE, problem, 132), LIMIT, variants=0)
    knobs = ("tile_shape_mn", "tile_k", "cluster_shape_mn", "swap_ab", "stream_k")
    ways = {(*(config[knob] for knob in knobs), config["split_k"] > 1) for config in configs}
    assert len(configs) >= LIMIT and len(ways) >= LIMIT * 3 // 4
    assert len({config["tile_shape_mn"] for config in configs}) >= 4
    assert {config["pingpong"] for config in configs} == {False, True}


def test_fixed_values_restrict_everything() -> None:
    """With values fixed, each config keeps to them, and the default leads only if it does."""
    fixed: dict[str, list[Value]] = {
        "pingpong": [True],
        "tile_shape_mn": [(128, 192), (128, 128)],
        "swizzle_size": [2],
    }
    configs = rank(Query.of(SPACE, T1, 132, fixed), LIMIT)
    assert configs
    assert all(config[knob] in values for config in configs for knob, values in fixed.items())
    assert SPACE.default(T1) not in configs
    only = rank(Query.of(SPACE, S1, 132, {"split_k": [8]}), LIMIT)
    assert {config["split_k"] for config in only} == {8}


def test_bad_arguments_are_named() -> None:
    """An unknown knob or value and a limit of nothing are errors that say so."""
    with pytest.raises(ConfigError, match="unknown knob 'tile'"):
        rank(Query.of(SPACE, T1, 132, {"tile": [1]}), LIMIT)
    with pytest.raises(ConfigError, match="not in its domain"):
        rank(Query.of(SPACE, T1, 132, {"split_k": [9999]}), LIMIT)
    with pytest.raises(UsageError, match="at least 1"):
        rank(Query(SPACE, T1, 132), 0)


def _results(problem: Problem, count: int = 6) -> dict[Config, float | None]:
    return {c: _predicted(problem, c) * 1.1 for c in _ranked(problem)[:count]}


@pytest.mark.parametrize("problem", [T1, S1, L1, D10], ids=str)
def test_refinement_proposes_untried_legal_neighbours(problem: Problem) -> None:
    """Proposals are legal, new, without repeats, within the limit, and the same every time."""
    results = _results(problem)
    proposed = refine(Query(SPACE, problem, 132), results, 8)
    assert proposed == refine(Query(SPACE, problem, 132), results, 8)
    assert proposed and not set(proposed) & set(results)
    assert len(set(proposed)) == len(proposed)
    assert all(not SPACE.explain(problem, config) for config in proposed)
    assert len(_views(proposed) - _views(list(results))) <= 8
    assert len(proposed) <= 16


def _around(problem: Problem, config: Config, limit: int = 400) -> list[Config]:
    return refine(Query(SPACE, problem, 132), {config: 100.0}, limit)


def _differences(a: Config, b: Config) -> set[str]:
    return {knob for knob in a if a[knob] != b[knob]}


def test_refinement_takes_every_kind_of_step() -> None:
    """A cooperative kernel gets other tiles, clusters, walks, stores, and pingpong with its warpgroups."""
    start = SPACE.default(T1)
    around = _around(T1, start)
    steps = [_differences(start, config) for config in around]
    for knob in ("cluster_shape_mn", "swizzle_size", "raster_along_m", "use_tma_store"):
        assert {knob} in steps
    tiles = {config["tile_shape_mn"] for config in around}
    assert {(128, 248), (256, 128)} <= tiles
    middle = start.replace(tile_shape_mn=(128, 128), pingpong=False)
    turned = [c for c in _around(T1, middle) if c["pingpong"]]
    assert turned and all(_differences(middle, c) == {"pingpong", "mma_warpgroups"} for c in turned)


def test_refinement_steps_the_split() -> None:
    """Around a split kernel its neighbours in the domain of split_k are proposed; they build nothing."""
    start = next(c for c in _ranked(S1) if c["split_k"] != 1)
    domain = SPACE.domains["split_k"]
    at = domain.index(start["split_k"])
    proposed = {c["split_k"] for c in _around(S1, start) if _differences(start, c) == {"split_k"}}
    assert proposed == {domain[at - 1], domain[at + 1]}


def test_a_neighbour_splits_as_its_own_tiles_ask() -> None:
    """A wider tile that leaves fewer of them is tried with more parts too, not only with its parent's."""
    start = SPACE.default(S1).replace(
        tile_shape_mn=(64, 128), mma_warpgroups=1, cluster_shape_mn=(4, 1), use_tma_store=False, split_k=13
    )
    SPACE.require(S1, start)
    wider = [c for c in _around(S1, start) if c["tile_shape_mn"] == (64, 136)]
    assert {c["split_k"] for c in wider} >= {13, 15}


def test_refinement_starts_from_the_fastest() -> None:
    """Neighbours of a slow config are not proposed while faster ones have untried neighbours."""
    fast, slow = SPACE.default(T1), SPACE.default(T1).replace(tile_shape_mn=(64, 64), mma_warpgroups=1)
    results: dict[Config, float | None] = {fast: 200.0, slow: 900.0}
    proposed = refine(Query(SPACE, T1, 132), results, 8)
    assert proposed and all(len(_differences(fast, c)) <= 2 for c in proposed)


def test_refinement_does_not_retry_failures() -> None:
    """A kernel that failed is not proposed again with other run-time arguments."""
    good = SPACE.default(T1)
    bad = good.replace(cluster_shape_mn=(1, 2), swizzle_size=1)
    proposed = refine(Query(SPACE, T1, 132), {good: 200.0, bad: None}, 400)
    assert SPACE.compile_view(bad) not in _views(proposed)
    assert refine(Query(SPACE, T1, 132), {bad: None}, 8) == []


def test_refinement_keeps_to_fixed_values() -> None:
    """Knobs that the caller fixed do not move."""
    start = SPACE.default(T1)
    fixed = {"tile_shape_mn": [(128, 256)], "swizzle_size": [8]}
    proposed = refine(Query.of(SPACE, T1, 132, fixed), {start: 200.0}, 50)
    assert proposed
    assert {c["tile_shape_mn"] for c in proposed} == {(128, 256)}
    assert {c["swizzle_size"] for c in proposed} == {8}


def test_refinement_around_a_default_outside_the_fixed_splits() -> None:
    """The default competes whatever is fixed; one that splits k has neighbours, none of which is proposed
    with a split that is not among the fixed ones."""
    start = default_config(SPACE, S1)
    assert start["split_k"] != 1
    best = rank(Query.of(SPACE, S1, 132, {"split_k": [1]}), 4)
    results: dict[Config, float | None] = {start: 10.0, **dict.fromkeys(best, 11.0)}
    proposed = refine(Query.of(SPACE, S1, 132, {"split_k": [1]}), results, 8)
    assert proposed and {config["split_k"] for config in proposed} == {1}


@pytest.mark.parametrize(("new_kernels", "room"), [(True, 16), (False, 32)])
def test_the_walk_over_tiles_is_varied_of_more_kernels_than_refinement_starts_from(
    new_kernels: bool, room: int
) -> None:
    """A kernel in eighth place may be the best rasterized along the other axis, which costs no
    compilation: that is tried of as many as there is room for, with wider and narrower bands, the fastest
    first."""
    ranked = rank(Query(SPACE, T2, 132), 20)
    firsts = {SPACE.compile_view(config): config for config in reversed(ranked)}
    order = [config for config in ranked if firsts[SPACE.compile_view(config)] == config]
    results: dict[Config, float | None] = {config: 5.0 + i / 1000 for i, config in enumerate(order)}
    found = refine(Query(SPACE, T2, 132), results, 16, new_kernels=new_kernels)
    turned = [c.replace(raster_along_m=not c["raster_along_m"]) in found for c in order]
    widths = SPACE.domains["swizzle_size"]
    steps = [2 if c["swizzle_size"] in (widths[0], widths[-1]) else 3 for c in order]
    ends = list(accumulate(steps))
    assert all(there for there, end in zip(turned, ends, strict=True) if end <= room)
    assert not any(there for there, end, own in zip(turned, ends, steps, strict=True) if end - own >= room)
    assert sum(turned) > 4


def test_a_small_list_keeps_the_cluster_variants_of_the_best_tiles() -> None:
    """Spreading over unlike kernels leaves room for twins of promising ones, clusters of two among them."""
    found = [
        config
        for config in rank(Query(SPACE, L4, 132), 32)
        if config["tile_shape_mn"] == (128, 96) and config["cluster_shape_mn"] == (2, 1)
    ]
    assert any(config["mma_warpgroups"] == 2 and not config["pingpong"] for config in found)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_without_a_compiler_refinement_varies_what_kernels_take_as_arguments(arch: str) -> None:
    """Whatever is proposed is a kernel that there is, of many of the fastest, also without a model."""
    space = find_space("gemm", find_arch(arch))
    known = survey.rank(space, T1, 132, 20)
    results: dict[Config, float | None] = {config: 10.0 + i / 100 for i, config in enumerate(known)}
    found = survey.refine(space, T1, results, 16, sm_count=132, new_kernels=False)
    assert found and not set(found) & set(known)
    varied = {space.compile_view(c) for c in found}
    assert varied <= {space.compile_view(c) for c in known}
    assert len(varied) > 8 and len(found) <= 32
    more = survey.refine(space, T1, results, 16, sm_count=132)
    assert not {space.compile_view(c) for c in more} <= {space.compile_view(c) for c in known}


@pytest.mark.parametrize(
    "fixed", [{"swizzle_size": (4,)}, {"raster_along_m": (True,), "swizzle_size": (2, 8)}]
)
def test_a_fixed_order_of_tiles_leaves_no_kernel_out(fixed: dict[str, tuple[int, ...]]) -> None:
    """The order is an argument, so the same kernels are likely, each in an order that is asked for."""
    for m in (599, 4096):
        problem = Problem(m, 2304, 4096)
        free = GemmStrategy().likely(Query(SPACE, problem, 132), 12)
        found = GemmStrategy().likely(Query.of(SPACE, problem, 132, fixed), 12)
        assert [*map(SPACE.compile_view, found)] == [*map(SPACE.compile_view, free)]
        assert all(config[knob] in values for config in found for knob, values in fixed.items())


def test_what_is_likely_everywhere_is_of_the_whole_space_and_of_the_default_candidates() -> None:
    """Half of twelve are default candidates; no two are one kernel; a tile comes twice at most."""
    problem = Problem(247, 4312, 4096)
    found = GemmStrategy().likely(Query(SPACE, problem, 132), 16, everywhere=True)
    defaults = [config for _, config in islice(kernel_set(SPACE, problem, 132).by_time(problem), 6)]
    others = [config for config in found if config not in defaults]
    assert len({SPACE.compile_view(config) for config in found}) == len(found) == 12
    assert set(defaults) < set(found) and len(others) == 6
    assert all(sum(c["tile_shape_mn"] == o["tile_shape_mn"] for c in others) <= 2 for o in others)
    times = [fitted_us(problem, config, 132) for config in found]
    assert min(times) == fitted_us(problem, others[0], 132) < 0.95 * fitted_us(problem, defaults[0], 132)
    kept = GemmStrategy().likely(Query.of(SPACE, problem, 132, {"use_pdl": (False,)}), 16, everywhere=True)
    assert kept and not any(config["use_pdl"] for config in kept)


def test_what_the_fit_puts_first_leads_and_the_physics_fills_up() -> None:
    """Of eight kernels six are the fit's, behind the default; all keep to what is fixed."""
    problem = Problem(64, 7168, 2048)
    by_fit = [config for _, config in islice(kernel_set(SPACE, problem, 132).by_time(problem), 6)]
    default = SPACE.default(problem)
    found = survey.rank(SPACE, problem, 132, 8, default=default)
    views = list(dict.fromkeys(map(SPACE.compile_view, found)))
    assert found[0] == default and found[1:7] == by_fit and len(views) == 8
    fixed = {"pingpong": (False,)}
    kept = survey.rank(SPACE, problem, 132, 8, fixed, default=default)
    assert all(config["pingpong"] is False for config in kept)
    unfitted = Problem(64, 7168, 2048, ab_dtype="e4m3")
    assert survey.rank(SPACE, unfitted, 132, 8) == rank(Query(SPACE, unfitted, 132), 8)


def test_of_many_a_third_is_what_the_fit_likes_of_all_kernels() -> None:
    """One of each way to cut up the work, behind the default kernels, among what is fixed."""
    fit, fixed = load_fit(), {"swap_ab": (False,)}
    problem = Problem(256, 6144, 4096)
    first = GemmStrategy().likely(Query(SPACE, problem, 132), 12)[:4]
    ranked = survey.rank(SPACE, problem, 132, 12, default=first[0])
    found = list(dict.fromkeys(map(SPACE.compile_view, ranked)))
    assert found[: len(first)] == [SPACE.compile_view(config) for config in first] and len(found) == 12
    more = promising(Query(SPACE, problem, 132), lambda all_of: fitted_times_us(problem, all_of, 132, fit), 4)
    assert {SPACE.compile_view(config) for config in more} <= set(found)
    defaults = {SPACE.compile_view(config) for _, config in kernel_set(SPACE, problem, 132).by_time(problem)}
    assert not defaults.issuperset(map(SPACE.compile_view, more))
    times = [fitted_us(problem, config, 132, fit) for config in more]
    assert times == sorted(times) and max(times) < 1.1 * min(times)
    assert all(not config["swap_ab"] for config in survey.rank(SPACE, problem, 132, 12, fixed))


def test_what_is_given_comes_once_behind_the_default() -> None:
    """As far as the limit goes; what is not valid is left out."""
    default, (one, two) = SPACE.default(T1), [c for c in _ranked(T1) if c != SPACE.default(T1)][:2]
    bad = one.replace(tile_shape_mn=(256, 256))
    found = rank(Query(SPACE, T1, 132), 3, default=default, first=[one, bad, default, two, one])
    assert found[0] == default and found[1] == one
    assert len({SPACE.compile_view(config) for config in found}) == 3


def test_where_power_limits_the_clock_what_loses_little_in_both_regimes_is_tried() -> None:
    """One kernel for each cluster, by ``stream_k`` where that is predicted to be faster, if it is allowed."""

    def steady(n: int, **fixed: tuple[Value, ...]) -> dict[Value, Config]:
        found = survey.rank(SPACE, Problem(4096, n, 4096), 132, 15, fixed or None)
        wide = [c for c in found if {*c.pair("tile_shape_mn")} == {128, 256} and c["mma_warpgroups"] == 2]
        return {config["cluster_shape_mn"]: config for config in wide}

    assert steady(128256).keys() >= {(2, 1), (1, 2)}
    parted = steady(28672)
    assert parted.keys() >= {(2, 1), (1, 2)} and all(config["stream_k"] for config in parted.values())
    assert steady(28672, stream_k=(False,)).keys() >= {(2, 1), (1, 2)}
    assert not any(config["swap_ab"] for config in steady(28672, swap_ab=(False,)).values())
    assert not steady(28672, cluster_shape_mn=((1, 1),)).keys() & {(2, 1), (1, 2)}
    assert not steady(64)


@pytest.mark.parametrize(
    "line",
    [
        "gated_gemm 4096x14336x4096 bf16",
        "gated_gemm 4096x14336x4096 fp16 activation=gelu pre",
        "grouped_gemm 16384x4096x7168x8 bf16",
        "grouped_gated_gemm 16384x4096x7168x8 bf16",
        "grouped_gemm_blocks 16384x4096x7168x8 e4m3",
        "gemm 4096x4096x4096 e4m3 kk",
        "gemm 4096x4096x4096 bf16 mn beta bias=n act=silu",
    ],
)
def test_large_problems_of_all_that_ask_the_model_are_ranked(line: str) -> None:
    """Their spaces lack some of the GEMM's knobs; at every effort, and where power may limit the clock."""
    problem = parse_problem(line)
    space = find_space(problem.family, SM90)
    assert is_heavy(problem)
    default = default_config(space, problem, 132)
    for limit in (15, 24):
        found = survey.rank(space, problem, 132, limit, default=default)
        assert len({space.compile_view(config) for config in found}) == limit
        assert all(space.is_valid(problem, config) for config in found)
    likely = survey.likely(space, problem, 132, 15, everywhere=True)
    assert all(space.is_valid(problem, config) for config in likely)
