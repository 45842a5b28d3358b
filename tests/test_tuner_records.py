"""What tables and trials say about a finished run is compared with what would be rendered today."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fake_tuning import Rig, quick_search  # noqa: F401
from test_tuning import only, rivals

import cutegen.build.render
from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.entry import Entry
from cutegen.records.table import Table
from cutegen.search.defaults import default_config

SHAPE = (8192, 8192, 8192)
PROBLEM = Problem(*SHAPE)
DEFAULT = default_config(find_space("gemm", find_arch("sm_90a")), PROBLEM)


def edit_trials(folder: Path, change: str) -> None:
    """Change all trials of kernels, past the trigger that forbids it."""
    with closing(sqlite3.connect(folder / "trials.db")) as database:
        database.execute("DROP TRIGGER trials_stay")
        database.execute(f"UPDATE trials SET {change} WHERE config IS NOT NULL")
        database.commit()


@pytest.mark.parametrize("key", ["", "0" * 32, "the other finalist's"])
def test_a_wrong_artifact_key_in_the_table_is_replaced(tmp_path: Path, key: str) -> None:
    """From the trials: nothing is measured again."""
    behaviour = only({rivals(1)[0]: 90.0})
    first = Rig(tmp_path, behaviour).tuner.tune(*SHAPE)  # type: ignore[arg-type]
    rig = Rig(tmp_path, behaviour)  # type: ignore[arg-type]
    path = rig.tuner.setting.table
    table = Table.load(path)
    key = first.rows[1].artifact_key if "'" in key else key
    table.with_entries([replace(table.entries[PROBLEM], artifact_key=key)]).save(path)
    second = rig.tuner.tune(*SHAPE)
    assert second.config == first.config and not rig.bench.checked
    assert Table.load(path).entries[PROBLEM].artifact_key == first.winner.artifact_key


def test_an_entry_for_torch_without_a_config_is_tuned(tmp_path: Path) -> None:
    """It names no artifact; a person wrote it."""
    first = Rig(tmp_path).tuner.tune(*SHAPE)
    rig = Rig(tmp_path)
    path = rig.tuner.setting.table
    Table.load(path).with_entries([Entry(PROBLEM, None, source="torch")]).save(path)
    assert rig.tuner.tune(*SHAPE).config == first.config


def test_records_of_other_kernels_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the templates the same configs are other kernels: they are measured, not recalled."""
    first = Rig(tmp_path).tuner.tune(*SHAPE)
    real = cutegen.build.render._tidy
    monkeypatch.setattr(cutegen.build.render, "_tidy", lambda text: real(text) + "# changed\n")
    rig = Rig(tmp_path)
    second = rig.tuner.tune(*SHAPE)
    assert not second.reused and DEFAULT.digest in rig.bench.checked
    assert second.winner.artifact_key != first.winner.artifact_key


def test_trials_whose_artifact_key_was_changed_do_not_answer(tmp_path: Path) -> None:
    """What a record says about one kernel is not shown as another's."""
    Rig(tmp_path).tuner.tune(*SHAPE)
    edit_trials(tmp_path, "artifact_key = 'f' || artifact_key")
    rig = Rig(tmp_path)
    result = rig.tuner.tune(*SHAPE)
    assert not result.reused and DEFAULT.digest in rig.bench.checked
    assert all(len(row.artifact_key) == 32 for row in result.rows)
