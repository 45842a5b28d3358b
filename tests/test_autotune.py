"""``cutegen.autotune``: a model recorded, tuned, answered by the table, and otherwise left as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import H200, FakeGpu, operators_ask  # noqa: E402
from fake_tuning import REFERENCE_US, Rig, quick_search, steady  # noqa: F401, E402

import cutegen  # noqa: E402
from cutegen.errors import UsageError  # noqa: E402
from cutegen.families.registry import parse_problem  # noqa: E402
from cutegen.measure.operand_sets import COPY  # noqa: E402
from cutegen.records.entry import Entry  # noqa: E402
from cutegen.records.recorded_calls import Call  # noqa: E402
from cutegen.records.table import Fingerprint, Table  # noqa: E402
from cutegen.runtime.answer_lookup import Answer  # noqa: E402
from cutegen.space import Config  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from cutegen.torch_ops import modules  # noqa: E402
from cutegen.torch_ops.recording import Recording  # noqa: E402
from cutegen.tuning.coverage import Weight, at_rows  # noqa: E402
from cutegen.tuning.model import Autotuned, _gain, _is_short  # noqa: E402

BF16 = torch.bfloat16
UP, DOWN = "gemm 8x64x32 bf16 kk", "gemm 8x16x64 bf16 kk"
BACKWARD = ["gemm 64x32x8 bf16 mn", "gemm 8x64x16 bf16 kn", "gemm 16x64x8 bf16 mn"]


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path / "cache"), monkeypatch) as fake:
        yield fake


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64, bias=False, dtype=BF16),
        torch.nn.BatchNorm1d(64, dtype=BF16),
        torch.nn.Linear(64, 16, bias=False, dtype=BF16),
    )


def rig(tmp_path: Path, **options: Any) -> Rig:
    return Rig(tmp_path / "cache", device=H200, **options)


def x(rows: int = 8) -> Any:
    return torch.randn(rows, 32).to(BF16)


def silent(text: str) -> None:
    """Say nothing."""


def test_one_line_tunes_what_is_missing_and_installs_it(tmp_path: Path) -> None:
    """Then every call is answered exactly, and a second autotune measures nothing."""
    model, said = network(), list[str]()
    first = rig(tmp_path)
    found = cutegen.autotune(model, x(), tuner=first.tuner, say=said.append)
    assert set(map(str, found.tuned)) == {UP, DOWN} and not found.failed
    assert type(model[0]) is torch.nn.Linear, "swapped only while it was recorded"
    cutegen.optimize(model)
    with cutegen.record() as recording, torch.no_grad():
        model(x())
    assert {call.how for call in recording.calls} == {"exact"}
    assert "2 tuned in" in said[-1] and str(found.table) in said[-1] and len(said) == 3
    second = rig(tmp_path)
    again = cutegen.autotune(model, x(), tuner=second.tuner, say=silent)
    assert not again.tuned and not second.bench.opened and again.gains == found.gains


@pytest.mark.parametrize(
    ("given", "training", "compiled", "expected"),
    [
        (False, False, False, "overlapping"),
        (True, False, False, "behind"),
        (False, True, False, "behind"),
        (False, False, True, "behind"),
    ],
)
def test_winners_of_few_rows_are_chosen_between_kernels_that_overlap(
    given: bool,
    training: bool,
    compiled: bool,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for training, whose neighbours are torch's, nor a compiler's, nor against the caller's tuner."""
    tuner = rig(tmp_path).tuner
    monkeypatch.setattr("cutegen.tuning.model.tuner_of", lambda dispatcher: tuner)
    layer = torch.nn.Linear(32, 64, bias=False, dtype=BF16)
    if compiled:
        layer.compile(backend="eager")
        # Compiled layers are recorded by the backend; here it is enough that one is among the modules.
        model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False, dtype=BF16), torch.nn.Identity())
        model[1].extra = layer
    else:
        model = torch.nn.Sequential(layer)
    found = cutegen.autotune(model, x(), training=training, tuner=tuner if given else None, say=silent)
    table = ops.default_dispatcher().table()
    assert found.tuned and table is not None
    assert {table.entries[problem].context for problem in found.tuned} == {expected}


@pytest.mark.parametrize(
    ("line", "us", "is_short"),
    [
        ("gemm 256x28672x4096 bf16 kk", 55.0, True),
        ("gemm 257x28672x4096 bf16 kk", 55.0, False),
        ("rmsnorm 2560x128 bf16", 2.0, True),
        ("rmsnorm 8192x4096 bf16", 28.0, False),
    ],
)
def test_what_is_short_has_few_rows_or_takes_few_microseconds(line: str, us: float, is_short: bool) -> None:
    """Of long kernels, the start counts little."""
    assert _is_short(Weight(parse_problem(line), 1, us)) is is_short


def test_the_gain_is_counted_in_calls(tmp_path: Path) -> None:
    """A layer that is called three times counts three times."""
    layer = torch.nn.Linear(32, 32, bias=False, dtype=BF16)
    found = cutegen.autotune(
        torch.nn.Sequential(layer, layer, layer), x(), tuner=rig(tmp_path).tuner, say=silent
    )
    [gain] = found.gains
    entry = ops.default_dispatcher().explain(gain.problem).entry
    assert entry is not None and entry.config is not None and gain.calls == 3 and gain.how == "exact"
    own = float(steady(entry.config))
    assert gain.tuned_us == pytest.approx(min(own, REFERENCE_US), rel=1e-3)
    assert gain.baseline_us == pytest.approx(REFERENCE_US, rel=1e-3)
    assert gain.default_us is not None and gain.tuned_us is not None and entry.ratio_to_default is not None
    assert found.saved_us == pytest.approx(3 * (gain.default_us - gain.tuned_us))
    assert found.ratio_to_default == pytest.approx(gain.default_us / gain.tuned_us)
    assert found.ratio_to_baseline == pytest.approx(REFERENCE_US / gain.tuned_us, rel=1e-3)


def test_a_copy_of_as_many_bytes_is_no_other_way_to_compute_it() -> None:
    """Problems that no library call computes are paired with a copy, which says nothing of the gain."""
    problem, config = parse_problem(UP), Config({"tile_k": 64})
    gains = []
    for baseline in ("torch.mm", COPY):
        entry = Entry(
            problem, config, time_us=10.0, ratio_to_default=1.1, ratio_to_baseline=0.5, baseline=baseline
        )
        gains.append(_gain(Weight(problem, 2, 20.0), Answer(problem, "exact", config, entry)))
    by_library, by_copy = gains
    assert by_library.baseline_us == pytest.approx(5) and by_copy.baseline_us is None
    found = Autotuned((by_library, by_copy), (), {}, Recording(None), Path("table.json"), 1.0)
    assert found.ratio_to_baseline == pytest.approx(0.5) and found.ratio_to_default == pytest.approx(1.1)
    assert "1.100 times as fast, 0.500 times as fast as library calls for 1 of them" in str(found)


def test_training_tunes_gradients_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Gradients, buffers, main_grad and layers; those swapped before stay so."""
    model, inputs = network(), x()
    cutegen.optimize(model, lambda module, name: name == "0", fuse_wgrad=True)
    model[0].weight.main_grad = torch.ones(64, 32)
    model[2].weight.grad = torch.ones(16, 64, dtype=BF16)
    before = copy.deepcopy(model.state_dict())
    found = cutegen.autotune(model, inputs, training=True, tuner=rig(tmp_path).tuner, say=silent)
    fused = "gemm 64x32x8 bf16 mn out=fp32 beta"
    assert {str(gain.problem) for gain in found.gains} == {UP, DOWN, fused, *BACKWARD[1:]}
    assert model[0].weight.grad is None and bool((model[0].weight.main_grad == 1).all())
    assert bool((model[2].weight.grad == 1).all())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[0]) is modules.Linear and type(model[2]) is torch.nn.Linear


def test_other_numbers_of_rows_are_tuned_too(tmp_path: Path) -> None:
    tuner = rig(tmp_path, behaviour=lambda config: "20").tuner
    found = cutegen.autotune(network(), x(), m=[1, 8, 64], tuner=tuner, say=silent)
    rows = sorted(gain.problem.sizes["m"] for gain in found.gains)
    assert rows == [1, 1, 8, 8, 64, 64] and {gain.how for gain in found.gains} == {"exact"}


def test_rows_are_k_of_a_weights_gradient() -> None:
    calls = {
        Call(parse_problem(UP), "forward", "default"): 2,
        Call(parse_problem(BACKWARD[0]), "backward", "default"): 2,
        Call(parse_problem("gemm 8x8x8 bf16 kk"), "forward", "given"): 1,
        Call(parse_problem("gemm 8x64x32 bf16 mn"), "forward", "default"): 1,
    }
    found = {str(problem): count for problem, count in at_rows(calls, [3, 16]).items()}
    assert found == {
        UP: 2,
        "gemm 3x64x32 bf16 kk": 2,
        "gemm 16x64x32 bf16 kk": 2,
        BACKWARD[0]: 2,
        "gemm 64x32x3 bf16 mn": 2,
        "gemm 64x32x16 bf16 mn": 2,
        "gemm 8x64x32 bf16 mn": 1,
        "gemm 16x64x32 bf16 mn": 1,  # 3 rows have no such layout
    }


def test_a_model_without_calls_says_what_torch_did(tmp_path: Path) -> None:
    said: list[str] = []
    model = torch.nn.Linear(31, 16, bias=False, dtype=BF16)
    found = cutegen.autotune(model, torch.randn(4, 31).to(BF16), tuner=rig(tmp_path).tuner, say=said.append)
    assert not found.gains and found.ratio_to_default is None and found.ratio_to_baseline is None
    assert "rows of the weight do not start" in said[-1] or "rows of the input do not start" in said[-1]
    assert type(model) is torch.nn.Linear


def test_a_failing_model_is_restored(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, dtype=BF16), torch.nn.Linear(32, 16, dtype=BF16))
    with pytest.raises(Exception, match=r"must be the 32 columns of w|shapes cannot be multiplied"):
        cutegen.autotune(model, x(), tuner=rig(tmp_path).tuner, say=silent)
    assert all(type(layer) is torch.nn.Linear for layer in model)


def test_a_problem_without_a_winner_stops_no_other(tmp_path: Path) -> None:
    broken = rig(tmp_path, behaviour=lambda config: "wrong_result")
    found = cutegen.autotune(network(), x(), tuner=broken.tuner, say=silent)
    assert set(map(str, found.failed)) == {UP, DOWN} and not found.tuned
    assert {gain.how for gain in found.gains} == {"default"} and "without a winner" in str(found)


def test_the_table_in_use_is_the_one_that_is_written(gpu: FakeGpu, tmp_path: Path) -> None:
    """A table that was loaded from a file; one that is in no file needs a tuner that names one."""
    path = tmp_path / "mine.json"
    Table.update(path, Fingerprint.of(H200), [])
    dispatcher = cutegen.load_table(path)
    assert dispatcher.table_path == path and dispatcher.with_build("never").table_path == path
    tuner = rig(tmp_path, table=path).tuner
    assert cutegen.autotune(network(), x(), tuner=tuner, say=silent).table == path
    assert set(map(str, Table.load(path).entries)) == {UP, DOWN}
    cutegen.use(gpu.dispatcher(Table.load(path)))
    with pytest.raises(UsageError, match="in no file"):
        cutegen.autotune(network(), x(), say=silent)


def test_bad_arguments_are_refused_before_the_model_runs(tmp_path: Path) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("the model ran")

    with pytest.raises(UsageError, match="positive numbers of rows"):
        cutegen.autotune(never, m=0, tuner=rig(tmp_path).tuner)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="budget_s is -1; valid: seconds, more than 0"):
        cutegen.autotune(never, budget_s=-1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="measures nothing"):
        cutegen.autotune(never, tuner=cutegen.AutoTuner("sm_90a"))  # type: ignore[arg-type]
