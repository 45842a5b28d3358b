"""What a command printed stands in the document, whole, with the command and where it ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.errors import UsageError
from tools import record_command, results_table
from tools.benchmark.transcript import Transcript


def test_a_document_quotes_what_a_command_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And an exit code other than 0 is that of the tool."""
    out, document = tmp_path / "said.json", tmp_path / "README.md"
    words = ["explain", "gemm", "--arch", "sm_90a", "--shape", "63x7168x2048"]
    assert record_command.main(["--out", str(out), "--commit", "0123456789abcdef", *words]) == 0
    printed = capsys.readouterr().out
    assert "gemm 63x7168x2048" in printed
    document.write_text("before\n<!-- results: said -->\nold\n<!-- end results: said -->\n")
    assert results_table.main([str(out), "--into", str(document)]) == 0
    text = document.read_text()
    assert f"$ cutegen {' '.join(words)}\n{printed}```\n" in text and "commit 0123456789ab" in text
    assert "old" not in text
    assert record_command.main(["--out", str(out), "explain", "gemm", "--arch", "sm_1"]) == 2
    assert json.loads(out.read_text())["exit_code"] == 2


def test_a_file_that_lacks_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "said.json"
    path.write_text('{"kind": "transcript", "command": "cutegen"}')
    with pytest.raises(UsageError, match="record_command"):
        Transcript.load(path)
