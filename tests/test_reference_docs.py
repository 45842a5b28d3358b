"""The documents that follow from the code are current, and there is something to say about every knob."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import cutegen
from cutegen.arch import ARCHES, find_arch
from cutegen.cli.report import document
from cutegen.deploy.described import describe
from cutegen.errors import ConfigError, ResourceError
from cutegen.families.gemm.perf_model import accuracy
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import SOURCES, families, find_family, find_space
from cutegen.families.rmsnorm_quantized.family import RMSNORM_QUANTIZED
from cutegen.measure.timing import Timing
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.trials import TrialStore
from cutegen.space import Config
from cutegen.tuning import Row, TuneResult
from tools import api_reference


@pytest.mark.parametrize("name", api_reference.DOCUMENTS)
def test_generated_documents_are_current(name: str) -> None:
    """Else: python tools/api_reference.py --write."""
    assert (api_reference.ROOT / name).read_text(encoding="utf-8") == api_reference.DOCUMENTS[name]()


def test_a_stale_document_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--check names it and changes nothing; --write mends it."""
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(api_reference, "ROOT", tmp_path)
    assert api_reference.main(["--check"]) == 1
    assert "out of date: docs/api.md, docs/knobs.md" in capsys.readouterr().out
    assert not list((tmp_path / "docs").iterdir())
    assert api_reference.main(["--write"]) == 0
    assert api_reference.main(["--check"]) == 0


def test_every_knob_is_described() -> None:
    """In sentences, and nothing is described that no space has."""
    for name in families():
        knobs: set[str] = set()
        spaces = [(source, "") for source in SOURCES]
        spaces += [("cutegen", algorithm) for algorithm in find_family(name).algorithms]
        for arch in ARCHES:
            for source, algorithm in spaces:
                try:
                    knobs |= find_space(name, find_arch(arch), source, algorithm).domains.keys()
                except (ConfigError, ResourceError):
                    continue
        described = find_family(name).knobs
        assert knobs <= described.keys(), name
        assert name in ("gemm_blockscaled", "gemm_blocks") or knobs == described.keys(), (
            "described but nowhere a knob"
        )
        assert [
            knob for knob in knobs if not described[knob].endswith(".") or len(described[knob]) < 30
        ] == []


def test_docstrings_become_lists() -> None:
    """Sections of a docstring are lists of names, and roles are code."""
    assert api_reference._text("Kinds:\n\n- one\n  of them\n- two") == "Kinds:\n\n- one of them\n- two"
    doc = "Do it with :class:`Other`.\n\nArgs:\n    a: One\n        thing.\n    b: Two."
    doc += "\n\nRaises:\n    XError: No."
    assert api_reference._text(doc) == (
        "Do it with `Other`.\n\nArgs:\n\n- `a`: One thing.\n- `b`: Two.\n\nRaises:\n\n- `XError`: No."
    )


def test_the_index_of_the_reference_has_every_name_once() -> None:
    named = " ".join(api_reference.TOPICS.values()).split()
    assert sorted(named) == sorted(name for name in cutegen.__all__ if name != "__version__")


def test_the_accuracy_of_the_model_is_not_rounded_in_its_favour() -> None:
    """4.1 % behind is said as 5 %."""
    found = accuracy.measured_accuracy(find_arch("sm_90a"))
    assert found is not None
    assert "at most 5 % behind" in str(dataclasses.replace(found, slack=0.041))
    assert "at most 5 % behind" in str(dataclasses.replace(found, slack=0.05))


def test_the_accuracy_of_the_model_is_that_of_the_results_file() -> None:
    """It names a results file that exists; what has no measurement has no accuracy."""
    found = accuracy.measured_accuracy(find_arch("sm_90a"))
    assert found is not None and (api_reference.ROOT / "docs" / "results" / found.results).is_file()
    assert accuracy.measured_accuracy(find_arch("sm_100a")) is None
    assert "Nothing was measured" in find_family("gemm").accuracy(find_arch("sm_100a"))
    assert f"{found.shapes} shapes" in find_family("gemm").accuracy(find_arch("sm_90a"))


def test_the_formats_name_every_field(tmp_path: Path) -> None:
    """Of tables, of trials, of the JSON of a run, of timings, and of the arguments of a pinned family."""
    text = (api_reference.ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[`\"](\w+)[`\"]", text))
    row = Row(Config({"tile": 1}), timing=Timing(1.0, 1.0, 1.0, 9))
    result = TuneResult(Problem(64, 64, 64), "sm_90a", "", (row,))
    run = document({"a": result}, {})["results"]
    assert isinstance(run, list) and isinstance(run[0], dict)
    rows = run[0]["candidates"]
    assert isinstance(rows, list) and isinstance(rows[0], dict)
    fields = {field.name for kind in (Fingerprint, Entry, Timing) for field in dataclasses.fields(kind)}
    fields |= run[0].keys() | rows[0].keys()
    with TrialStore(tmp_path / "trials.db") as trials:
        fields |= {column[1] for column in trials._db.execute("PRAGMA table_info(trials)")}
    arguments = describe(RMSNORM_QUANTIZED)["arguments"]
    assert isinstance(arguments, list)
    fields |= {key for argument in arguments if isinstance(argument, dict) for key in argument}
    assert sorted(fields - named) == []
