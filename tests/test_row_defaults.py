"""Defaults of kernels over rows by what they are expected to take, beside what an H200 took."""

from __future__ import annotations

import pytest

from cutegen.arch import find_arch
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure.statistics import geometric_mean
from cutegen.space import Config, Space
from spaces.row.expected import microseconds
from tools import fit_rows

ARCH = find_arch("sm_90a")
OPTIONS = {"cross_entropy": " gradient"}
#: Back to back 40 values for each thread take a third longer there than 32; behind another kernel up to 3 %,
#: of 1 to 6 rows of 70128 and 176463 elements (docs/results/untuned_rows_457.json).
OVERLAPPED = {"softmax 5x147240 bf16"}


@pytest.mark.parametrize("family", fit_rows.FAMILIES)
def test_defaults_are_near_the_best_that_was_tried(family: str) -> None:
    """Without the short list, wherever the default was timed; and that is most of the problems. Back to back
    short kernels also differ in how they overlap the next launch of themselves."""
    space = find_space(family, ARCH)
    timed = fit_rows.measured(family)
    found: dict[bool, list[float]] = {True: [], False: []}
    for problem, kernels, _, behind in timed:
        default = space.default(problem)
        own = [kernel.us for kernel in kernels if _is_timed(space, problem, kernel.config, default)]
        ratios = [min(kernel.us for kernel in kernels) / us for us in own]
        if str(problem) in OVERLAPPED:
            assert not behind and all(0.75 < ratio <= 0.76 for ratio in ratios)
        else:
            found[behind] += ratios
    both = [*found[True], *found[False]]
    assert len(both) >= len(timed) / 3 and geometric_mean(both) > 0.975
    assert len(found[True]) >= 100 and min(found[True]) > 0.85, sorted(found[True])[:5]
    assert min(found[False]) > 0.76, sorted(found[False])[:5]


@pytest.mark.parametrize(("rows", "at_a_time"), [(1, 2), (8, 2), (9, 1)])
def test_a_warp_takes_few_short_rows_two_at_a_time(rows: int, at_a_time: int) -> None:
    """LayerNorm of 144 elements: 1, 3 and 7 rows take 7 to 20 % less so, 272 rows 4 % more."""
    space = find_space("layernorm", ARCH)
    assert space.default(parse_problem(f"layernorm {rows}x144 bf16"))["rows_per_thread"] == at_a_time


@pytest.mark.parametrize(
    ("rows", "threads", "at_a_time"), [(8448, 16, 1), (8449, 16, 2), (16896, 16, 2), (16897, 8, 1)]
)
def test_half_a_warp_takes_two_of_many_short_rows(rows: int, threads: int, at_a_time: int) -> None:
    """LayerNorm of 152 and 168 elements: 9536 and 12083 rows take 11 and 15 % less so, 27201 as long."""
    found = find_space("layernorm", ARCH).default(parse_problem(f"layernorm {rows}x168 bf16"))
    assert (found["threads_per_row"], found["rows_per_thread"]) == (threads, at_a_time)


@pytest.mark.parametrize(
    "line",
    [
        "rmsnorm 134217728x262144 bf16",
        "rmsnorm 915592029x50920 fp16 weight=none",
        "cross_entropy 1958910548x18704 bf16 gradient smoothing",
    ],
)
def test_so_many_rows_that_the_usual_clusters_are_too_many_have_a_default(line: str) -> None:
    """Fewer CTAs share a row there, however little that suits it."""
    problem = parse_problem(line)
    space = find_space(problem.family, ARCH)
    space.require(problem, space.default(problem))


def _is_timed(space: Space, problem: Problem, config: Config, default: Config) -> bool:
    """Whether the time of a config is that of the default, or of one that differs in when the next may start,
    unless that changes how many CTAs must find room."""
    alike = config.replace(pdl=default["pdl"]) == default
    both = [space.derive(each, problem, ARCH)["min_blocks"] for each in (config, default)]
    return alike and both[0] == both[1]


@pytest.mark.parametrize("family", fit_rows.FAMILIES)
@pytest.mark.parametrize("n", [64, 1183, 4096, 20000, 131_072])
def test_more_rows_never_take_less(family: str, n: int) -> None:
    terms = fit_rows.shipped(family)
    space = find_space(family, ARCH)
    problems = [
        parse_problem(f"{family} {m}x{n} bf16{OPTIONS.get(family, '')}") for m in (1, 100, 1000, 5000)
    ]
    for config in space.configs(problems[0], {"pdl": ["off"]}):
        times = [microseconds(fit_rows.counted(space, problem, config), terms) for problem in problems]
        assert times == sorted(times) and times[0] > 0


def test_a_fit_is_no_worse_than_where_it_begins() -> None:
    timed = fit_rows.measured("rmsnorm_quantized")[:6]
    terms = fit_rows.fitted(timed, 40, 1)
    known = fit_rows.table(timed)
    assert fit_rows.error(terms, known) < fit_rows.error(fit_rows.START, known)
    assert fit_rows.fitted(timed, 40, 1) == terms


def test_rows_of_fp8_count_since_they_are_written_by_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lines are those of problems that were read element by element when older records were made."""

    def widths() -> set[int]:
        fit_rows.measured.cache_clear()
        return {each.problem.sizes["n"] % 16 for each in fit_rows.measured("rmsnorm_quantized")}

    old = [row for row in fit_rows._records("rmsnorm_quantized") if not row.by_eight]
    monkeypatch.setattr(fit_rows, "_records", lambda family: old)
    assert 0 in widths() and 8 not in widths()
    monkeypatch.setattr(fit_rows, "_records", lambda family: [row._replace(by_eight=True) for row in old])
    assert 8 in widths()
    fit_rows.measured.cache_clear()


def test_other_families_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_rows.main(["rmsnorm"]) != 0
    assert "valid: cross_entropy" in capsys.readouterr().err
