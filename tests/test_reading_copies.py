"""The kernels of docs/kernels are what the templates render."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import render_kernels
from tools.render_kernels import COPIES, main, path_of


def test_the_copies_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_each_copy_shows_what_it_is_called_after() -> None:
    """A change of the spaces or of the default config may not turn a copy into another kernel."""
    words = {
        "hopper_pingpong": "pingpong=true",
        "hopper_split_k": "def reduce_kernel(",
        "hopper_few_rows": "algorithm=few_rows",
        "blackwell_2cta": "use_2cta_instrs=true",
    }
    texts = {copy.name: path_of(copy).read_text() for copy in COPIES}
    for name, expected in words.items():
        assert expected in texts[name] and ast.get_docstring(ast.parse(texts[name]))


def test_a_copy_that_differs_is_missing_or_is_no_copy_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render_kernels, "FOLDER", tmp_path)
    assert main(["--write"]) == 0 and main(["--check"]) == 0
    changed, missing, *_ = sorted(tmp_path.iterdir())
    changed.write_text(changed.read_text() + "# more\n")
    missing.unlink()
    (tmp_path / "nothing.py").write_text("")
    assert main(["--check"]) == 1
    said = capsys.readouterr().out
    assert all(f"docs/kernels/{name}" in said for name in (changed.name, missing.name, "nothing.py"))
    assert main(["--write"]) == 0 and main(["--check"]) == 0
