"""Files that version 0.1 wrote: they open with everything that is in them, or one sentence says what to do.

tests/data/v01 was made by that version itself (make_samples.py there).
"""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from deployments import Workshop, contents, load, operands, write_table

from cutegen.arch import find_arch
from cutegen.cli.pin import main
from cutegen.deploy import pin_table
from cutegen.errors import PinError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.table import Table
from cutegen.records.trials import TrialStore
from cutegen.runtime.answer_lookup import look_up

pytest.importorskip("torch")
SAMPLES = Path(__file__).parent / "data" / "v01"
OLD = "gemm 256x512x1024 fp16 nt bias=n act=relu"
PROBLEMS = ("gemm 256x512x1024 bf16 kk", "gemm 256x512x1024 fp16 mn bias=n act=relu")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "trials.db"
    path.write_bytes(gzip.decompress((SAMPLES / "trials.db.gz").read_bytes()))
    return path


@pytest.fixture
def deployed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLES / "deploy", tmp_path / "deploy"))


def test_a_trial_database_opens_and_goes_on(database: Path) -> None:
    """Every trial is read under the name that its problem has now, and new ones follow."""
    with TrialStore(database) as trials:
        found = trials.find()
        assert len(found) == sum(trials.counts().values()) >= 4
        for line in PROBLEMS:
            problem = Problem.parse(line)
            own = trials.find(problem)
            assert own and {str(trial.problem) for trial in own} == {line}
            finals = [trial for trial in own if trial.timing is not None]
            assert finals and all(trial.timing.median_us > 0 for trial in finals if trial.timing)
            trials.add(replace(own[-1], id="0123456789abcdef" + line[-1]))
            assert len(trials.find(problem)) == len(own) + 1
        assert {str(trial.problem) for trial in found} == set(PROBLEMS)


def test_a_table_answers(tmp_path: Path) -> None:
    """Its entries are the present problems, its configs are legal, and it is written without a loss."""
    table = Table.load(SAMPLES / "table.json")
    assert {str(problem) for problem in table.entries} == set(PROBLEMS)
    space = find_space("gemm", find_arch("sm_90a"))
    for line in PROBLEMS:
        answer = look_up(table, Problem.parse(line), space, 132)
        assert answer.how == "exact" and answer.config == table.entries[Problem.parse(line)].config
    old = json.loads((SAMPLES / "table.json").read_text())["entries"][OLD]
    old["ratio_to_baseline"] = old.pop("ratio_to_torch")  # its name since then
    table.save(tmp_path / "table.json")
    new = json.loads((tmp_path / "table.json").read_text())["entries"][PROBLEMS[1]]
    assert {name: new[name] for name in old} == old


def test_a_table_is_pinned(tmp_path: Path) -> None:
    """It was measured with another compiler's kernels, which are gone: that is said, and what to do."""
    kernels = Workshop(tmp_path / "cache").kernels()
    table = tmp_path / "table.json"
    shutil.copy(SAMPLES / "table.json", table)
    current = Table.load(write_table(tmp_path / "other.json", ())).fingerprint.cutlass_dsl
    table.write_text(table.read_text().replace('"cutlass_dsl": "4.8.1"', f'"cutlass_dsl": "{current}"'))
    pinned = pin_table(table, tmp_path / "deploy", kernels=kernels)
    assert {str(item.answer.problem) for item in pinned} == set(PROBLEMS)
    assert set(load(tmp_path / "deploy")[0].problems) == set(PROBLEMS)


def test_a_pinned_folder_opens_with_its_own_loader(deployed: Path) -> None:
    """It stands alone, and says itself what it lacks: the samples hold no kernel."""
    deployment, torch = load(deployed)
    assert deployment.problems == ["gemm 64x128x256 bf16 tn"]
    a, b, options = operands(Problem.parse("gemm 64x128x256 bf16 kk"), torch)
    with pytest.raises(RuntimeError, match=r"\.so in .* cannot be read"):
        deployment.gemm(a, b, **options)


def test_a_pinned_folder_is_not_replaced(deployed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is lost, and one sentence says what to do."""
    table = write_table(deployed.parent / "table.json", ("gemm 64x128x256 bf16 kk",))
    before = contents(deployed)
    with pytest.raises(PinError) as caught:
        pin_table(table, deployed, kernels=Workshop(deployed.parent / "cache").kernels())
    said = str(caught.value)
    assert said.startswith(
        f"{deployed} holds a manifest.json that is not of this version of cutegen (its schema"
    )
    assert said.endswith("so nothing there is replaced; move the folder away, or name a new or empty one")
    assert main(["--table", str(table), "--out", str(deployed), "--no-build"]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert contents(deployed) == before
