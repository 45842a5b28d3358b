"""The spaces that ship: defaults, rules and derived quantities of every kernel family on every target."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jinja2.meta import find_referenced_templates

from cutegen.arch import ARCHES, Arch
from cutegen.errors import ConfigError, ProblemError, ResourceError
from cutegen.families.gemm.family import GemmFamily
from cutegen.families.gemm.problem import LARGEST_SIZE, Problem
from cutegen.families.registry import families, find_family, find_space, find_template
from cutegen.families.resources import resource_root
from cutegen.space import Config, Rule, Space, Value
from cutegen.tuning.request import deciding_files
from tools.bringup_parts.random_problems import FAR, random_config, random_of, random_pairs


def shipped() -> list[Space]:
    """Every family on every target that it has a template for."""
    found = []
    for family in families():
        for arch in ARCHES.values():
            try:
                found.append(find_space(family, arch))
            except ResourceError:
                continue
    return found


SPACES = shipped()
GEMM_SPACES = [space for space in SPACES if space.family.startswith("gemm")]
HOPPER = find_space("gemm", ARCHES["sm_90a"])
each_space = pytest.mark.parametrize("space", SPACES, ids=lambda space: f"{space.family}-{space.arch}")


def alike() -> list[list[Space]]:
    """The spaces by family, knobs and rules: those of several targets then differ in limits only."""
    found: dict[object, list[Space]] = {}
    for space in SPACES:
        rules = tuple(rule.name for rule in space.rules)
        found.setdefault((space.family, tuple(space.domains.items()), rules), []).append(space)
    return list(found.values())


#: Where examples are drawn, the target is drawn with each.
each_kind = pytest.mark.parametrize(
    "spaces", alike(), ids=lambda spaces: "-".join([spaces[0].family, *(str(each.arch) for each in spaces)])
)
#: Seeded by Hypothesis. It need not follow each draw, of which a config takes hundreds.
GENERATORS = st.randoms(use_true_random=True)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
REPRESENTATIVE = [
    Problem(4096, 4096, 4096),
    Problem(512, 4096, 8192, any_order=True),
    Problem(64, 512, 65536),
    Problem(512, 512, 8192, ab_dtype="int8"),
]


def plain(space: Space, sizes: str) -> Any:
    """The simplest problem of a space's family, of as many of the sizes as it has."""
    family = find_family(space.family)
    if len(family.sizes) > 3 and not isinstance(family, GemmFamily):  # which depend on each other
        return family.typical()[0]
    most = 3 if isinstance(family, GemmFamily) else len(family.sizes)
    return family.problem(family.parse_shape("x".join(sizes.split("x")[:most])), {})


def parsed(line: str, words: str) -> tuple[Problem, Config]:
    """A problem, and its default config with some knobs changed."""
    problem = Problem.parse(line)
    return problem, HOPPER.choose_default(HOPPER, problem).replace(**Config.parse(words))


# --- what is promised of every space ---


def test_the_families_of_this_version_are_there() -> None:
    """GEMM has a space and a template for Hopper."""
    assert HOPPER in SPACES
    assert find_template("gemm", HOPPER.arch).is_file()


@each_kind
@given(GENERATORS)
@relaxed
def test_the_default_is_legal_for_every_problem(spaces: list[Space], generator: Random) -> None:
    """Any dtype, layout, epilogue, batch and alignment; the output may be a terabyte, but not more.

    A problem that no config computes is refused with the rule that says so.
    """
    space = generator.choice(spaces)
    problem = random_of(space, generator, FAR)
    assume(problem.min_bytes <= 2**42)
    refusals = space.explain(problem, {})
    if refusals:
        with pytest.raises(ProblemError, match=f"{space.arch}: {refusals[0].rule}: "):
            space.default(problem)
        assert next(space.configs(problem), None) is None
        return
    default = space.default(problem)
    assert list(default) == list(space.domains)
    space.require(problem, default)


@each_kind
@given(GENERATORS)
@relaxed
def test_every_config_that_a_space_yields_is_legal_by_its_own_rules(
    spaces: list[Space], generator: Random
) -> None:
    """Enumeration and explanation agree."""
    space = generator.choice(spaces)
    problem = random_of(space, generator)
    assume(not space.explain(problem, {}))
    config = random_config(space, problem, generator)
    assert config is not None
    some = {knob: [value] for knob, value in config.items() if generator.random() < 0.5}
    for found in islice(space.configs(problem, some), 50):
        assert space.explain(problem, found) == ()
        assert all(found[knob] == values[0] for knob, values in some.items())


@each_kind
@given(GENERATORS)
@settings(relaxed, max_examples=50)  # each looks at dozens of configs
def test_neighbours_are_legal_and_differ_in_one_knob(spaces: list[Space], generator: Random) -> None:
    """Whatever the start."""
    space = generator.choice(spaces)
    problem = random_of(space, generator)
    assume(not space.explain(problem, {}))
    config = random_config(space, problem, generator)
    assert config is not None
    found = list(space.neighbours(problem, config))
    assert len(set(found)) == len(found)
    for other in found:
        assert sum(other[knob] != config[knob] for knob in config) == 1
        assert space.explain(problem, other) == ()


SIZES = "512x4096x8192"
ENUMERATIONS = """
import hashlib, itertools, sys
from cutegen.arch import find_arch
from cutegen.families.registry import find_space, parse_problem
for line in sys.stdin:
    family, arch, problem = line.rstrip("\\n").split("\\t")
    space = find_space(family, find_arch(arch))
    configs = itertools.islice(space.configs(parse_problem(problem)), 0, 20000, 50)
    print(hashlib.sha256("".join(map(str, configs)).encode()).hexdigest())
"""


@cache
def enumerated_elsewhere() -> dict[Space, str]:
    """A digest of what each space enumerates in one process, which hashes differently."""
    lines = (f"{space.family}\t{space.arch.name}\t{plain(space, SIZES)}\n" for space in SPACES)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ENUMERATIONS]
    done = subprocess.run(
        command, input="".join(lines), capture_output=True, text=True, check=True, env=environment
    )
    return dict(zip(SPACES, done.stdout.split(), strict=True))


@each_space
def test_enumeration_is_the_same_every_time_and_in_every_process(space: Space) -> None:
    """The order does not hang on hashing, so a tie is broken the same way everywhere."""
    configs = islice(space.configs(plain(space, SIZES)), 0, 20000, 50)
    here = hashlib.sha256("".join(map(str, configs)).encode()).hexdigest()
    assert enumerated_elsewhere()[space] == here


@each_space
def test_enumeration_looks_at_little_more_than_it_yields(space: Space) -> None:
    """Rules cut partial configs: the work is a few questions per config, not the product of the domains."""
    asked = 0

    def counted(rule: Rule) -> Rule:
        def holds(**arguments: object) -> bool:
            nonlocal asked
            asked += 1
            return rule.holds(**arguments)

        return replace(rule, holds=holds)

    watched = replace(space, rules=tuple(map(counted, space.rules)))
    found = sum(1 for _ in islice(watched.configs(plain(space, "4096x4096x4096")), 40000))
    everything = math.prod(map(len, space.domains.values()))
    assert found > 1000 or everything < 60000
    assert asked < len(space.rules) * (found if found > 1000 else everything // 4)


@each_space
def test_every_rule_has_a_reason_of_its_own(space: Space) -> None:
    """A whole sentence that no other rule gives."""
    reasons = [rule.reason for rule in space.rules]
    assert len(set(reasons)) == len(reasons) == len({rule.name for rule in space.rules})
    assert [reason for reason in reasons if len(reason) < 40 or not reason.endswith(".")] == []


@pytest.mark.parametrize("space", GEMM_SPACES, ids=lambda space: f"{space.family}-{space.arch}")
def test_no_extent_is_rounded_up_past_2_to_31(space: Space) -> None:
    """Whatever tile and cluster a config has: one more row, column or element along k is refused.

    Coordinates past 2**31 turn negative, and a store that asks whether its row is inside D would take place.
    """
    knob = "mma_tiler_mn" if "mma_tiler_mn" in space.domains else "tile_shape_mn"
    for axis in (0, 1):
        tile, cluster = (
            max(value[axis] for value in space.domains[name] if isinstance(value, tuple))
            for name in (knob, "cluster_shape_mn")
        )
        assert LARGEST_SIZE + tile * cluster - 1 < 2**31
    small = plain(space, "64x64x64")
    for name in "mnk":
        above = replace(small, **{name: 2**31 - 2048})
        assert space.explain(above, {}), name
        with pytest.raises(ProblemError, match="cannot be computed on"):
            space.default(above)
    if space.family == "gemm":
        assert all(space.default(replace(small, **{name: LARGEST_SIZE})) for name in "mnk")


# --- the rules of Hopper GEMM ---

#: Problems and configs that break exactly one rule each.
ONLY: dict[str, tuple[str, str]] = {
    "tf32_is_for_blackwell": (
        "gemm 4096x4096x4096 tf32 kk",
        "tile_k=64 tile_shape_mn=64x64 mma_warpgroups=1",
    ),
    "warpgroups_divide_tile": ("gemm 4096x4096x4096 bf16 kk", "tile_shape_mn=192x128 mma_warpgroups=2"),
    "tile_k_is_one_or_two_swizzle_rows": ("gemm 512x512x8192 e4m3 kk", "tile_k=64"),
    "int8_tiles_have_widths_of_the_mma": ("gemm 512x512x8192 int8 kk", "tile_shape_mn=64x40"),
    "accumulators_fit_registers": ("gemm 4096x4096x4096 bf16 kk", "tile_shape_mn=256x208"),
    "single_stores_leave_registers": ("gemm 4096x4097x4096 bf16 kk", "tile_shape_mn=256x184"),
    "pingpong_has_one_warpgroup_per_tile": ("gemm 4096x4096x4096 bf16 kk", "pingpong=true"),
    "stages_fit_shared_memory": (
        "gemm 512x4096x4096 bf16 kk out=fp32",
        "tile_shape_mn=192x64 tile_k=128 mma_warpgroups=3",
    ),
    "wide_k_is_for_small_tiles": ("gemm 64x4096x4096 bf16 kk", "tile_shape_mn=64x200 tile_k=128"),
    "tma_store_needs_aligned_output": ("gemm 4096x4097x4096 bf16 kk", "use_tma_store=true"),
    "swap_ab_is_for_narrow_m": ("gemm 6152x4096x4096 bf16 kk", "swap_ab=true"),
    "split_k_leaves_work": ("gemm 64x512x4096 bf16 kk", "use_tma_store=false split_k=17"),
    "split_k_stores_partial_sums": ("gemm 64x512x4096 bf16 kk", "split_k=2"),
    "split_k_has_no_pingpong": (
        "gemm 64x512x4096 bf16 kk",
        "use_tma_store=false split_k=2 pingpong=true mma_warpgroups=1",
    ),
    "split_k_workspace_is_bounded": (
        "gemm 2048x4096x65536 bf16 kk",
        "tile_shape_mn=128x256 use_tma_store=false split_k=9",
    ),
    "arrival_order_is_asked_for": (
        "gemm 64x512x4096 bf16 kk",
        "use_tma_store=false split_k=2 reduction=arrival",
    ),
    "arrival_order_is_for_split_k": ("gemm 64x512x4096 bf16 kk any_order", "reduction=arrival"),
    "stream_k_is_whole": (
        "gemm 4096x4608x4096 bf16 kk",
        "tile_shape_mn=256x128 cluster_shape_mn=1x1 stream_k=true use_tma_store=false split_k=2",
    ),
    "stream_k_has_a_partial_wave": ("gemm 512x4096x4096 bf16 kk", "stream_k=true"),
    "split_k_is_for_few_tiles": (
        "gemm 512x4096x4096 bf16 kk",
        "tile_shape_mn=64x16 mma_warpgroups=1 use_tma_store=false split_k=2",
    ),
    "cluster_is_no_larger_than_problem": (
        "gemm 64x4096x4096 bf16 kk",
        "tile_shape_mn=64x64 cluster_shape_mn=1x2",
    ),
    "tile_counts_fit_32_bits": ("gemm 2147479552x2147479552x64 bf16 kk", ""),
    "sizes_round_up_below_2_to_31": ("gemm 2147479553x8x64 bf16 kk", ""),
}


def test_every_rule_has_an_example_that_it_alone_rejects() -> None:
    """No rule is dead, and none repeats another."""
    assert set(ONLY) == {rule.name for rule in HOPPER.rules}


@pytest.mark.parametrize("name", ONLY)
def test_a_rule_alone_rejects_its_example(name: str) -> None:
    """The example breaks that rule and nothing else, and the refusal says why."""
    problem, config = parsed(*ONLY[name])
    assert [v.rule for v in HOPPER.explain(problem, config)] == [name]
    reason = next(rule.reason for rule in HOPPER.rules if rule.name == name)
    with pytest.raises(ConfigError) as caught:
        HOPPER.require(problem, config)
    assert f"{name}: {reason}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gemm 4096x4096x4096 bf16 kk", "tile_shape_mn=256x200"),
        ("gemm 4096x4097x4096 bf16 kk", "tile_shape_mn=256x176"),
        ("gemm 512x512x8192 int8 kk", "tile_shape_mn=64x24"),
        ("gemm 512x4096x4096 bf16 kk", "swap_ab=true"),
        ("gemm 64x512x4096 bf16 kk", "use_tma_store=false split_k=16"),
        ("gemm 2048x4096x65536 bf16 kk", "tile_shape_mn=128x256 use_tma_store=false split_k=8"),
        ("gemm 64x512x4096 bf16 kk any_order", "use_tma_store=false split_k=2 reduction=arrival"),
        ("gemm 4096x4608x4096 bf16 kk", "tile_shape_mn=256x128 cluster_shape_mn=1x1 stream_k=true"),
    ],
)
def test_limits_are_reached(line: str, words: str) -> None:
    """One step inside the limits of the examples above, configs are legal."""
    problem, config = parsed(line, words)
    assert HOPPER.explain(problem, config) == ()


def test_the_only_values_out_of_reach_are_tiles_that_no_registers_hold() -> None:
    """They stay in the domain so that asking for 256x256 is answered with the reason."""
    unreachable = HOPPER.unreachable(REPRESENTATIVE)
    assert {knob for knob, _ in unreachable} == {"tile_shape_mn"}
    for _, tile in unreachable:
        for warpgroups in HOPPER.domains["mma_warpgroups"]:
            partial = {"tile_shape_mn": tile, "mma_warpgroups": warpgroups}
            broken = {v.rule for v in HOPPER.explain(REPRESENTATIVE[0], partial)}
            assert broken & {"accumulators_fit_registers", "warpgroups_divide_tile"}
    assert ("tile_shape_mn", (256, 256)) in unreachable
    assert ("tile_shape_mn", (256, 200)) not in unreachable


# --- what follows from a config ---


def number(value: Value) -> int:
    assert type(value) is int
    return value


@each_kind
def test_derived_quantities_obey_the_limits_of_the_target(spaces: list[Space]) -> None:
    """Shared memory, threads, and at least three stages for every legal config of a GEMM."""
    for seed, space in enumerate(spaces, 1):
        for problem, config in random_pairs(space, seed, count=300 // len(spaces), per_problem=4):
            derived = space.derive(config, problem, space.arch)
            assert number(derived["smem_bytes"]) <= space.arch.smem_bytes
            assert number({**config, **derived}["threads"]) <= space.arch.threads_per_block
            assert space not in GEMM_SPACES or number(derived["stages"]) >= 3
            assert not derived.keys() & config.keys()


def test_registers_never_ask_for_more_than_a_block_owns() -> None:
    """setmaxnreg.inc would wait for ever: the warpgroups together must stay within the entry allocation."""
    arch = HOPPER.arch
    for problem, config in random_pairs(HOPPER, seed=2, count=200, per_problem=2):
        derived = HOPPER.derive(config, problem, arch)
        load, mma, threads = (number(derived[name]) for name in ("reg_load", "reg_mma", "threads"))
        if not mma:
            assert load == 0 and 2 * threads * 128 <= arch.registers  # all of 255 for everyone
            continue
        entry = arch.registers // threads // 8 * 8
        assert 128 * load + (threads - 128) * mma <= entry * threads
        for registers in (load, mma):
            assert registers % 8 == 0 and 24 <= registers <= 256
        assert load <= entry <= mma
        assert number(derived["acc_registers"]) * (2 if problem.promote else 1) <= mma - 32


def test_barriers_fit_the_memory_that_is_set_aside_for_them() -> None:
    """Two mbarriers of 8 bytes per stage in the 1024 bytes before the first tile."""
    for problem, config in random_pairs(HOPPER, seed=3, count=200):
        assert number(HOPPER.derive(config, problem, HOPPER.arch)["stages"]) * 16 <= 1024


def test_a_launch_has_small_integers_and_a_workspace_only_where_parts_meet() -> None:
    """Scalars are 32-bit and positive where the kernel divides by them; no more clusters than fit."""
    for problem, config in random_pairs(HOPPER, seed=4, count=300, per_problem=3):
        for sm_count in (1, 78, 114, 132):
            launch = HOPPER.launch(config, problem, sm_count)
            assert all(type(scalar) is int and 0 <= scalar < 2**31 for scalar in launch.scalars)
            clusters, swizzle = launch.scalars[:2]
            blocks = int.__mul__(*config["cluster_shape_mn"])  # type: ignore[misc]
            assert swizzle >= 1 and 1 <= clusters <= max(1, sm_count // blocks)
            parts = config["split_k"] != 1 or config["stream_k"] is True
            assert (launch.workspace_bytes > 0) == parts == (len(launch.scalars) == 4)
            assert launch.zeroed == (config["reduction"] == "arrival")
            assert launch.workspace_bytes % 4 == 0


def test_configs_of_one_kernel_differ_in_run_time_knobs_only() -> None:
    """The compiled view keeps every other knob, and is its own view."""
    kept = [knob for knob in HOPPER.domains if knob not in HOPPER.run_time_knobs]
    for _, config in random_pairs(HOPPER, seed=5, count=100):
        view = HOPPER.compile_view(config)
        assert all(view[knob] == config[knob] for knob in kept)
        assert HOPPER.compile_view(view) == view


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_what_a_space_takes_from_another_family_counts_as_its_own(family: str, arch: Arch) -> None:
    """What is imported by a space or a template is in files that name a tuning run, so a change of it is a
    new question."""
    try:
        space = find_space(family, arch)
    except ResourceError:
        return
    files = {*deciding_files(family, arch, ("cutegen",))}
    functions = [rule.holds for rule in space.rules]
    functions += [space.derive, space.launch, space.compile_view, space.choose_default]
    whole = [getattr(function, "func", function) for function in functions]  # of those with values filled in
    assert {Path(inspect.getfile(function)) for function in whole} <= files
    assert referenced(find_template(family, arch), resource_root("templates")) <= files


def referenced(template: Path, root: Path) -> set[Path]:
    """The templates that ``template`` extends, includes or imports, and those that they do."""
    found: set[Path] = set()
    for name in find_referenced_templates(jinja2.Environment().parse(template.read_text())):
        assert name is not None
        found |= {root / name} | referenced(root / name, root)
    return found


def test_rules_read_nothing_but_their_parameters() -> None:
    """No rule looks at a variable that could change: names are parameters, functions or constants."""
    for rule in HOPPER.rules:
        function: Callable[..., bool] = rule.holds
        module = inspect.getmodule(function)
        assert module is not None
        names = {n.id for n in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(n, ast.Name)}
        loose = {
            name
            for name in names
            if name in vars(module) and not (name.isupper() or callable(vars(module)[name]))
        }
        assert loose == set(), rule.name
