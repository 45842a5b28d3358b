"""Laws of tools/sweep_products.py that need no GPU."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_kernels import H200

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure import CheckResult
from cutegen.space import Config
from tools import sweep_products
from tools.benchmark.model_products import KINDS


class FakeBench:
    """Every kernel takes 2 us and the library 3; those of 128 rows are wrong."""

    def __enter__(self) -> FakeBench:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self) -> None:
        """Nothing to start."""

    def open(self, problem: Problem) -> None:
        """Nothing to open."""

    def check(self, candidate: Any, repeats: int) -> CheckResult:
        """Compare nothing."""
        wrong = candidate.config.pair("tile_shape_mn")[0] == 128
        return CheckResult("wrong_result", "off by 1") if wrong else CheckResult("ok")

    def time(self, candidates: Sequence[Any], policy: object) -> Any:
        """Time nothing."""

        class Run(dict[str, Any]):
            reference = SimpleNamespace(reference="torch.mm", median_us=3.0)

        return Run({candidate.name: SimpleNamespace(ratio=1.5) for candidate in candidates})


def _candidate(kernels: object, device: object, name: str, problem: Problem, config: Config) -> Any:
    return SimpleNamespace(name=name, config=config, shared_object=Path(str(config)))


class FakeCompilation:
    """Compiles nothing."""

    def __init__(self, *asked: object) -> None:
        pass

    def begin(self) -> None:
        """Nothing to begin."""

    def finish(self) -> None:
        """Nothing to wait for."""


def test_right_kernels_are_timed_on_products_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong ones are named once and left out; times are what the library takes by the ratio."""
    for name, fake in (("present_device", lambda: H200), ("Bench", FakeBench)):
        monkeypatch.setattr(sweep_products, name, fake)
    monkeypatch.setattr(sweep_products, "Compilation", FakeCompilation)
    monkeypatch.setattr(sweep_products, "compiled_candidate", _candidate)
    out = tmp_path / "products.json.xz"
    words = ["--out", str(out), "--count", "50", "--seed", "2", "--commit", "0" * 40]
    assert sweep_products.main(words) == 0
    found = json.loads(lzma.decompress(out.read_bytes()))
    kinds = [row["kind"] for row in found["rows"]]
    assert set(kinds) <= set(KINDS) and len(set(kinds)) >= 6 and 40 < kinds.count("bf16 kk") <= 50
    space = find_space("gemm", find_arch("sm_90a"))
    for row in found["rows"]:
        problem = Problem.parse(row["problem"])
        assert row["reference_us"] == 3.0 and len(row["points"]) <= 9
        for point in row["points"]:
            config = Config.parse(point["config"])
            space.require(problem, config)
            assert point["us"] == 2.0 and config.pair("tile_shape_mn")[0] != 128
    said = capsys.readouterr().err.splitlines()
    assert len(said) > 10 and all("off by 1" in line for line in said)


def test_first_kernels_run_in_both_orders_where_both_axes_have_several_tiles() -> None:
    space = find_space("gemm", find_arch("sm_90a"))
    problem = Problem(512, 1024, 512)
    config = space.default(problem).replace(tile_shape_mn=(128, 128), cluster_shape_mn=(1, 1))
    [other] = sweep_products.reordered(
        space, problem, 132, [config, config.replace(tile_shape_mn=(128, 256), cluster_shape_mn=(4, 1))]
    )
    assert other == config.replace(raster_along_m=not config["raster_along_m"])


def test_every_order_is_asked_of_kernels_that_have_several() -> None:
    """Each once, of one wave and of several, and none of one row of tiles."""
    space = find_space("gemm", find_arch("sm_90a"))
    problem = Problem(4096, 4096, 512)
    config = space.default(problem).replace(tile_shape_mn=(128, 128), cluster_shape_mn=(1, 1))
    for asked in (problem, Problem(512, 1024, 512)):
        others = sweep_products.every_order(space, asked, 132, [config])
        orders = {(c["swizzle_size"], c["raster_along_m"]) for c in [config, *others]}
        assert len(orders) == len(others) + 1 == 8
    assert not sweep_products.every_order(space, Problem(128, 1024, 512), 132, [config])


def test_a_plan_says_what_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of products drawn at random."""
    for name, fake in (("present_device", lambda: H200), ("Bench", FakeBench)):
        monkeypatch.setattr(sweep_products, name, fake)
    monkeypatch.setattr(sweep_products, "Compilation", FakeCompilation)
    monkeypatch.setattr(sweep_products, "compiled_candidate", _candidate)
    problem = Problem.parse("gemm 296x4096x512 bf16 mk")
    default = find_space("gemm", find_arch("sm_90a")).default(problem)
    config = default.replace(tile_shape_mn=(64, 128), mma_warpgroups=1)
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text(json.dumps([[str(problem), [str(config)]]]))
    words = ["--out", str(out), "--plan", str(plan), "--commit", "0" * 40]
    assert sweep_products.main([*words, "--dry-run"]) == 0 and not out.exists()
    assert capsys.readouterr().out.startswith("1 products, 1 points")
    assert sweep_products.main(words) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert (row["kind"], row["problem"]) == ("bf16 mk", str(problem))
    assert row["points"] == [{"config": str(config), "us": 2.0}]


def test_a_dry_run_says_how_much_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And writes nothing."""
    words = ["--out", str(tmp_path / "out.json"), "--count", "20", "--dry-run"]
    assert sweep_products.main(words) == 0 and not list(tmp_path.iterdir())
    assert " products, " in capsys.readouterr().out
