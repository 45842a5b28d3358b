"""Which sizes and configs of a range are tried, and what is concluded for the sizes between."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.arch import find_arch
from cutegen.errors import ConfigError
from cutegen.families.gemm.problem import Problem
from cutegen.families.ranges import Range, parse_range
from cutegen.families.registry import find_family, find_space
from cutegen.search import parallel_rank
from cutegen.search.defaults import default_config, predictor
from cutegen.search.parallel_rank import rank_algorithms, rank_all
from cutegen.search.range_model import Estimates
from cutegen.search.range_plan import (
    Cell,
    cells_of,
    contenders,
    few_configs,
    first_sizes,
    most_disputed,
    most_doubtful,
    ready_first,
    settle,
    shortlist,
)
from cutegen.search.range_predict import Predictions, unproven
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
A, B, C = (Config({"tile_shape_mn": (tile, 64), "split_k": 1}) for tile in (64, 128, 192))


# --- sizes ---


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 30_000), st.sampled_from(["kk", "mn"]))
def test_cells_cover_a_range_without_gap_or_overlap(first: int, more: int, layout: str) -> None:
    """A size of each, with as many steps of tiles as its largest, stands for it; none spans more than 2 %."""
    step = 8 if layout == "mn" else 1
    low, high = -(-first // step) * step, -(-(first + more) // step) * step
    if low == high:
        return
    cells = cells_of(Range(Problem(low, 64, 64, layout=layout), Problem(high, 64, 64, layout=layout)))
    assert (cells[0].first, cells[-1].size, cells[-1].last) == (low, high, high)
    assert all(after.first == before.last + 1 for before, after in pairwise(cells))
    assert all(cell.size % step == 0 and cell.first <= cell.size <= cell.last for cell in cells)
    assert all(-(-cell.size // 8) == -(-cell.last // 8) for cell in cells)
    assert all(cell.last - cell.first < max(8, cell.last // 32) + step for cell in cells)
    assert sum(cell.weight for cell in cells) == pytest.approx(log2((high + 1) / low))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 120), st.integers(9, 100_000))
def test_first_sizes_are_spread_evenly_in_doublings(count: int, last: int) -> None:
    """Both ends, increasing, about as many as asked for, and no two cells in one."""
    cells = cells_of(Range(Problem(1, 64, 64), Problem(last, 64, 64)))
    sizes = first_sizes(cells, count)
    assert sizes == sorted(set(sizes)) and set(sizes) <= {cell.size for cell in cells}
    assert (sizes[0], sizes[-1]) == (1, last)
    assert len(sizes) <= max(count, 2)
    assert len(sizes) >= min(count, len(cells)) - 2


# --- estimates ---


def estimates(tile: int = 64) -> Estimates:
    """A model that says: 10 us and a hundredth for each row, for every config; C is valid up to 512."""
    return Estimates(
        lambda size, config: None if config == C and size > 512 else 10 + size / 100, lambda config: tile
    )


def test_a_measurement_counts_as_it_is_at_its_size() -> None:
    """And an estimate without any is the prediction."""
    known = estimates()
    nothing = known.estimate(100, A)
    assert nothing is not None and (nothing.time_us, nothing.sureness) == (pytest.approx(11), 0)
    known.learn(100, {A: 13.0})
    assert known.estimate(100, A) == (13.0, 1.0)
    assert known.estimate(600, C) is None


def test_an_error_is_carried_to_sizes_nearby_and_fades() -> None:
    """The config that ran longer than predicted is expected to; far away less, and less surely."""
    known = estimates(tile=10_000)
    known.learn(256, {A: 2 * (10 + 2.56), B: 10 + 2.56})
    near, far, other = known.estimate(260, A), known.estimate(4096, A), known.estimate(260, B)
    assert near and far and other
    assert near.time_us / (10 + 2.6) > 1.7 > far.time_us / (10 + 40.96) > 1.0
    assert other.time_us / (10 + 2.6) < 1.15
    assert near.sureness > 0.7 > far.sureness
    assert near.hopeful_us < near.time_us < near.cautious_us
    assert log(far.cautious_us / far.hopeful_us) > log(near.cautious_us / near.hopeful_us)


def test_a_new_tile_makes_another_config_of_it() -> None:
    """What was learnt with one tile tells little of two."""
    known = estimates(tile=256)
    known.learn(250, {A: 2 * 12.5})
    same, more = known.estimate(256, A), known.estimate(257, A)
    assert same and more and same.sureness > 2 * more.sureness


def test_alike_configs_learn_from_each_other() -> None:
    """A config that was never measured takes most from the one that differs in fewer knobs."""
    known = estimates()
    alike, unlike = A.replace(split_k=2), Config({"tile_shape_mn": (8, 8), "split_k": 7})
    known.learn(100, {A: 22.0, unlike: 11.0})
    found = known.estimate(100, alike)
    assert found is not None and 11 * exp(0.5 * log(2)) < found.time_us < 22


def test_sizes_in_doubt_are_those_with_rivals_between_far_neighbours() -> None:
    """Where everything is measured there is none."""
    cells = cells_of(Range(Problem(1, 64, 64), Problem(4096, 64, 64)))
    known = estimates()
    for size in (1, 8, 64, 128, 4096):
        known.learn(size, {A: 10.0, B: 10.1})
    [found] = most_doubtful(known, cells, lambda size: [A, B], 1)
    assert 128 < found < 4096
    assert most_doubtful(known, cells, lambda size: [A, B], 3)[0] == found
    few = [Cell(1, 1, 1, 1.0), Cell(2, 64, 64, 1.0)]
    known = estimates()
    for size in (1, 64):
        known.learn(size, {A: 10.0})
    assert most_doubtful(known, few, lambda size: [A], 5) == []


def test_sizes_that_wait_for_nothing_come_first() -> None:
    """Of the next few, asked about anew each time; where none is ready the order stays."""
    assert list(ready_first([1, 8, 4], lambda size: size == 4, 2)) == [1, 4, 8]
    assert list(ready_first([1, 8, 4], lambda size: False, 3)) == [1, 8, 4]
    ready: set[int] = set()
    found: list[int] = []
    for size in ready_first([1, 8, 4, 2, 64], lambda size: size in ready, 3):
        found.append(size)
        ready.add(2)
    assert found == [1, 2, 8, 4, 64]


def test_disputed_sizes_lie_where_the_baseline_takes_over() -> None:
    """The widest and steepest change first; none where all sizes around agree, or nothing is in between."""
    cells = cells_of(Range(Problem(1, 64, 64), Problem(4096, 64, 64)))
    ratios = {64: 1.1, 128: 1.05, 256: 0.9, 512: 0.95, 1024: 1.0, 1032: 0.9, 4096: 0.98}
    first, second = most_disputed(ratios, cells, 0.99, 5)
    assert 128 < first < 256 and 512 < second < 1024
    assert most_disputed(ratios, cells, 0.99, 1) == [first]
    assert most_disputed(dict.fromkeys(ratios, 1.1), cells, 0.99, 5) == []


def test_contenders_are_the_promising_few_of_many_kernels() -> None:
    """The fastest by hopeful estimates, at most two of a kernel, those that are valid."""
    known = estimates()
    variants = [A.replace(split_k=split) for split in (1, 2, 3, 4)]
    known.learn(256, {**dict.fromkeys(variants, 5.0), B: 9.0})
    chosen = contenders(
        known, 1024, [*variants, B, C], 3, kernel_of=lambda config: Config({"tile": config["tile_shape_mn"]})
    )
    assert len(chosen) == 3 and chosen[2] == B and set(chosen[:2]) < set(variants)


def test_the_shortlist_leaves_a_good_choice_at_all_sizes() -> None:
    """First what all sizes can use, then what helps most somewhere; equals where one alone is in doubt."""
    times = {1: {A: 10.0, B: 10.1}, 8: {A: 10.0, C: 9.9}, 64: {A: 12.0, C: 20.0, B: 10.0}}
    assert shortlist(times, 1) == [A]
    assert set(shortlist(times, 2)) == {A, B}
    assert set(shortlist(times, 9)) == {A, B, C}
    assert set(shortlist({1: {A: 10.0, B: 10.1}, 8: {A: 10.0, C: 14.0}}, 2)) == {A, B}
    assert shortlist({1: {}}, 3) == []


# --- answers ---


def test_few_configs_are_kept_and_each_is_worth_it() -> None:
    """One that is nowhere much better is dropped; one that alone serves a cell stays."""
    times = [{A: 10.0, B: 9.9999}, {A: 10.0, B: 10.0}, {A: 10.0, B: 20.0}]
    assert few_configs(times, [1.0, 1.0, 1.0]) == [A]
    assert set(few_configs([*times, {C: 50.0}], [1.0] * 4)) == {A, C}
    assert set(few_configs([{A: 1.0, B: 2.0}, {A: 2.0, B: 1.0}], [1.0, 1.0])) == {A, B}
    assert set(few_configs([{A: 1.0}] * 999 + [{A: 1.03, B: 1.0}], [1.0] * 1000)) == {A, B}


def test_equals_do_not_take_turns() -> None:
    """The answer stays what it was while nothing is better by more than noise."""
    times = [{A: 10.0, B: 10.01}, {A: 10.01, B: 10.0}, {A: 11.0, B: 10.0}, {A: 10.0, B: 10.02}, {C: 3.0}]
    assert settle(times) == [A, A, B, B, C]


# --- the model at every size ---


def test_predictions_know_validity_tiles_and_families_without_a_model() -> None:
    """None where a config breaks a rule; bytes where there is no model; swapped tiles lie the other way."""
    whole = parse_range("gemm 1..20000x512x512 bf16 kk")
    predict = Predictions(whole, SPACE, 132)
    swapped = next(c for c in SPACE.configs(Problem(64, 512, 512), {"swap_ab": [True]}))
    assert (
        predict(64, swapped) is not None and predict(20000, swapped) is None and predict(0, swapped) is None
    )
    plain = swapped.replace(swap_ab=False)
    assert (predict.tile_of(plain), predict.tile_of(swapped)) == swapped.pair("tile_shape_mn")
    along_n = Predictions(parse_range("gemm 64x512..1024x512 bf16 kn"), SPACE, 132)
    assert (along_n.tile_of(swapped), along_n.tile_of(plain)) == swapped.pair("tile_shape_mn")
    rows = parse_range("rmsnorm 1..4096x512 bf16")
    space = find_space("rmsnorm", ARCH)
    bytes_of = Predictions(rows, space, 132)
    config = space.default(rows.low)
    found = rows.at(100)
    assert found is not None and bytes_of(100, config) == found.min_bytes and bytes_of.tile_of(config) == 1
    assert find_family("rmsnorm").strategy(ARCH) is None


# --- many problems at once ---


def test_children_rank_as_this_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Knobs that are fixed reach them, pairs among them."""
    problems = [Problem(m, 512, 256) for m in (16, 64, 256)]
    fixed = {"tile_k": (64,), "cluster_shape_mn": ((1, 1), (2, 1))}
    expected = {p: rank_algorithms(SPACE, p, 132, 3, fixed) for p in problems}
    assert rank_all(problems, ARCH, 132, 3, fixed, workers=2) == expected
    monkeypatch.setattr(parallel_rank, "_ask", lambda share, asked: {})
    assert rank_all(problems[:2], ARCH, 132, 3, fixed, workers=2) == {p: expected[p] for p in problems[:2]}


def test_every_algorithm_that_computes_a_problem_proposes() -> None:
    """Kernels for few rows at one row, none at many, none where a knob is fixed that they lack."""
    few, many = Problem(1, 4096, 1024), Problem(512, 4096, 1024)
    assert {c.algorithm for c in rank_algorithms(SPACE, few, 132, 4)} == {"", "few_rows"}
    assert {c.algorithm for c in rank_algorithms(SPACE, many, 132, 4)} == {""}
    assert {c.algorithm for c in rank_algorithms(SPACE, few, 132, 4, {"tile_k": (64,)})} == {""}


def test_errors_of_children_are_seen() -> None:
    """A knob that does not exist is named, though a child stumbled over it first."""
    with pytest.raises(ConfigError, match="colour"):
        rank_all([Problem(m, 64, 64) for m in (16, 64, 128)], ARCH, 132, 3, {"colour": (1,)}, workers=2)


# --- kernels that the model knows well ---


def test_half_of_what_is_measured_is_proven_even_if_others_look_faster() -> None:
    """And all places are taken: by others where too few are proven."""
    tiles = [Config({"tile_shape_mn": (64, 8 * n), "split_k": 1}) for n in range(1, 9)]
    known = Estimates(lambda size, config: 10.0 + tiles.index(config), lambda config: 64)
    proven = set(tiles[5:])
    found = contenders(known, 64, tiles, 4, kernel_of=lambda c: c, is_proven=proven.__contains__)
    assert found == [tiles[0], tiles[1], tiles[5], tiles[6]]
    assert contenders(known, 64, tiles, 4, kernel_of=lambda c: c, is_proven=lambda c: False) == tiles[:4]


def test_a_second_config_of_a_kernel_waits_for_other_kernels_that_are_about_as_fast() -> None:
    """Of equally promising ones the first is taken."""
    known = Estimates(lambda size, config: {A: 10.0, B: 10.2, C: 12.0}.get(config, 10.0), lambda config: 64)
    twin = A.replace(split_k=2)
    found = contenders(known, 64, [twin, A, B, C], 4, kernel_of=lambda c: c.replace(split_k=1))
    assert found == [twin, B, A, C]


def test_kernels_are_added_to_those_chosen_before() -> None:
    """What they cover is not covered twice."""
    times = {1: {A: 10.0, B: 10.0, C: 20.0}, 2: {A: 10.0, B: 10.0, C: 9.0}}
    assert shortlist(times, 1) in ([A], [B])
    assert shortlist(times, 1, [A]) == [C]
    assert set(shortlist(times, 5, [A])) == {B, C}


def test_kernels_that_answer_by_default_are_proven_and_others_predicted_with_care() -> None:
    """With use_pdl or without, split or not; another tile is predicted to take longer than the model says."""
    whole = parse_range("gemm 1..512x4096x4096 bf16 kk")
    predict = Predictions(whole, SPACE, 132)
    problem = Problem(256, 4096, 4096)
    default = default_config(SPACE, problem, 132)
    other = SPACE.default(problem).replace(tile_shape_mn=(64, 168))
    assert SPACE.is_valid(problem, other)
    assert predict.is_proven(default) and predict.is_proven(default.replace(use_pdl=not default["use_pdl"]))
    assert not predict.is_proven(other)
    model = predictor(SPACE, problem, 132)
    assert model is not None
    assert predict(256, default) == model(default)
    us, bold = predict(256, other), model(other)
    assert us is not None and bold is not None and us == pytest.approx(bold * exp(unproven(256)))
    assert unproven(1) == unproven(256) > unproven(300) > unproven(512) == unproven(8192) > 0
