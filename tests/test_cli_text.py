"""What commands print of names and messages from outside: shown as escapes, never sent to the terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest
from fake_tuning import FakeBench, quick_search  # noqa: F401
from test_cli import SHAPE, gpu, tune  # noqa: F401

from cutegen.cli import main as cli
from cutegen.cli import wrapped_text as cli_text
from cutegen.cli.progress_display import Lines, Quiet, make_display
from cutegen.errors import BuildError
from cutegen.families.gemm.problem import Problem
from cutegen.tuning.progress import Progress

ESCAPES = "\x1b[31mred\x1b[0m\x9b2J\x07\r\n\u202e[red][/]"
VISIBLE = r"\x1b[31mred\x1b[0m\x9b2J\x07\r\n\u202e[red][/]"


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Two shapes with an id that would clear the screen and colour the text."""
    path = tmp_path / "shapes.toml"
    tables = [f"[[shape]]\nid = {json.dumps(f'{i}{ESCAPES}')}\nm = 64\nn = 64\nk = 64\n" for i in (1, 2)]
    path.write_text("\n".join(tables).replace("m = 64", "m = 128", 1), encoding="utf-8")
    return path


def assert_harmless(text: str) -> None:
    assert text and all(char.isprintable() or char == "\n" for char in text)


def test_ids_of_shapes_are_shown(
    gpu: FakeBench,  # noqa: F811
    shapes: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In progress, result lines and the summary, with columns that still line up; JSON has the id itself."""
    assert tune("--shapes", str(shapes), "--wide") == 0
    out, err = capsys.readouterr()
    assert_harmless(out)
    assert_harmless(err)
    assert f"1{VISIBLE}: gemm 128x64x64" in out and f"] 2{VISIBLE}: " in err
    first, second = (line for line in out.splitlines() if line.startswith(("  1\\x1b", "  2\\x1b")))
    assert first.index("tile_shape_mn=") == second.index("tile_shape_mn=")
    assert tune("--shapes", str(shapes), "--json", "--quiet") == 0
    names = [result["name"] for result in json.loads(capsys.readouterr().out)["results"]]
    assert names == [f"1{ESCAPES}", f"2{ESCAPES}"]


def test_failures_and_file_names_are_shown(
    gpu: FakeBench,  # noqa: F811
    shapes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What children say, names of shapes without a winner, and names of files in errors."""
    gpu.behaviour = lambda config: "wrong_result"
    assert tune("--shapes", str(shapes)) == 1
    out, err = capsys.readouterr()
    assert_harmless(out + err)
    assert f"without a winner: 1{VISIBLE}, 2{VISIBLE}" in " ".join(out.split())
    assert tune("--shapes", str(tmp_path / "no\x1b[2J.toml")) == 2
    assert r"no\x1b[2J.toml does not exist" in capsys.readouterr().err
    assert cli.main(["pin", "--table", str(tmp_path / "no\x1b[2J.json"), "--out", str(tmp_path / "d")]) == 3
    assert r"no\x1b[2J.json does not exist" in capsys.readouterr().err


def test_what_a_child_said_is_shown(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error with the last words of a process keeps its lines and loses its escapes."""

    def fail(*args: object, **options: object) -> None:
        raise BuildError("the compiler said:\n  \x1b]0;title\x07error")

    monkeypatch.setattr("cutegen.cli.tune.AutoTuner", fail)
    assert tune("--shape", SHAPE) == 3
    assert capsys.readouterr().err == "cutegen: error: the compiler said:\n  \\x1b]0;title\\x07error\n"


def test_an_error_of_the_system_is_a_message(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk or a name that is too long ends with exit code 3, wherever it is met."""

    def fail(*args: object, **options: object) -> None:
        raise OSError(36, "File name too long", "x")

    monkeypatch.setattr("cutegen.cli.tune.AutoTuner", fail)
    assert tune("--shape", SHAPE) == 3
    assert capsys.readouterr().err == "cutegen: error: [Errno 36] File name too long: 'x'\n"


@pytest.mark.parametrize("word", ["--\x1b[2J", "--list=\x1b[2J", "--lint=\x1b[2J"])
def test_arguments_are_shown(capsys: pytest.CaptureFixture[str], word: str) -> None:
    """Messages of the argument parser quote words that may come from a script."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(["space", "gemm", "--arch", "sm_90a", "--shape", SHAPE, word])
    err = capsys.readouterr().err
    assert r"\x1b[2J" in err
    assert_harmless(err)


class Terminal(io.StringIO):
    """Standard error as rich takes it for a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_progress_bar_shows_names_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Markup in an id neither colours nor ends the run, and its escapes are not drawn."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    display = make_display()
    assert not isinstance(display, Lines)
    with display:
        display.begin(ESCAPES, 1, 2)
        display.show(Progress(Problem(64, 64, 64), "done", 1, 2, {"ok[/]": 1}))
    drawn = terminal.getvalue()
    assert VISIBLE in drawn and "ok[/]" in drawn
    assert (
        "\x1b[31mred" not in drawn and "\x9b" not in drawn and "\u202e" not in drawn and "\x07" not in drawn
    )


def test_a_stream_that_cannot_encode_a_name_shows_it_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither letters beyond ASCII nor the bytes of a file name that is not UTF-8 end in a traceback."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", cast(TextIO, stream))
    cli_text.say("Größe \udcff")
    cli_text.say_json({"Größe": "\x7f"})
    stream.flush()
    lines = stream.buffer.getvalue().decode("ascii").splitlines()
    assert lines[0] == r"Gr\xf6\xdfe \udcff"
    assert json.loads("".join(lines[1:])) == {"Größe": "\x7f"} and "\x7f" not in lines[2]


LONG = "9" * 5000
WRONG_ARGUMENTS = {
    "list": (["space", "gemm", "--list", "9" * 20], "is not a positive integer up to 2147483647"),
    "long list": (["space", "gemm", "--list", LONG], "is not a positive integer up to 2147483647"),
    "long seed": (["tune", "gemm", "--seed", LONG], "is not an integer from -2147483647 to 2147483647"),
    "64-bit seed": (["tune", "gemm", "--seed", str(2**64)], "is not an integer from"),
    "budget": (["tune", "gemm", "--budget", "1e300"], "is not a positive number up to 2147483647"),
    "long budget": (["tune", "gemm", "--budget", LONG], "is not a positive number"),
    "NaN budget": (["tune", "gemm", "--budget", "nan"], "is not a positive number"),
    "workers": (["tune", "gemm", "--workers", "9" * 20], "is not a positive integer up to 2147483647"),
    "NUL": (["tune", "gemm", "--cache-dir", "a\0b"], r"'a\x00b' is not a valid file name"),
    "NUL in a table": (["pin", "--table", "a\0b", "--out", "d"], r"'a\x00b' is not a valid file name"),
    "surrogate": (["space", "gemm", "--shapes", "\ud800"], r"'\ud800' is not a valid file name"),
}


@pytest.mark.parametrize(("words", "message"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_arguments_out_of_range_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Numbers that would overflow a counter or a wait, and names that no file can have."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    err = capsys.readouterr().err
    assert message in err and len(err) < 4000


@pytest.mark.parametrize(
    "words",
    [
        ["--shape", f"{LONG}x8x8"],
        ["--shape", SHAPE, "--set", f"split_k={LONG}"],
        ["--shape", SHAPE, "--explain"],
    ],
    ids=["shape", "set", "explain"],
)
def test_numbers_of_thousands_of_digits_are_bad_usage(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """One message of a few lines and exit code 2."""
    words = [*words, f"swizzle_size={LONG}"] if words[-1] == "--explain" else words
    assert cli.main(["space", "gemm", "--arch", "sm_90a", *words]) == 2
    err = capsys.readouterr().err
    assert "5000 digits" in err and len(err) < 500


def test_commands_go_on_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell can close it (``2>&-``); then nobody reads progress and messages."""
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(make_display(), Quiet)
    cli_text.say("nobody reads this", error=True)
