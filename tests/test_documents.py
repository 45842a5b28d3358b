"""Commands, calls, problem lines, shapes files and links that the documents show are valid."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cutegen
from cutegen.deploy import pinned
from cutegen.families.ranges import is_range, parse_range
from cutegen.families.registry import families, parse_problem
from cutegen.families.shapes import read_shapes_and_ranges

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
}
COMMANDS = ("tune", "space", "explain", "warm", "pin", "calibrate", "shrink", "declare")
#: Objects that snippets call methods of, by the name that they have there.
OBJECTS: dict[str, Any] = {"cutegen": cutegen, "pinned": pinned, "tuner": cutegen.AutoTuner}


def parser(command: str) -> argparse.ArgumentParser:
    found: argparse.ArgumentParser = importlib.import_module(f"cutegen.cli.{command}")._parser()
    return found


def commands_in(text: str) -> Iterator[str]:
    """The command lines of cutegen in a text; a backslash at the end of a line joins it with the next."""
    for line in text.replace("\\\n", " ").splitlines():
        found = re.match(r"\s*(?:\$ )?(?:cutegen|python -m cutegen\.)\s?(\w+) (.*)", line)
        if found and found[1] in COMMANDS:
            yield f"{found[1]} {found[2].split(' >')[0]}"


def shown_commands() -> Iterator[tuple[str, str]]:
    for name, text in DOCUMENTS.items():
        blocks = re.findall(
            r"^```(?:bash|console)\n(.*?)^```|^((?:    .*\n)+)", text, re.DOTALL | re.MULTILINE
        )
        for block in ("".join(pair) for pair in blocks):
            yield from ((name, command) for command in commands_in(block))
    for command in COMMANDS:
        yield from ((f"{command} --help", line) for line in commands_in(parser(command).epilog or ""))


@pytest.mark.parametrize(("where", "line"), sorted({*shown_commands()}))
def test_a_command_has_the_options_that_are_shown(
    where: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *words = shlex.split(line, comments=True)
    try:
        args = parser(command).parse_args(words)
    except SystemExit as end:
        assert not end.code, f"{where}: {line}: {capsys.readouterr().err}"
        return
    assert getattr(args, "family", None) in {*families(), "scaled_add", None}


def snippets() -> Iterator[tuple[str, str]]:
    for name, text in DOCUMENTS.items():
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield name, block


@pytest.mark.parametrize(("where", "code"), list(snippets()))
def test_calls_in_a_snippet_fit_their_functions(where: str, code: str) -> None:
    """Names and arguments; nothing is called."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and (function := called(node.func)) is not None:
            named = {word.arg: None for word in node.keywords if word.arg is not None}
            inspect.signature(function).bind(*[None] * len(node.args), **named)


def test_calls_in_the_table_of_operators_fit_their_functions() -> None:
    table = DOCUMENTS["pytorch.md"].split("## Operators", 1)[1].split("###", 1)[0]
    rows = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    calls = [
        node
        for code in re.findall(r"`([^`]+)`", "".join(rows))
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert len(calls) >= len(rows) > 10
    for call in calls:
        named = {word.arg: None for word in call.keywords if word.arg is not None}
        assert isinstance(call.func, ast.Name)
        inspect.signature(getattr(cutegen, call.func.id)).bind(*[None] * len(call.args), **named)


def called(node: ast.expr) -> Callable[..., Any] | None:
    """The function that ``cutegen.name`` or the like is; None for others."""
    if not (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OBJECTS
    ):
        return None
    found = getattr(OBJECTS[node.value.id], node.attr)
    if isinstance(OBJECTS[node.value.id], type):
        found = found.__get__(object())  # a method: its first argument is the object
    return found  # type: ignore[no-any-return]


def test_problem_lines_are_read() -> None:
    text = "\n".join(DOCUMENTS.values())
    lines = {
        line.strip()
        for line in re.findall(r"^    (\w+ [\dx.]+ .*)$|`(\w+ [\dx.]+ [a-z][^`]*)`", text, re.M)
        for line in line
    }
    lines = {line for line in lines if line.split(" ")[0] in families()}
    assert len(lines) > 5
    for line in lines:
        found = parse_range(line) if is_range(line) else parse_problem(line)
        assert str(found).split()[:2] == line.split()[:2]


def test_shapes_files_are_read(tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", "\n".join(DOCUMENTS.values()), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        path = tmp_path / "shapes.toml"
        path.write_text(block, encoding="utf-8")
        assert len(read_shapes_and_ranges(path, "gemm")) == block.count("[[shape]]")


def anchors(text: str) -> set[str]:
    """The headings of a document as GitHub names them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    plain = [
        re.sub(r"[^\w\- ]", "", re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings
    ]
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_links_lead_to_headings(name: str) -> None:
    wanted = re.findall(r"\]\(([\w./]*)#([\w-]+)\)", DOCUMENTS[name])
    missing = [
        f"{target}#{anchor}"
        for target, anchor in wanted
        if anchor not in anchors(DOCUMENTS[Path(target).name if target else name])
    ]
    assert missing == []
