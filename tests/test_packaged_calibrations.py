"""What the package knows of GPUs beside the H200: who gets it, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_kernels import H200

from cutegen.arch import find_arch
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gated_gemm.gated_fit import GatedFit, load_gated_fit
from cutegen.families.gated_gemm.plain_gemm import plain_gemm
from cutegen.families.gemm.perf_model.few_rows import FewRowsEstimator
from cutegen.families.gemm.perf_model.fitted import fit_of, has_slow_memory, read_fit
from cutegen.families.gemm.perf_model.kernel_set import default_kernels
from cutegen.families.gemm.perf_model.packaged import packaged_calibration, packaged_path
from cutegen.families.gemm.perf_model.torch_mm import load_torch_mm, read_torch_mm, torch_mm_us
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space, find_spaces, parse_problem
from cutegen.measure.statistics import geometric_mean
from cutegen.records.calibrations import calibrated_arch, packaged_arch, require_calibration
from cutegen.records.paths import calibration_path
from cutegen.search.defaults import default_config, predictor
from cutegen.space import Config, as_integer
from tools.fit_gemm import read_products
from tools.fit_hopper import PRODUCTS

H100 = replace(H200, name="NVIDIA H100 80GB HBM3")
ARCH = packaged_arch(H100)
SPACE = find_space("gemm", ARCH)


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H800"]
)
def test_gpus_of_the_line_of_the_h100_share_its_calibration(name: str) -> None:
    found = packaged_calibration(name)
    assert found is not None and found == packaged_calibration(H100.name)
    assert packaged_arch(replace(H100, name=name)) is ARCH


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA B200"])
def test_others_follow_the_main_product(name: str) -> None:
    device = replace(H200, name=name)
    assert packaged_path(name) is None and packaged_arch(device) is device.arch


def test_a_calibration_of_the_user_comes_before_the_package(tmp_path: Path) -> None:
    """And the package again if that one is of another driver, with a warning."""
    assert calibrated_arch(tmp_path, H100) is ARCH
    shipped = packaged_path(H100.name)
    assert shipped is not None
    own = json.loads(shipped.read_text())
    own["rates"]["memory"] = 0.5
    path = calibration_path(tmp_path, H100)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(own))
    assert fit_of(calibrated_arch(tmp_path, H100)).rates.memory == 0.5
    own["made_on"]["cuda_driver"] = "12.0"
    path.write_text(json.dumps(own))
    assert calibrated_arch(tmp_path, H100) is ARCH


def test_the_file_is_one_that_a_calibration_writes() -> None:
    """So it is also what ``calibrate --use`` takes, and says where it comes from."""
    path = packaged_path(H100.name)
    assert path is not None
    require_calibration(path, replace(H100, sm_count=132, cuda_driver_version="13.0"))
    fit = read_fit(path)
    assert fit.rates.memory < 0.8 and fit.provenance["gpu"] == H100.name
    regret = fit.provenance["regret"]
    assert regret["trees"]["first"] < 0.012 and 1.4 * regret["trees"]["first"] < regret["shipped"]["first"]
    assert read_torch_mm(path).trees is not load_torch_mm().trees


def test_it_tells_what_products_took_that_were_recorded_there() -> None:
    """The H200's fit is 8 % off in the mean, and chooses kernels that are further behind the best."""
    rows = read_products(PRODUCTS[-1:])
    regret: dict[str, list[float]] = {"own": [], "h200": []}
    off: dict[str, list[float]] = {"own": [], "h200": []}
    for row in rows:
        problem, points = row["problem"], dict(row["points"])
        for name, arch in (("own", ARCH), ("h200", find_arch("sm_90a"))):
            predict = predictor(find_space("gemm", arch), problem, 132, list(points))
            chosen = min(points, key=lambda config: predict(config) or math.inf)
            regret[name].append(points[chosen] / min(points.values()))
            took = torch_mm_us(problem, arch, 132)
            assert took is not None
            off[name].append(max(row["reference_us"] / took, took / row["reference_us"]))
    means = {name: geometric_mean(values) for name, values in regret.items()}
    assert means["own"] < 1.009 < 1.01 < means["h200"]
    assert geometric_mean(off["own"]) < 1.05 < 1.1 < geometric_mean(off["h200"])


def test_kernels_of_few_rows_take_longer_where_memory_is_slower() -> None:
    """A large matrix nearly by the ratio of the rates, and a small one less."""
    space = next(each for each in find_spaces("gemm", ARCH) if each.algorithm == "few_rows")

    def longer(problem: Problem) -> float:
        config = next(Config(dict(knobs)) for knobs in space.default_candidates(problem))
        registers = as_integer(space.derive(config, problem, ARCH)["registers"])
        here, there = (
            FewRowsEstimator(problem, arch, 132).time_us(config, registers)
            for arch in (ARCH, find_arch("sm_90a"))
        )
        return here / there

    slower = 1 / fit_of(ARCH).rates.memory
    assert longer(Problem(1, 57344, 8192)) == pytest.approx(slower, rel=0.05)
    assert 1.0 < longer(Problem(1, 1024, 2048)) < 0.85 * slower


def test_slow_memory_brings_candidates_whose_clusters_share_more() -> None:
    """Of GEMMs alone, and only where a calibration says so."""
    plain, problem = find_space("gemm", find_arch("sm_90a")), Problem(512, 4096, 4096)
    assert has_slow_memory(ARCH) and not has_slow_memory(find_arch("sm_90a"))
    ours, theirs = (default_kernels(space, problem) for space in (SPACE, plain))
    assert ours[: len(theirs)] == theirs and 20 < len(ours) - len(theirs) < 40
    fours = [c for c in ours[len(theirs) :] if math.prod(c.pair("cluster_shape_mn")) == 4]
    assert len(fours) >= 12 and len(set(ours)) == len(ours)
    for line in ("gated_gemm 512x4096x4096", "grouped_gemm 512x4096x4096x8"):
        asked = parse_problem(line)
        assert [*find_space(asked.family, ARCH).default_candidates(asked)] == [
            *find_space(asked.family, find_arch("sm_90a")).default_candidates(asked)
        ]


def _gated(name: str) -> Iterator[tuple[DeclaredProblem, dict[Config, float]]]:
    """Yield gated GEMMs of a results file, and microseconds of kernels with tensor cores."""
    path = PRODUCTS[0].with_name(f"{name}.json")
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        problem = parse_problem(row["problem"])
        times = {Config.parse(text): us for text, us in row["times"].items()}
        assert isinstance(problem, DeclaredProblem)
        yield problem, {config: us for config, us in times.items() if not config.algorithm}


@pytest.mark.parametrize("name", ["untuned_products_141", "untuned_products_155"])
def test_choices_among_timed_gated_gemms_are_near_the_fastest(name: str) -> None:
    """The fit knows these times; what it loses on others, its provenance tells."""
    space, fit, lost = find_space("gated_gemm", ARCH), load_gated_fit(), []
    for problem, times in _gated(name):
        configs = [*times]
        predict = predictor(space, problem, 132, configs)
        assert predict is not None
        slower = fit.slower(plain_gemm(problem), configs, ARCH, 132)
        own = [(predict(config) or math.inf) * by for config, by in zip(configs, slower, strict=True)]
        lost.append(min(times.values()) / times[configs[own.index(min(own))]])
    assert len(lost) > 30 and geometric_mean(lost) > 0.98 and min(lost) > 0.9
    known = fit.provenance["fastest_over_chosen"]
    assert known[f"{name}.json"]["trees_left_out"]["geometric_mean"] > 0.97
    left_out = known["all"]
    assert left_out["trees_left_out"]["geometric_mean"] > left_out["equal_groups"]["geometric_mean"] + 0.003


def test_gated_gemms_are_chosen_by_their_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse_problem("gated_gemm 700x2000x3000 bf16")
    spaces = [find_space("gated_gemm", arch) for arch in (ARCH, find_arch("sm_90a"))]
    before = [default_config(space, problem, 132) for space in spaces]
    trees = load_gated_fit().trees
    against = GatedFit({}, replace(trees, leaves=-20 * trees.leaves))
    monkeypatch.setattr("cutegen.families.gated_gemm.strategy.load_gated_fit", lambda: against)
    after = [default_config(space, problem, 132) for space in spaces]
    assert after[0] != before[0] and after[1] != before[1]


def test_few_rows_of_small_gates_need_no_tensor_cores() -> None:
    """On four rows, where CTAs of many threads leave most multiprocessors idle."""
    problem = parse_problem("gated_gemm 4x624x1152 bf16")
    config = default_config(find_space("gated_gemm", ARCH), problem, 132)
    assert config.algorithm == "few_rows" and config["threads_per_cta"] == 128
