"""The space engine: domains and rules in, legal configs and reasons out, on toy spaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, replace
from functools import lru_cache
from itertools import islice, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegen.arch import Arch, find_arch
from cutegen.errors import ConfigError, ProblemError, SpaceError
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Launch, Rule, Space, Value, format_value, parse_value
from cutegen.space.census import blockers, take_census
from cutegen.space.checks import Checks

ARCH = find_arch("sm_90a")
PROBLEM = Problem(64, 64, 64)
DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "size": (1, 2, 4, 8),
    "fast": (False, True),
    "shape": ((1, 1), (2, 1), (1, 2)),
}


def fast_is_small(size: int, fast: bool) -> bool:
    """fast needs size of at most 2."""
    return not fast or size <= 2


def shape_fits(size: int, shape: tuple[int, int], problem: Problem) -> bool:
    """size times shape must not be larger than the problem."""
    return size * shape[0] * 16 <= problem.m


def space_exists(arch: Arch) -> bool:
    """Only Hopper has this kernel."""
    return arch.name == "sm_90a"


def toy(rules: tuple[Callable[..., bool], ...] = (fast_is_small, shape_fits), **changes: Any) -> Space:
    """A space of three knobs, one of which is not compiled in."""
    space = Space(
        family="toy",
        arch=ARCH,
        domains=DOMAINS,
        rules=tuple(map(Rule.of, rules)),
        derive=lambda config, problem, arch: {},
        choose_default=lambda space, problem: Config({"size": 1, "fast": False, "shape": (1, 1)}),
        launch=lambda config, problem, sm_count: Launch((), 0),
        compile_view=lambda config: Config({k: v for k, v in config.items() if k != "fast"}),
        run_time_knobs=frozenset({"fast"}),
    )
    return replace(space, **changes)


def all_points(space: Space) -> list[Config]:
    return [Config(dict(zip(space.domains, v, strict=True))) for v in product(*space.domains.values())]


# --- enumeration ---


@given(st.sets(st.sampled_from(range(24))), st.integers(1, 200))
def test_the_configs_are_the_points_that_break_no_rule_in_the_order_of_the_domains(
    banned: set[int], m: int
) -> None:
    """Pruning partial configs early changes nothing."""
    points = all_points(toy())
    index = {point: i for i, point in enumerate(points)}

    def not_banned(size: int, fast: bool, shape: tuple[int, int]) -> bool:
        """This point is banned."""
        return index[Config({"size": size, "fast": fast, "shape": shape})] not in banned

    space = toy((fast_is_small, shape_fits, not_banned))
    problem = Problem(m, 64, 64)
    expected = [point for point in points if not space.explain(problem, point)]
    assert list(space.configs(problem)) == expected
    assert all(list(config) == list(space.domains) for config in space.configs(problem))


def test_configs_come_one_by_one() -> None:
    """The first config is there before the others were looked at."""
    seen: list[int] = []

    def watched(size: int) -> bool:
        """Always fine."""
        seen.append(size)
        return True

    assert next(toy((watched,)).configs(PROBLEM)) == Config({"size": 1, "fast": False, "shape": (1, 1)})
    assert seen == [1]


def test_a_partial_config_that_breaks_a_rule_is_not_completed() -> None:
    """A rule over early knobs is asked once for all the completions it cuts."""
    asked: list[int] = []

    def only_one(size: int) -> bool:
        """size must be 1."""
        asked.append(size)
        return size == 1

    assert len(list(toy((only_one,)).configs(PROBLEM))) == 6
    assert asked == [1, 2, 4, 8]


def test_a_rule_is_asked_once_for_the_same_values() -> None:
    """Other knobs multiply the configs, not its calls; another problem is another question."""
    asked: list[tuple[int, tuple[int, int], int]] = []

    def odd_one_out(size: int, shape: tuple[int, int], problem: Problem) -> bool:
        """The smallest size takes no shape but the first."""
        asked.append((size, shape, problem.m))
        return size > 1 or shape == (1, 1)

    space = toy((odd_one_out,))
    configs = list(space.configs(PROBLEM))
    assert len(asked) == len(set(asked)) < len(configs)
    assert configs == [point for point in all_points(toy()) if not space.explain(PROBLEM, point)]
    asked.clear()
    assert list(space.configs(Problem(PROBLEM.m + 1, 64, 64))) == configs
    assert {m for _, _, m in asked} == {PROBLEM.m + 1}


def test_a_rule_without_knobs_decides_for_the_whole_space() -> None:
    """A broken one leaves no config; it speaks in every explanation."""
    blackwell = toy((space_exists,), arch=find_arch("sm_100a"))
    assert list(blackwell.configs(PROBLEM)) == []
    assert [v.rule for v in blackwell.explain(PROBLEM, {})] == ["space_exists"]
    assert len(list(toy((space_exists,)).configs(PROBLEM))) == 24


def test_fixed_knobs_restrict_the_space_and_keep_their_order() -> None:
    """--set knob=v1,v2 tries v1 first."""
    found = list(toy().configs(PROBLEM, {"size": [2, 1], "fast": [True]}))
    assert [config["size"] for config in found] == [2, 2, 2, 1, 1, 1]
    assert all(config["fast"] is True for config in found)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"width": [1]}, ["'width'", "size, fast, shape"]),
        ({"size": [3]}, ["size=3", "1, 2, 4, 8"]),
        ({"size": [True]}, ["size=true"]),
        ({"fast": [1]}, ["fast=1", "false, true"]),
        ({"shape": [(2, 2)]}, ["shape=2x2", "1x1, 2x1, 1x2"]),
    ],
)
def test_unknown_knobs_and_values_are_refused_with_the_valid_ones(
    fixed: dict[str, list[Value]], words: list[str]
) -> None:
    """The same goes for fixed knobs and for a config to explain; 1 and true are different values."""
    with pytest.raises(ConfigError) as first:
        list(toy().configs(PROBLEM, fixed))
    with pytest.raises(ConfigError) as second:
        toy().explain(PROBLEM, {knob: values[0] for knob, values in fixed.items()})
    for caught in (first, second):
        assert all(word in str(caught.value) for word in words)


# --- reasons ---


def test_every_broken_rule_is_explained_by_name_and_docstring() -> None:
    """Not only the first one."""
    violations = toy().explain(PROBLEM, Config({"size": 8, "fast": True, "shape": (2, 1)}))
    assert {v.rule: v.reason for v in violations} == {
        "fast_is_small": "fast needs size of at most 2.",
        "shape_fits": "size times shape must not be larger than the problem.",
    }


def test_a_partial_config_is_judged_by_the_rules_it_is_enough_for() -> None:
    """Rules over knobs that are not there stay silent."""
    assert toy().explain(PROBLEM, {"size": 8}) == ()
    assert [v.rule for v in toy().explain(PROBLEM, {"size": 8, "fast": True})] == ["fast_is_small"]


def test_a_prepared_config_is_valid_where_nothing_is_to_explain() -> None:
    """Whatever it looks at: knobs, the problem or the target; partial configs too."""
    asked: list[int] = []

    def counted(size: int) -> bool:
        """size is below 8."""
        asked.append(size)
        return size < 8

    for rules in ((fast_is_small, shape_fits, space_exists, counted), (), (space_exists,)):
        space = toy(rules)
        problems = [Problem(m, 64, 64) for m in (16, 32, 64, 128)]
        for point in product(*DOMAINS.values()):
            config = Config(dict(zip(DOMAINS, point, strict=True)))
            for problem in problems:
                assert space.is_valid(problem, config) == (not space.explain(problem, config))
        assert space.is_valid(problems[0], Config({"fast": True}))
    space = toy((counted,))
    valid = space.prepare(Config({"size": 4}))
    asked.clear()
    assert valid(PROBLEM) and valid(PROBLEM) and not asked
    assert not toy((space_exists,), arch=find_arch("sm_100a")).is_valid(PROBLEM, Config({"size": 1}))
    with pytest.raises(ConfigError, match="size=3"):
        space.is_valid(PROBLEM, Config({"size": 3}))


def test_what_sizes_do_not_decide_is_asked_once_for_a_signature() -> None:
    """A rule that looks at what the signature holds, or at no problem; one of a size is asked every time."""
    asked: list[str] = []

    def of_dtype(size: int, problem: Problem) -> bool:
        """size is for bf16."""
        asked.append("dtype")
        return size < 8 or problem.ab_dtype == "bf16"

    def of_size(size: int, problem: Problem) -> bool:
        """size must not be larger than k."""
        asked.append("size")
        return size * 32 <= problem.k

    def of_order(fast: bool, problem: Problem) -> bool:
        """fast adds in any order, which the signature does not say."""
        return not fast or problem.any_order

    space = toy((of_dtype, of_size, of_order, fast_is_small, shape_fits, space_exists))
    problems = [
        Problem(m, 64, k, any_order=order) for m, k, order in product((16, 64), (64, 128), (False, True))
    ]
    for dtype in ("bf16", "fp16"):
        kin = [replace(problem, ab_dtype=dtype, out_dtype=dtype) for problem in problems]
        checks = Checks(space, kin[0])
        for point in product(*DOMAINS.values()):
            config = Config(dict(zip(DOMAINS, point, strict=True)))
            left = checks.left(config)
            for problem in kin:
                valid = left is not None and all(holds(problem=problem) for holds in left)
                assert valid == (not space.explain(problem, config))
    checks = Checks(space, PROBLEM)
    asked.clear()
    left = checks.left(Config({"size": 1, "fast": False, "shape": (1, 1)}))
    assert left is not None and sorted(asked) == ["dtype", "size"]
    assert all(holds(problem=PROBLEM) for holds in left) and sorted(asked) == ["dtype", "size", "size"]


def test_a_rule_that_looks_at_the_layout_is_asked_once() -> None:
    """A signature has the layout under another name, and the same for all of its problems."""
    asked = []

    def of_layout(fast: bool, problem: Problem) -> bool:
        """fast needs A along k."""
        asked.append(problem.layout)
        return not fast or problem.layout[0] == "k"

    config = Config({"size": 1, "fast": True, "shape": (1, 1)})
    for layout, left in (("kn", ()), ("mn", None)):
        checks = Checks(toy((of_layout,)), Problem(16, 64, 64, layout=layout))
        assert [checks.left(config) for _ in range(3)] == [left] * 3
    assert asked == ["kn", "mn"]


def test_rules_that_remember_what_they_make_of_a_problem_are_asked_about_each() -> None:
    """As those of gated products do, which make a GEMM of it unless it is one."""

    @lru_cache
    def half(problem: Any) -> Problem:
        assert isinstance(problem, Problem)
        return Problem(problem.m, problem.n, problem.k // 2)

    def fits(size: int, problem: Problem) -> bool:
        """size must not be larger than half of k."""
        return size * 32 <= half(problem).k

    def fits_m(size: int, problem: Problem) -> bool:
        """size must not be larger than m."""
        return size <= half(problem).m

    space = toy((fits, fits_m))
    checks = Checks(space, Problem(4, 64, 128))
    config = Config({"size": 8, "fast": False, "shape": (1, 1)})
    for m, k in product((4, 8), (64, 512)):
        problem, left = Problem(m, 64, k), checks.left(config)
        valid = left is not None and all(holds(problem=problem) for holds in left)
        assert valid == (not space.explain(problem, config)) == (m == 8 and k == 512)


def test_rules_that_look_at_a_problem_as_a_whole_are_asked_about_each() -> None:
    """Its line, or whether it is another's equal, says more than its signature."""

    def prints(size: int, problem: Problem) -> bool:
        """size is for problems of few rows."""
        return size == 1 or str(problem).startswith("gemm 4x") or f"{problem}" == ""

    def equals(fast: bool, problem: Problem) -> bool:
        """fast is for one problem."""
        return not fast or problem == Problem(4, 64, 64) or repr(problem) == ""

    checks = Checks(toy((prints, equals)), Problem(4, 64, 64))
    left = checks.left(Config({"size": 8, "fast": True, "shape": (1, 1)}))
    for m in (4, 8):
        valid = left is not None and all(holds(problem=Problem(m, 64, 64)) for holds in left)
        assert valid == (m == 4)


def test_an_incomplete_or_illegal_config_is_refused_with_everything_that_is_wrong() -> None:
    """The error carries the violations and prints them."""
    with pytest.raises(ConfigError, match="lacks fast, shape"):
        toy().require(PROBLEM, Config({"size": 1}))
    with pytest.raises(ConfigError, match="fast_is_small: fast needs size") as caught:
        toy().require(PROBLEM, Config({"size": 8, "fast": True, "shape": (1, 1)}))
    assert {v.rule for v in caught.value.violations} == {"fast_is_small", "shape_fits"}
    toy().require(PROBLEM, Config({"size": 1, "fast": True, "shape": (1, 1)}))


def test_a_default_that_breaks_a_rule_is_its_authors_mistake() -> None:
    """It is never handed out."""
    bad = toy(choose_default=lambda space, problem: Config({"size": 8, "fast": True, "shape": (1, 1)}))
    with pytest.raises(SpaceError, match="fast_is_small"):
        bad.default(PROBLEM)
    assert toy().default(PROBLEM) == Config({"size": 1, "fast": False, "shape": (1, 1)})


def test_a_problem_that_no_config_computes_is_nobodys_mistake() -> None:
    """The default breaks a rule there, as everything does; the rule says what is wrong with the problem."""
    with pytest.raises(ProblemError, match=r"cannot be computed on sm_90a: shape_fits: size times shape"):
        toy().default(Problem(8, 64, 64))


def test_rules_that_stand_in_the_way_are_named() -> None:
    """Not those that the default happens to break, which others keep."""

    def size_is_large(size: int, problem: Problem) -> bool:
        """size must be 8 for so few rows."""
        return size == 8

    def size_fits(size: int, problem: Problem) -> bool:
        """size must be at most 4 for so few columns."""
        return size <= 4

    def size_is_two(size: int, problem: Problem) -> bool:
        """size must be 2 for such a k."""
        return size == 2

    def not_so(problem: Problem) -> bool:
        """No size is fine."""
        return False

    large, fits = (
        f"{rule.__name__}: {' '.join((rule.__doc__ or '').split())}" for rule in (size_is_large, size_fits)
    )
    start = f"{PROBLEM} cannot be computed on sm_90a: "
    for rules, why in (
        ((size_fits, size_is_two, size_is_large), large),
        ((size_is_large, size_fits), f"no config keeps all of {large}; {fits}"),
        ((size_is_large, not_so), "not_so: No size is fine."),
    ):
        with pytest.raises(ProblemError) as caught:
            toy(rules).default(PROBLEM)
        assert str(caught.value) == start + why


@pytest.mark.parametrize("missing", [None, "", "   \n  "])
def test_a_rule_without_a_reason_is_refused(missing: str | None) -> None:
    """The docstring is what users read."""

    def silent(size: int) -> bool:
        return True

    silent.__doc__ = missing
    with pytest.raises(SpaceError, match="silent"):
        Rule.of(silent)


def test_a_rule_says_what_it_looks_at() -> None:
    """Parameters are knobs, except the problem and the architecture; a reason is one line."""

    def wide(size: int, problem: Problem, arch: Arch) -> bool:
        """One
        line."""
        return True

    rule = Rule.of(wide)
    assert (rule.name, rule.reason) == ("wide", "One line.")
    assert (rule.knobs, rule.context) == (("size",), ("problem", "arch"))


def test_a_badly_declared_space_is_refused() -> None:
    """Empty domains, repeated values and rules over knobs that do not exist are found at once."""
    with pytest.raises(SpaceError, match="size"):
        toy((), domains={"size": ()})
    with pytest.raises(SpaceError, match="size"):
        toy((), domains={"size": (1, 2, 1)})
    with pytest.raises(SpaceError, match=r"fast_is_small.*fast"):
        toy((fast_is_small,), domains={"size": (1, 2)})


# --- neighbours, ties, lint, census ---


def test_neighbours_are_legal_and_one_step_away_in_one_knob() -> None:
    """Integers move to the next value of their domain, other knobs to any other value."""
    config = Config({"size": 2, "fast": True, "shape": (1, 1)})
    assert set(toy().neighbours(PROBLEM, config)) == {
        config.replace(size=1),
        config.replace(fast=False),
        config.replace(shape=(2, 1)),
        config.replace(shape=(1, 2)),
    }


def test_earlier_values_are_simpler() -> None:
    """Ties go to the config whose values come first in the domains, knob by knob."""
    space = toy()
    assert sorted(all_points(space), key=space.simplicity) == all_points(space)


def test_the_lint_reports_exactly_the_values_that_no_legal_config_uses() -> None:
    """A value counts as used if any of the problems uses it."""
    small, large = Problem(16, 64, 64), Problem(1000, 64, 64)
    assert toy().unreachable([small]) == (("shape", (2, 1)), ("size", 2), ("size", 4), ("size", 8))
    assert toy().unreachable([small, large]) == ()


def test_a_census_counts_what_enumeration_finds() -> None:
    """Configs, kernels, raw points, and the uses of each value."""
    census = take_census(toy(), PROBLEM)
    configs = list(toy().configs(PROBLEM))
    assert (census.legal, census.raw) == (len(configs), 24)
    assert census.classes == len({(config["size"], config["shape"]) for config in configs})
    assert census.used["size"][2] == sum(config["size"] == 2 for config in configs)
    assert take_census(toy(), PROBLEM, {"size": [2]}).legal == census.used["size"][2]


def test_blockers_name_the_rules_that_stand_in_the_way() -> None:
    """No single rule forbids the value, but together they leave nothing."""
    found = blockers(toy(), Problem(16, 64, 64), {"size": [8]})
    assert found[0][0].rule == "shape_fits" and found[0][1] == found[0][2]
    assert blockers(toy(), PROBLEM, {"size": [1]}) == ()


# --- configs ---

VALUES = (
    st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.lists(st.integers(0, 999), min_size=2, max_size=3).map(tuple)
    | st.sampled_from(["fixed", "arrival"])
)
CONFIGS = st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True), VALUES, max_size=5).map(Config)


@given(VALUES)
def test_a_value_is_written_so_that_it_reads_back(value: Value) -> None:
    """Type included: 1 is not true."""
    again = parse_value(format_value(value))
    assert again == value and type(again) is type(value)


@given(CONFIGS)
def test_a_config_survives_its_line_and_its_json(config: Config) -> None:
    """Both forms parse back to an equal config with an equal hash and digest."""
    for again in (Config.parse(str(config)), Config.from_json(config.to_json())):
        assert again == config and hash(again) == hash(config) and again.digest == config.digest


@given(CONFIGS)
def test_the_order_of_knobs_does_not_matter(config: Config) -> None:
    """Equal configs hash alike and are called alike."""
    backwards = Config(dict(reversed(list(config.items()))))
    assert backwards == config and hash(backwards) == hash(config) and backwards.digest == config.digest


def test_a_config_is_a_mapping_that_cannot_change() -> None:
    """replace makes another one."""
    config = Config({"size": 1})
    assert config.replace(size=2) == Config({"size": 2}) and config["size"] == 1
    assert config != {"size": 1} and repr(config) == "Config(size=1)"
    with pytest.raises((TypeError, FrozenInstanceError)):
        config["size"] = 2  # type: ignore[index]


def test_a_knob_is_read_as_what_it_should_be() -> None:
    """A value of another type is refused with the knob, what it holds and what would be valid."""
    config = Config({"size": 2, "shape": (2, 1), "fast": False})
    assert (config.integer("size"), config.pair("shape"), config.flag("fast")) == (2, (2, 1), False)
    for read, knob, message in (
        (config.integer, "fast", "fast=False is not an integer"),
        (config.pair, "size", "size=2 is not a pair of integers such as 2x1"),
        (config.flag, "shape", r"shape=\(2, 1\) is neither true nor false"),
        (config.replace(shape=(2, 1, 1)).pair, "shape", r"shape=\(2, 1, 1\) is not a pair"),
        (config.replace(size="2").integer, "size", "size='2' is not an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(knob)


@pytest.mark.parametrize("text", ["size", "=1", "size=", "size=1 size=2"])
def test_a_malformed_config_line_is_refused(text: str) -> None:
    """The word is quoted."""
    with pytest.raises(ConfigError, match=text.split("=")[0] or "=1"):
        Config.parse(text)


@pytest.mark.parametrize("value", ["9" * 5000, "-" + "9" * 5000, "2x" + "9" * 5000, "9" * 21], ids=len)
def test_a_number_that_no_knob_holds_is_refused_by_its_length(value: str) -> None:
    """Python would refuse to convert some of them; the message is about a line long."""
    for act in (lambda: parse_value(value), lambda: Config.parse(f"size={value}")):
        with pytest.raises(ConfigError, match="no knob has more than 20") as caught:
            act()
        assert len(str(caught.value)) < 250
    assert parse_value("9" * 20) == 10**20 - 1


@pytest.mark.parametrize("value", [1.5, None, {"a": 1}, [1, "x"], [1.0]])
def test_json_that_is_no_config_is_refused(value: Any) -> None:
    """Knobs hold booleans, integers, words and lists of integers."""
    with pytest.raises(ConfigError, match="size"):
        Config.from_json({"size": value})


def test_words_and_commas_separate_knobs() -> None:
    """Both are what people type."""
    assert Config.parse("a=1,b=2x1 c=true") == Config({"a": 1, "b": (2, 1), "c": True})
    assert list(islice(Config.parse("b=1 a=2"), 2)) == ["b", "a"]


def test_rules_keep_a_reason_without_docstrings() -> None:
    """``python -OO`` strips them; the names of rules stand in their place."""
    code = (
        "from cutegen.arch import find_arch; from cutegen.families.registry import find_space; "
        "print(find_space('softmax', find_arch('sm_90a')).rules[0].reason)"
    )
    run = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert " " in run.stdout.strip() and "_" not in run.stdout
