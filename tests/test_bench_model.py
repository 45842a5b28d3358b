"""tools/bench_model.py on the CPU: it measures what it says, checks results, and its file is rendered."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import H200, FakeGpu, operators_ask  # noqa: E402
from fake_tuning import Rig, quick_search, steady  # noqa: F401, E402

import cutegen  # noqa: E402
from cutegen.arch import find_arch  # noqa: E402
from cutegen.errors import CheckError, UsageError  # noqa: E402
from cutegen.families.registry import find_space, parse_problem  # noqa: E402
from cutegen.records.entry import Entry, Fingerprint  # noqa: E402
from cutegen.records.table import Table  # noqa: E402
from cutegen.space import Config  # noqa: E402
from cutegen.torch_ops import gemm  # noqa: E402
from tools import bench_model as tool  # noqa: E402
from tools.benchmark import model_steps  # noqa: E402
from tools.benchmark.environment import check_facts  # noqa: E402
from tools.benchmark.model_table import (  # noqa: E402
    APART,
    BESIDE,
    COMPILED,
    GEMMS,
    LINEAR,
    MODEL,
    OVERLAP,
    STEP,
)
from tools.benchmark.overlapping_winners import with_overlap  # noqa: E402
from tools.results_table import main as render  # noqa: E402


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    torch._dynamo.reset()
    with operators_ask(AllFamilies(tmp_path / "cache"), monkeypatch) as fake:
        assert isinstance(fake, AllFamilies)
        yield fake


def bench(tmp_path: Path, **changes: Any) -> tool.ModelBench:
    args = argparse.Namespace(
        out=tmp_path / "model.json",
        size="tiny",
        layers=2,
        decode=(1, 3),
        context=16,
        prefill=(24,),
        training=32,
        training_layers=1,
        compiled_layers=1,
        rounds=2,
        settle=0.001,
        autotune=None,
        table=None,
        cache_dir=None,
        parts=tool.PARTS,
        gates_apart=False,
        wait_for=None,
        tuned_for="behind",
        beside=None,
        overlap=False,
    )
    vars(args).update(changes)
    facts: dict[str, Any] = {**check_facts(MODEL, H200, "0" * 40), "rounds": 2}
    return tool.ModelBench(args, {**facts, "model": {"size": "tiny", "layers": 2, "context": 16}}, "cpu")


def rows(tmp_path: Path) -> dict[tuple[str, str], Any]:
    found = json.loads((tmp_path / "model.json").read_text())["rows"]
    return {(row["name"], row["what"]): row for row in found}


def test_steps_of_inference_are_measured_whole_and_by_their_gemms(gpu: AllFamilies, tmp_path: Path) -> None:
    """Nine GEMMs a step, of the model's sizes, five norms and two gates; those of torch call no kernel."""
    subject = bench(tmp_path)
    subject.decode()
    subject.prefill()
    found = rows(tmp_path)
    names, kinds = ("decode 1", "decode 3", "prefill 24"), (GEMMS, LINEAR, STEP)
    assert set(found) == {(name, what) for name in names for what in kinds}
    answers = found["decode 3", GEMMS]["answers"]
    assert sum(answer["calls"] for answer in answers.values()) == 9
    assert answers["gemm 3x384x256 bf16 kk"]["calls"] == 2 and "gemm 3x1024x256 bf16 kk" in answers
    assert found["prefill 24", GEMMS]["answers"].keys() >= {
        "gemm 1x1024x256 bf16 kk",
        "gemm 24x256x512 bf16 kk",
    }
    steps, left = divmod(gpu.families.count("rmsnorm"), 5)
    assert steps and not left and gpu.families.count("gated_gemm") == 2 * steps
    apart = gpu.families.count("gemm") + gpu.families.count("gated_gemm")
    assert apart % 9 == 0 and apart > 2 * 9 * steps
    assert cutegen.counters()["fallbacks"] == {}


def test_what_is_tuned_is_what_is_called(gpu: FakeGpu, tmp_path: Path) -> None:
    """Known without running anything: forward, both gradients, and what the backend fuses an addition to."""
    subject = bench(tmp_path)
    lines = subject.lines()
    subject.decode()
    subject.prefill()
    called = {line for row in rows(tmp_path).values() for line in row.get("answers", ())}
    assert called < set(lines) and len(set(lines)) == len(lines)
    assert {"gemm 32x512x256 bf16 kn", "gemm 256x512x32 bf16 mn", "gemm 3x256x512 bf16 kk beta"} <= set(lines)
    assert {"gated_gemm 3x512x256 bf16", "gated_gemm 32x512x256 bf16 pre"} <= set(lines)
    subject._args.parts = ("decode", "compiled_training")
    addends = [line for line in subject.lines() if line.endswith("beta")]
    assert addends == ["gemm 32x256x256 bf16 kk beta", "gemm 32x256x512 bf16 kk beta"]


@pytest.mark.usefixtures("quick_search")
def test_all_parts_are_tuned_at_once(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table knows is not tuned again; what has no winner is tried once more, and named."""

    def said(folder: str, behaviour: Any) -> Any:
        made = lambda **options: Rig(tmp_path / folder, behaviour, device=H200).tuner  # noqa: E731
        monkeypatch.setattr("cutegen.tuning.AutoTuner", made)
        changes = {"autotune": 60.0, "decode": (5,), "prefill": (), "parts": ("decode",)}
        return bench(tmp_path, table=None, **changes)._facts["tuning"]

    def right(config: Config) -> str:
        return steady(config) if "mma_tiler_mn" in config else "20"

    first = said("one", right)
    assert (first["known"], first["tuned"], first["failed"]) == (0, 5 + 1, []), "and the norms"
    assert first["context"] == "behind"
    again = said("two", right)
    assert (again["known"], again["tuned"]) == (5 + 1, 0), "the operators ask the table of the first"
    cutegen.use(gpu.dispatcher())
    broken = said("three", lambda config: "wrong_result")
    assert broken["tuned"] == 0 and "gemm 5x384x256 bf16 kk" in broken["failed"]


@pytest.mark.usefixtures("quick_search")
def test_seconds_of_autotune_are_taken_twice(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The first time all is tuned, the second time nothing; the file is rendered."""
    tuner = lambda dispatcher: Rig(tmp_path / "rig", lambda config: "20", device=H200).tuner  # noqa: E731
    monkeypatch.setattr("cutegen.tuning.model.tuner_of", tuner)
    monkeypatch.setattr(tool, "TUNED_ROWS", (3, 24))
    subject = bench(tmp_path)
    subject.autotune()
    found = json.loads((tmp_path / "model.json").read_text())["autotune"]
    cold, known = found["cold"], found["known"]
    assert cold["products"] == known["products"] == 8, "the head is as wide as the MLP"
    assert cold["tuned"] + len(cold["failed"]) == cold["problems"] and known["tuned"] == 0
    assert render([str(tmp_path / "model.json")]) == 0
    assert "8 of them products of 3 and 24 rows" in capsys.readouterr().out


def test_training_and_compiled_steps_are_measured(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's default is what they are compared with; here its graphs run as they are traced, for its C++
    takes half of this test, and the backend's goes the same way."""
    subject = bench(tmp_path, decode=(2,), prefill=(), gates_apart=True)
    backends = subject._backends()
    assert backends[tool.TORCH] == "inductor"
    monkeypatch.setattr(subject, "_backends", lambda: {**backends, tool.TORCH: "aot_eager"})
    subject.training()
    launched = len(gpu.calls)
    assert launched
    subject.compiled()
    subject.compiled_training()
    assert len(gpu.calls) > launched
    trained = {("training 32", what) for what in (LINEAR, STEP, COMPILED, APART)}
    assert set(rows(tmp_path)) == {*trained, ("decode 2", COMPILED), ("decode 2", APART)}


def test_what_waits_is_compiled_and_compared_first(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Nothing is timed before the file is there; a step of an earlier part runs when all are compiled."""
    subject = bench(tmp_path, decode=(2,), prefill=(), wait_for=tmp_path / "go")
    monkeypatch.setattr(subject, "_backends", lambda: {tool.TORCH: "aot_eager", COMPILED: "aot_eager"})
    compared: list[str] = []
    monkeypatch.setattr(model_steps, "require_close", lambda found, want, what: compared.append(what))
    subject.compiled()
    subject.compiled_training()
    names = [f"{name}, {COMPILED}" for name in ("decode 2", "training 32")]
    assert compared == names and not (tmp_path / "model.json").exists()
    assert f"compiled: decode 2, torch, {COMPILED}" in capsys.readouterr().out
    (tmp_path / "go").touch()
    subject.finish()
    assert compared == 2 * names and set(rows(tmp_path)) == {
        ("decode 2", COMPILED),
        ("training 32", COMPILED),
    }
    subject.finish()
    assert compared == 2 * names


def test_another_table_may_answer_the_same_steps(
    gpu: AllFamilies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same rounds; afterwards the first one answers again."""
    Table(Fingerprint.of(H200)).save(tmp_path / "other.json")
    asked: list[Any] = []
    subject = bench(tmp_path, decode=(2,), beside=tmp_path / "other.json")
    before, prepare = gemm.default_dispatcher(), subject._prepare

    def noted(*given: Any) -> Any:
        asked.append(gemm.default_dispatcher().table_path)
        return prepare(*given)

    monkeypatch.setattr(subject, "_prepare", noted)
    subject.decode()
    assert asked == [before.table_path, tmp_path / "other.json"] and gemm.default_dispatcher() is before
    assert set(rows(tmp_path)) == {("decode 2", what) for what in (GEMMS, LINEAR, STEP, BESIDE)}


def winners() -> Table:
    """A GEMM and a norm whose launches stand alone, and a GEMM that is torch's."""
    entries = []
    for line in ("gemm 2x64x64 bf16 kk", "rmsnorm 2x64 bf16"):
        problem = parse_problem(line)
        default = find_space(problem.family, find_arch("sm_90a")).default(problem)
        knob = {"use_pdl": False} if "use_pdl" in default else {"pdl": "off"}
        entries.append(Entry(problem, default.replace(**knob), artifact_key="0" * 32))
    entries.append(Entry(parse_problem("gemm 3x64x64 bf16 kk"), None, source="torch"))
    return Table(Fingerprint.of(H200), entries)


def test_all_winners_may_overlap() -> None:
    """Where kernels can: what torch answers stays, and no artifact of another kernel is named."""
    before = winners()
    after = with_overlap(before, find_arch("sm_90a")).entries
    product, other, norm = after.values()
    assert product.config is not None and norm.config is not None
    assert (product.config["use_pdl"], norm.config["pdl"], other.config) == (True, "early", None)
    assert product.artifact_key == norm.artifact_key == ""
    for problem, entry in before.entries.items():
        config, changed = entry.config, after[problem].config
        if config is not None and changed is not None:
            assert len([knob for knob in config if config[knob] != changed[knob]]) == 1


def test_a_step_is_timed_with_all_launches_overlapping(
    gpu: AllFamilies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same rounds; without winners there is nothing to change."""
    subject = bench(tmp_path, decode=(2,), overlap=True)
    with pytest.raises(UsageError, match="--overlap needs winners: give --table or --autotune"):
        subject.decode()
    monkeypatch.setattr(type(gemm.default_dispatcher()), "table", lambda *given: winners())
    subject.decode()
    assert set(rows(tmp_path)) == {("decode 2", what) for what in (GEMMS, LINEAR, STEP, OVERLAP)}


def test_parts_keep_the_order_in_which_they_are_named() -> None:
    assert tool._counts("none") == () and tool._counts("1,8") == (1, 8)
    assert tool._parts("training,decode,training") == ("training", "decode")
    with pytest.raises(argparse.ArgumentTypeError, match="decoding; valid: decode, prefill"):
        tool._parts("decode,decoding")


def test_the_file_is_rendered_with_means(gpu: FakeGpu, tmp_path: Path, capsys: Any) -> None:
    """Above 1 is faster; nothing is rounded in favour of cutegen."""
    subject = bench(tmp_path)
    subject.decode()
    document = json.loads((tmp_path / "model.json").read_text())
    for row in document["rows"]:
        row.update(torch_us=[1, 2000.4567, 3], cutegen_us=[1, 1000.0001, 3], ratio=[1.5, 1.99999, 2.5])
    step = next(row for row in document["rows"] if row["what"] == STEP)
    document["rows"].append({**step, "what": OVERLAP, "cutegen_us": [1, 801.0, 3]})
    document["rows"].append({**step, "what": BESIDE, "cutegen_us": [1, 1250.0, 3]})
    held = {"allocated": 1, "reserved": 2**20}
    document["memory"] = {"steps": 1000, "early": held, "late": held}
    found = {"us": 1.0, "config": "x"}
    document["tuning"] = {
        "products": {
            "gemm 8x8x8 bf16 kk": {**found, "ratio": [0.9, 0.9504, 0.99]},
            "gemm 16x8x8 bf16 kk": {**found, "ratio": [0.9, 0.95, 1.01]},
            "gemm 32x8x8 bf16 kk": {**found, "ratio": None},
            "gated_gemm 16x8x8 bf16": {
                **found,
                "ratio": [0.1, 0.1, 0.1],
            },  # beside a copy: torch has no such call
        }
    }
    (tmp_path / "model.json").write_text(json.dumps(document))
    assert render([str(tmp_path / "model.json")]) == 0
    said = capsys.readouterr().out
    assert "2 tuned products" in said
    assert "torch's is surely faster at `gemm 8x8x8 bf16 kk` 0.950\n" in said
    assert "| decode 3 | whole step, optimized | 2 | 2.000 | 1.001 | 1.999 (1.500 to 2.500) |" in said
    assert "inference, GEMMs alone: torch / cutegen in geometric mean **1.999**, smallest 1.999 of 2" in said
    assert "1 MiB at the end" in said
    assert (
        "what swapping norms and gates adds to linear layers: **1.000** in geometric mean: 1.000 (dec" in said
    )
    assert (
        f"what overlap adds to the same winners: **1.248** in geometric mean: 1.248 ({step['name']})" in said
    )
    assert "what this table's winners add to those of the other one: **1.249** in geometric mean" in said


def test_results_that_differ_are_not_measured() -> None:
    with pytest.raises(CheckError, match="step: cutegen and torch differ by"):
        model_steps.require_close(torch.ones(3), torch.zeros(3) + 2, "step")


def test_steps_take_turns_in_any_order() -> None:
    """Each as often as the others, after a warm-up."""
    seen: list[str] = []
    steps = {name: (lambda name=name: seen.append(name)) for name in ("a", "b")}
    found = model_steps.timed(steps, 5, 0.0)
    assert {name: len(samples) for name, samples in found.items()} == {"a": 5, "b": 5}
    assert seen.count("a") == seen.count("b") == 6


def test_memory_is_asked_early_and_late(gpu: FakeGpu) -> None:
    found = model_steps.memory_of_mixed_steps(model_steps.make_model("tiny", 1, "cpu"), "eager", steps=20)
    assert found["steps"] == 20 and found["early"].keys() == found["late"].keys() == {"allocated", "reserved"}
