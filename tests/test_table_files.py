"""Table files from outside: what is refused, how the message names the place, and what a save keeps."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_table import CONFIG, HERE, OTHER, SQUARE

from cutegen.errors import StoreError, TableError
from cutegen.families.gemm.problem import Problem
from cutegen.records import table as table_module
from cutegen.records.table import ANY, Entry, Fingerprint, Table

LINE = str(SQUARE)
SMALL = Problem(64, 64, 64)


def good() -> dict[str, Any]:
    data: Any = Table(HERE, [Entry(SQUARE, CONFIG, time_us=1.0)]).to_json()
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


def refusal(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(TableError) as caught:
        Table.load(path)
    assert f"dispatch table {path}" in str(caught.value)
    assert path.read_bytes() == (text.encode() if isinstance(text, str) else text)
    return str(caught.value)


Damage = Callable[[dict[str, Any], dict[str, Any]], object]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "key of a path": (
        lambda d, e: e.update(artifact_key="../../etc/passwd"),
        "artifact_key is '../../etc/passwd'",
    ),
    "key of words": (lambda d, e: e.update(artifact_key="not hex"), "valid: 32 lowercase hexadecimal digits"),
    "short key": (lambda d, e: e.update(artifact_key="ab" * 8), "artifact_key is 'abab"),
    "key and a line end": (lambda d, e: e.update(artifact_key="a" * 32 + "\n"), r"aaa\n'"),
    "surrogate key": (lambda d, e: e.update(artifact_key="\ud800"), r"artifact_key is '\ud800'"),
    "entry a list": (
        lambda d, e: d["entries"].update({LINE: [1]}),
        f"entry '{LINE}': an entry must be an object",
    ),
    "entry a number": (lambda d, e: d["entries"].update({LINE: 1}), "an entry must be an object"),
    "bool for a time": (lambda d, e: e.update(time_us=True), "time_us is True, not a positive number"),
    "bool for an sm_count": (
        lambda d, e: d["_metadata"].update(sm_count=True),
        "sm_count is True, which is of",
    ),
    "bool for a schema": (lambda d, e: d["_metadata"].update(schema=True), "schema True"),
    "no multiprocessors": (
        lambda d, e: d["_metadata"].update(sm_count=0),
        "sm_count is 0; valid: 1 to 65535",
    ),
    "64-bit sm_count": (
        lambda d, e: d["_metadata"].update(sm_count=2**63),
        f"sm_count is {2**63}; valid: 1 to",
    ),
    "long size": (
        lambda d, e: d["entries"].update({f"gemm {'9' * 5000}x8x8 bf16 kk": e}),
        "a size has 5000 digits; valid: integers from 1 to 2147483647",
    ),
    "one problem twice": (
        lambda d, e: d["entries"].update({f"gemm 1x{LINE.split()[1]}  bf16 kk": e}),
        f"entries '{LINE}' and 'gemm 1x4096x4096x4096  bf16 kk' are for the same problem",
    ),
    "deep value": (
        lambda d, e: e.update(source=json.loads("[" * 500 + "]" * 500)),
        "source is [[[[...]]]], not text",
    ),
    "deep knob": (
        lambda d, e: e["config"].update(x=json.loads("[" * 500 + "]" * 500)),
        "knob x holds [[[[...]]]]",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_wrong_value_is_refused_in_its_place(tmp_path: Path, damage: Damage, message: str) -> None:
    """The error names the file, the entry or field, the value and what would be valid."""
    data = good()
    damage(data, data["entries"][LINE])
    assert message in refusal(tmp_path / "t.json", json.dumps(data))


TEXT = {
    "integer of 5000 digits": (
        '"time_us": 1.0',
        f'"time_us": {"9" * 5000}',
        "column {}: 9999999999... has 5000",
    ),
    "integer of 400 digits": (
        '"time_us": 1.0',
        f'"time_us": {"9" * 400}',
        "column {}: 9999999999... has 400",
    ),
    "sm_count of 21 digits": ('"sm_count": 132', f'"sm_count": {"9" * 21}', "9999999999... has 21 digits"),
    "NaN": ('"time_us": 1.0', '"time_us": NaN', "column {}: NaN is no finite number"),
    "infinity": ('"time_us": 1.0', '"time_us": 1e999', "column {}: 1e999 is no finite number"),
    "fields twice": ('"time_us": 1.0', '"time_us": 1.0, "time_us": 2.0', "the key 'time_us' twice"),
    "entries twice": ('"entries"', '"entries": {}, "entries"', "the key 'entries' twice"),
}


@pytest.mark.parametrize(("old", "new", "message"), TEXT.values(), ids=TEXT)
def test_wrong_text_is_refused_with_line_and_column(tmp_path: Path, old: str, new: str, message: str) -> None:
    """What JSON can spell but a table cannot hold is refused before it is understood."""
    text = json.dumps(good())
    assert text.count(old) == 1
    found = refusal(tmp_path / "t.json", text.replace(old, new))
    column = text.index(old) + old.find(" ") + 2
    assert message.format(column) in found and "repair it or tune again" in found


def test_deep_nesting_and_other_encodings_are_refused(tmp_path: Path) -> None:
    """A hundred thousand brackets and UTF-16 are one sentence each."""
    assert "is nested too deeply" in refusal(tmp_path / "t.json", b'{"a":' * 100_000)
    assert "is not UTF-8 text: line 1" in refusal(tmp_path / "t.json", json.dumps(good()).encode("utf-16"))


def test_the_largest_plausible_count_of_multiprocessors_is_read() -> None:
    """The limit itself and a wildcard are valid."""
    for value in (65_535, 1, ANY):
        assert Fingerprint.from_json({**HERE.to_json(), "sm_count": value}).sm_count == value


def test_impossible_names_are_errors_of_the_store(tmp_path: Path) -> None:
    """A name with NUL or too many letters is refused alike when a table is read and when it is written."""
    for name in ("a\0b", "x" * 300, "\ud800"):
        for act in (Table.load, Table.find, Table(HERE).save, lambda path: Table.update(path, HERE, [])):
            with pytest.raises(StoreError):
                act(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_told_from_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """``find`` answers None for no file, also below a file and behind a link that leads nowhere."""
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("missing")
    for name in ("none", "file/none", "nowhere"):
        assert Table.find(tmp_path / name) is None
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        Table.find(tmp_path)
    with pytest.raises(TableError, match="is not JSON"):
        Table.find(tmp_path / "file")


# --- writing ---


def test_a_link_to_a_table_stays_a_link(tmp_path: Path) -> None:
    """Saving and updating through a link change the table that it leads to; mode 0640 stays 0640."""
    real, link = tmp_path / "shared" / "real.json", tmp_path / "link.json"
    Table(HERE).save(real)
    real.chmod(0o640)
    link.symlink_to("shared/real.json")
    Table.update(link, HERE, [Entry(SQUARE, CONFIG)])
    Table.update(real, HERE, [Entry(SMALL, OTHER)])
    assert link.is_symlink() and not real.is_symlink()
    assert len(Table.load(real)) == len(Table.load(link)) == 2
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "shared"]
    assert sorted(path.name for path in real.parent.iterdir()) == [".real.json.lock", "real.json"]
    (tmp_path / "new.json").symlink_to("shared/begun.json")
    Table.update(tmp_path / "new.json", HERE, [Entry(SQUARE, CONFIG)])
    assert (tmp_path / "new.json").is_symlink() and len(Table.load(real.parent / "begun.json")) == 1


def test_a_new_table_can_be_read_by_all_if_the_umask_allows(tmp_path: Path) -> None:
    """0644 less the umask."""
    for umask, mode in ((0o022, 0o644), (0o002, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            Table(HERE).save(tmp_path / f"{umask}.json")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{umask}.json").stat().st_mode) == mode


def test_a_planted_lock_is_not_followed(tmp_path: Path) -> None:
    """A link in the place of the lock creates no file elsewhere."""
    (tmp_path / ".t.json.lock").symlink_to("elsewhere")
    with pytest.raises(StoreError, match="cannot be written"):
        Table.update(tmp_path / "t.json", HERE, [Entry(SQUARE, CONFIG)])
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "t.json").exists()


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A named pipe stays one, and so would a device."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="is not a regular file"):
        Table(replace(HERE, gpu_name=ANY)).save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_the_first_winner_keeps_what_an_empty_table_says(tmp_path: Path) -> None:
    """A table without entries may hold a fallback and fields that accept any value."""
    path = tmp_path / "table.json"
    Table.update(path, replace(HERE, gpu_name=ANY), fallback="measured")
    table = Table.update(path, HERE, [Entry(SQUARE, CONFIG, time_us=1.0)])
    assert table.fallback == "measured" and table.fingerprint.gpu_name == ANY
    assert Table.load(path).to_json() == table.to_json()


def test_stale_tables_of_one_second_are_all_kept(tmp_path: Path) -> None:
    """Each gets a name of its own, and what holds is returned as it is."""
    path = tmp_path / "table.json"
    for name in ("first", "second", "third"):
        Table(replace(HERE, gpu_name=name), [Entry(SQUARE, CONFIG, time_us=1.0)]).save(path)
        assert Table.claim(path, HERE) is None and not path.exists()
    aside = [Table.load(each).fingerprint.gpu_name for each in tmp_path.glob("table.until-*.json")]
    assert sorted(aside) == ["first", "second", "third"]
    assert Table.claim(path, HERE) is None
    Table(HERE).save(path)
    found = Table.claim(path, HERE)
    assert found is not None and found.fingerprint == HERE


def test_a_table_that_was_begun_anew_meanwhile_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between judging a table and holding its lock, another process may have begun it anew."""
    path = tmp_path / "table.json"
    Table(replace(HERE, gpu_name="other"), [Entry(SQUARE, CONFIG, time_us=1.0)]).save(path)
    locked = table_module._locked

    @contextmanager
    def late(name: Path) -> Iterator[None]:
        Table(HERE, [Entry(SMALL, CONFIG, time_us=2.0)]).save(path)
        with locked(name):
            yield

    monkeypatch.setattr(table_module, "_locked", late)
    table = Table.claim(path, HERE)
    assert table is not None and list(table.entries) == [SMALL]
    assert not list(tmp_path.glob("*until*"))
