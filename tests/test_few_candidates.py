"""Few candidates of a benchmark: which they are, and that they are compiled beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.build import Builder
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.families.registry import find_space
from cutegen.search.defaults import default_config
from tests.rmsnorm_problem import rows
from tools import bench_family
from tools.benchmark.few_candidates import most_like_default

ARCH = find_arch("sm_90a")
SPACE = find_space("rmsnorm", ARCH)


@pytest.mark.parametrize("problem", [rows(16384, 4096), rows(1, 7), rows(1024, 131072)])
def test_the_default_leads_and_the_others_are_valid(problem: object) -> None:
    found = most_like_default(SPACE, problem, 132, 12)  # type: ignore[arg-type]
    assert found[0] == default_config(SPACE, problem, 132)  # type: ignore[arg-type]
    assert 1 < len(found) <= 12 and len({*found}) == len(found)
    assert not any(SPACE.explain(problem, config) for config in found)  # type: ignore[arg-type]


def test_a_step_in_one_knob_comes_before_steps_in_two() -> None:
    found = most_like_default(SPACE, rows(16384, 4096), 132, 6)
    changed = [sum(config[knob] != found[0][knob] for knob in config) for config in found]
    assert changed == [0, 1, 1, 1, 1, 1]
    assert found[1]["threads_per_row"] == 160 and found[0]["threads_per_row"] == 192


def test_one_candidate_is_the_default() -> None:
    problem = rows(64, 4096)
    assert most_like_default(SPACE, problem, 132, 1) == [default_config(SPACE, problem, 132)]


def test_candidates_are_compiled_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes, cache = tmp_path / "some.toml", tmp_path / "cache"
    cache.mkdir(mode=0o700)
    shapes.write_text('[[shape]]\nid = "one"\nm = 64\nn = 512\n', encoding="utf-8")
    words = f"rmsnorm --shapes {shapes} --candidates 2 --compile-for sm_90a --cache-dir {cache}"
    assert bench_family.main(words.split()) == 0
    assert "2 kernels for sm_90a" in capsys.readouterr().out
    with Builder(Store(cache)) as builder:
        for config in most_like_default(SPACE, rows(64, 512), ARCH.nominal_sm_count, 2):
            assert builder.find(render(rows(64, 512), config, ARCH)) is not None


@pytest.mark.parametrize(
    ("words", "missing"),
    [("--compile-for sm_90a", "--candidates and --cache-dir"), ("", "--out is missing")],
)
def test_what_is_missing_is_named(words: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_family.main(f"rmsnorm --shapes tools/shapes/rmsnorm.toml {words}".split()) == 2
    assert missing in capsys.readouterr().err


def test_where_there_are_few_configs_all_are_tried() -> None:
    """Also those that differ from the default in more than two knobs."""
    problem = rows(8, 8)
    every = set(SPACE.configs(problem))
    found = most_like_default(SPACE, problem, 132, len(every))
    assert set(found) == every and len(found) == len(every)
    assert found[0] == default_config(SPACE, problem, 132)


def test_fixed_knobs_keep_their_values_beside_the_default() -> None:
    problem = rows(16384, 4096)
    default, *others = most_like_default(SPACE, problem, 132, 8, {"pdl": ["late"]})
    assert default == default_config(SPACE, problem, 132) and default["pdl"] != "late"
    assert others and {config["pdl"] for config in others} == {"late"}
