"""Calibration on a pretended GPU: what is fitted, what is refused, what is continued, and who reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fake_engine import DEVICE
from fake_tuning import TOOLCHAIN, FakeBench, FakeCompiler

from cutegen.arch import find_arch
from cutegen.build.store import Store
from cutegen.cli import calibrate as cli
from cutegen.errors import DeviceError, StoreError
from cutegen.families.gemm.perf_model.blackwell import estimator_of
from cutegen.families.gemm.perf_model.boosting import Boosting
from cutegen.families.gemm.perf_model.fitted import Fit, fitted_us, load_fit, read_fit
from cutegen.families.gemm.perf_model.gpu_params import Factors, find_machine, scaled
from cutegen.families.gemm.perf_model.kernel_set import kernel_set
from cutegen.families.gemm.perf_model.roofline import Rates
from cutegen.families.gemm.perf_model.strategy import defaults_by_time
from cutegen.families.gemm.perf_model.torch_mm import load_torch_mm, torch_mm_us
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_family, find_space
from cutegen.measure import Candidate, TimingRun
from cutegen.measure.policy import Policy
from cutegen.measure.statistics import geometric_mean
from cutegen.measure.timing import Timing
from cutegen.records.calibrations import calibrated_arch, packaged_arch, require_calibration
from cutegen.records.paths import calibration_path
from cutegen.records.trials import TrialStore
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.search.defaults import default_config, predictor
from cutegen.search.parallel_rank import rank_algorithms, rank_all
from cutegen.space import Config
from cutegen.system.publish import publish
from cutegen.tuning.backends import Backends
from cutegen.tuning.calibration import CalibrationRun, designed
from cutegen.tuning.session import Session
from cutegen.tuning.setting import Setting

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
PROBLEMS, KERNELS = 60, 10
#: What the pretended GPU is, and by how much torch is slower there than an H200.
TRUTH, TORCH = Rates(0.85, 0.6), 1.5


@cache
def kernel_error(tile: str) -> float:
    """By how much kernels of a tile are off, as a logarithm."""
    return Random(tile).gauss(0, 0.08)


def true_us(problem: Problem, config: Config) -> float:
    """Microseconds of a kernel on the pretended GPU."""
    fit = Fit("sm_90a", {}, load_fit().trees, TRUTH)
    error = kernel_error(f"{config['tile_shape_mn']} {config['swap_ab']}")
    return fitted_us(problem, config, DEVICE.sm_count, fit) * float(np.exp(error))


@cache
def named() -> Mapping[str, Config]:
    """Whatever a calibration times, by name."""
    kernels = (islice(kernel_set(SPACE, p, DEVICE.sm_count).by_time(p), 30) for p in designed(PROBLEMS))
    return {config.digest: config for each in kernels for _, config in each}


class PretendedGpu(FakeBench):
    """Times what it is given without noise; ``contended`` is what it says of who else used it."""

    contended = ""

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        self._step()
        self.timed.append((policy, tuple(c.name for c in candidates)))
        problem = candidates[0].problem
        assert isinstance(problem, Problem)
        torch = TORCH * load_torch_mm().time_us(problem.m, problem.n, problem.k, DEVICE.sm_count)
        timings = {}
        for c in candidates:
            own = Timing.of([true_us(problem, named()[c.name])] * 3, [torch] * 3, reference="torch.mm")
            timings[c.name] = replace(own, contended_by=self.contended)
        return TimingRun(timings, Timing.of([torch] * 3, [torch] * 3, reference="torch.mm"))


@pytest.fixture(autouse=True)
def _toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutegen.tuning.setting.Toolchain.current", lambda: TOOLCHAIN)


def run(folder: Path, *arguments: str, bench: FakeBench | None = None, **more: Any) -> int:
    """Run the command on the pretended GPU."""
    backends = Backends(
        compiler=lambda: FakeCompiler(Store(folder), lambda config: "ok", batch=50),
        bench=lambda: bench or PretendedGpu(),
        watch=more.pop("watch", None),
    )
    words = ["--cache-dir", str(folder), "--quiet", "--problems", str(PROBLEMS), "--kernels", str(KERNELS)]
    return cli.main([*words, *arguments], device=more.get("device", DEVICE), backends=backends)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder with a calibration."""
    folder = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutegen.tuning.setting.Toolchain.current", lambda: TOOLCHAIN)
        assert run(folder) == 0
    yield folder


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(calibration_path(folder, DEVICE).read_bytes())
    return found


def test_rates_and_errors_of_kernels_are_found(calibrated: Path) -> None:
    """Choices on matrices left out are nearly the best, and those of the shipped fit are not."""
    found = document(calibrated)
    assert found["rates"]["clock"] == pytest.approx(TRUTH.clock, rel=0.12)
    assert found["rates"]["memory"] == pytest.approx(TRUTH.memory, rel=0.12)
    judged = found["provenance"]["regret"]
    assert judged["taken"] == "trees"
    assert judged["trees"]["first"] < 0.6 * judged["shipped"]["first"]
    assert found["provenance"]["shapes"] == PROBLEMS
    assert found["made_on"] == {"gpu": DEVICE.name, "sm_count": DEVICE.sm_count, "cuda_driver": "13.0"}


def test_untuned_calls_choose_by_the_calibration(calibrated: Path) -> None:
    """Problems that nobody measured: faster choices than the shipped fit's, and torch's time is right."""
    dispatcher = Dispatcher(kernels=Kernels(Store(calibrated)), device=lambda index: DEVICE)
    arch, generator, ratios = dispatcher.arch(), Random(3), []
    assert arch.calibration is not None and arch.name == "sm_90a"
    for _ in range(40):
        n, k = (64 * generator.randint(8, 200) for _ in range(2))
        problem = Problem(int(8 * 1000 ** generator.random()), n, k)
        chosen = default_config(find_space("gemm", arch), problem, DEVICE.sm_count)
        shipped = default_config(SPACE, problem, DEVICE.sm_count)
        ratios.append(true_us(problem, shipped) / true_us(problem, chosen))
        assert dispatcher.with_fallback("none").explain(problem).config == chosen
        mnk = (problem.m, problem.n, problem.k)
        expected = torch_mm_us(problem, arch, DEVICE.sm_count)
        assert expected == pytest.approx(TORCH * load_torch_mm().time_us(*mnk, DEVICE.sm_count), rel=0.05)
    assert geometric_mean(ratios) > 1.01


def test_processes_that_rank_read_it_too(calibrated: Path) -> None:
    """Children are told of the file."""
    arch = calibrated_arch(calibrated, DEVICE)
    problems = [Problem(m, 2048, 1024) for m in (16, 80, 300, 1100)]
    space = find_space("gemm", arch)
    found = rank_all(problems, arch, DEVICE.sm_count, 3, workers=1)
    twice = rank_all(problems, arch, DEVICE.sm_count, 3, workers=2)
    assert found == twice == {p: rank_algorithms(space, p, DEVICE.sm_count, 3) for p in problems}


def test_what_was_interrupted_is_continued(tmp_path: Path, calibrated: Path) -> None:
    """No file until it is finished; then the same one, and nothing was measured twice."""
    bench = PretendedGpu(stop_after=180)
    assert run(tmp_path, bench=bench) == 130
    assert not calibration_path(tmp_path, DEVICE).exists()
    done = {names for _, names in bench.timed}
    assert len(done) >= 20
    again = PretendedGpu()
    assert run(tmp_path, bench=again) == 0
    assert not done & {names for _, names in again.timed}
    assert len(done) + len(again.timed) == PROBLEMS
    first, second = document(calibrated), document(tmp_path)
    for found in (first, second):
        del found["provenance"]["date"]
    assert first == second
    third = PretendedGpu()
    assert run(tmp_path, bench=third) == 0 and not third.timed
    fourth = PretendedGpu()
    assert run(tmp_path, "--again", bench=fourth) == 0 and len(fourth.timed) == PROBLEMS


def test_too_few_measurements_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a budget that ends it, and where another process used the GPU all the time."""
    assert run(tmp_path, "--budget", "0.000001") == 3
    assert "0 problems, and a fit needs 24" in capsys.readouterr().err
    bench = PretendedGpu()
    bench.contended = "process 17"
    assert run(tmp_path, bench=bench) == 3
    assert "0 problems, and a fit needs 24" in capsys.readouterr().err
    assert not calibration_path(tmp_path, DEVICE).exists()


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--problems", "23"], "valid: 24 and more"),
        (["--kernels", "1"], "valid: 2 and more"),
        (["--use", "a.json", "--out", "b.json"], "give one of them"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a GPU is asked for."""
    assert cli.main(["--cache-dir", str(tmp_path), *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_place_for_no_calibration_is_named_before_a_gpu_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--cache-dir", str(tmp_path), "--out", str(tmp_path)]) == 3
    assert f"calibration {tmp_path} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, field",
    [
        ({"name": "NVIDIA H100 PCIe"}, "gpu"),
        ({"sm_count": 114}, "sm_count"),
        ({"cuda_driver_version": "12.8"}, "cuda_driver"),
        ({"compute_capability": (10, 0)}, "sm_100a"),
    ],
)
def test_one_of_another_gpu_or_driver_is_refused(
    tmp_path: Path,
    calibrated: Path,
    change: Any,
    field: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A named one with an error, one in the cache folder with a warning, once."""
    path, other = calibration_path(calibrated, DEVICE), replace(DEVICE, **change)
    with pytest.raises(DeviceError, match=field):
        require_calibration(path, other)
    assert run(tmp_path, "--use", str(path), device=other) == 3
    assert field in capsys.readouterr().err
    into = calibration_path(tmp_path, other)
    into.parent.mkdir(parents=True)
    into.write_bytes(path.read_bytes())
    for _ in range(2):
        assert calibrated_arch(tmp_path, other) is packaged_arch(other)
    assert caplog.text.count("ignoring a calibration") == 1 and field in caplog.text


def test_a_named_file_is_taken_into_use(tmp_path: Path, calibrated: Path) -> None:
    """And written there if it is asked for."""
    path = calibration_path(calibrated, DEVICE)
    assert run(tmp_path, "--use", str(path)) == 0
    found = calibrated_arch(tmp_path, DEVICE)
    assert found.calibration is not None and calibrated_arch(tmp_path, DEVICE) is found
    out = tmp_path / "own" / "fit.json"
    assert run(tmp_path, "--out", str(out)) == 0
    assert read_fit(out).rates == read_fit(path).rates


def test_a_file_that_is_replaced_within_a_moment_is_read_again(tmp_path: Path, calibrated: Path) -> None:
    """Times of files are coarse on some disks."""
    path, found = calibration_path(tmp_path, DEVICE), []
    text = calibration_path(calibrated, DEVICE).read_bytes()
    for data in (text, text + b"\n"):
        publish(path, data, "calibration")
        os.utime(path, ns=(10**18, 10**18))
        found.append(calibrated_arch(tmp_path, DEVICE).calibration)
    assert found[0] and found[1] and found[0].digest != found[1].digest


#: One tree, whose question is about a feature that there is not.
_ASKS_TOO_MUCH = {"unit": 1.0, "base": 0.0, "asked": [[27]], "limits": [[0.0]], "leaves": [[0, 1]]}


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"features": ["tile_m_log"]}, "another version"),
        ({"rates": {"clock": 0.0, "memory": 1.0}}, "fast"),
        ({"rates": {"clock": 1.0}, "asked": 3}, "malformed"),
        ({"leaves": None}, "malformed"),
        ({"limits": [[1.0]]}, "malformed"),
        ({"torch_mm": {}}, "malformed"),
        ({"torch_mm": _ASKS_TOO_MUCH}, "malformed"),
        ({"made_on": None}, "no calibration"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path, calibrated: Path, change: dict[str, Any], reason: str
) -> None:
    """The error names the file and what is wrong."""
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({**document(calibrated), **change}))
    with pytest.raises(StoreError, match=reason):
        require_calibration(path, DEVICE)
    path.write_text("[1")
    with pytest.raises(StoreError, match=r"fit\.json"):
        require_calibration(path, DEVICE)


def test_without_a_gpu_there_is_nothing_to_calibrate(tmp_path: Path) -> None:
    """It is refused before anything is measured."""
    setting = Setting.of(find_arch("sm_100a"), None, cache_dir=tmp_path)
    with TrialStore(setting.db) as trials, pytest.raises(DeviceError, match="there is none"):
        CalibrationRun(Session(setting, setting.children(), trials), problems=30, kernels=4)


B200 = replace(DEVICE, name="Fake B200", compute_capability=(10, 0), sm_count=148)
FACTORS = Factors(clock=0.8, memory=0.7, fixed=1.5)


class PretendedB200(FakeBench):
    """A GPU of a target that nobody had measured: the physics with other constants."""

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        self._step()
        problem = candidates[0].problem
        assert isinstance(problem, Problem)
        torch, timings = [50.0] * 3, {}
        for config in defaults_by_time(find_space("gemm", B200.arch), problem, B200.sm_count):
            if config.digest in {candidate.name for candidate in candidates}:
                own = [true_b200_us(problem, config)] * 3
                timings[config.digest] = Timing.of(own, torch, reference="torch.mm")
        return TimingRun(timings, Timing.of(torch, torch, reference="torch.mm"))


def true_b200_us(problem: Problem, config: Config) -> float:
    """Microseconds of a kernel on that GPU."""
    machine = scaled(find_machine(B200.arch), FACTORS)
    derived = find_space("gemm", B200.arch).derive(config, problem, B200.arch)
    return estimator_of(problem, B200.arch, B200.sm_count, machine).estimate(config, derived).time_us


def test_a_calibration_replaces_what_was_assumed_of_blackwell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The constants that matter are found, predictions follow from them, and nothing else of the target."""
    words = ["--problems", "24", "--kernels", "6", "--json"]
    assert run(tmp_path, *words, device=B200, bench=PretendedB200()) == 0
    said = json.loads(capsys.readouterr().out)
    for name in ("clock", "memory", "fixed"):
        assert said["scales"][name] == pytest.approx(getattr(FACTORS, name), rel=0.1)
    assert said["regret"]["factors"]["first"] <= said["regret"]["shipped"]["first"]
    arch = calibrated_arch(tmp_path, B200)
    assert arch.calibration is not None and find_family("gemm").accuracy(arch) == ""
    space, off = find_space("gemm", arch), []
    for problem in (Problem(16, 8192, 4096), Problem(300, 4096, 4096), Problem(4096, 8192, 2048)):
        predict, config = predictor(space, problem, 148), default_config(space, problem, 148)
        assert predict is not None
        off.append((predict(config) or 0.0) / true_b200_us(problem, config))
    assert all(ratio == pytest.approx(1.0, abs=0.08) for ratio in off)
    assert find_machine(find_arch("sm_100a")) == find_machine(B200.arch) != find_machine(arch)
    path = calibration_path(tmp_path, B200)
    for factors in ({"clock": 0.0}, {"speed": 1.0}, [], {"clock": "fast"}):
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "factors": factors}))
        with pytest.raises(StoreError, match="malformed"):
            require_calibration(path, B200)


def test_trees_learn_what_questions_tell() -> None:
    """Steps of two features and their product; what no feature tells stays."""
    generator = np.random.default_rng(0)
    features = generator.random((2000, 4))
    wanted = np.where(features[:, 0] > 0.3, 1.0, 0.0) * np.where(features[:, 2] > 0.6, 2.0, -1.0) + 5
    trees = Boosting(trees=40, depth=3, rate=0.3).fit(features, wanted)
    rows = np.ascontiguousarray(generator.random((500, 4)).T.astype(np.float32))
    clear = (abs(rows[0] - 0.3) > 0.03) & (abs(rows[2] - 0.6) > 0.03)
    truth = np.where(rows[0] > 0.3, 1.0, 0.0) * np.where(rows[2] > 0.6, 2.0, -1.0) + 5
    off = abs(trees.sums(rows) + trees.base - truth)[clear]
    assert off.mean() < 0.03 and off.max() < 0.3
    both = trees.joined(Boosting(trees=5, depth=2, rate=1.0).fit(features, -wanted))
    assert both.depth == 3 and len(both) == 45
    again = type(trees).of(json.loads(json.dumps(trees.to_json())), len(rows))
    assert np.allclose(again.sums(rows) + again.base, trees.sums(rows) + trees.base, atol=1e-3)
