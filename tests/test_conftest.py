"""Several workers: who runs what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parent / "conftest.py"
MODULE = """
import time
from pathlib import Path
import pytest

pytestmark = [{mark}]


@pytest.mark.parametrize("number", range(4))
def test_something(number, worker_id):
    time.sleep(0.1)
    (Path({notes!r}) / f"{name} {{worker_id}}").touch()
"""


def workers_of(tmp_path: Path, folder: str, mark: str) -> dict[str, set[str]]:
    """Run two modules of four tests with two workers; return who ran tests of which."""
    modules, notes = tmp_path / "tests" / folder, tmp_path / "notes"
    modules.mkdir(parents=True)
    notes.mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.read_text())
    for name in ("one", "two"):
        (modules / f"test_{name}.py").write_text(MODULE.format(mark=mark, notes=str(notes), name=name))
    command = "-m pytest -q -n 2 --dist loadgroup -p no:cacheprovider tests"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    ran = [path.name.split() for path in notes.iterdir()]
    return {name: {worker for module, worker in ran if module == name} for name in ("one", "two")}


def test_tests_of_a_module_that_compiles_run_in_one_worker(tmp_path: Path) -> None:
    """What it compiles for all of them would be compiled by each."""
    found = workers_of(tmp_path, "", "pytest.mark.dsl")
    assert len(found["one"]) == len(found["two"]) == 1 and found["one"] != found["two"]


def test_tests_on_the_gpu_run_in_one_worker(tmp_path: Path) -> None:
    """They would disturb each other, whatever module they are from."""
    found = workers_of(tmp_path, "gpu", "pytest.mark.gpu")
    assert found["one"] == found["two"] and len(found["one"]) == 1


def test_other_tests_run_wherever_there_is_time(tmp_path: Path) -> None:
    """The groups take nothing from the rest."""
    assert any(len(workers) == 2 for workers in workers_of(tmp_path, "", "").values())
