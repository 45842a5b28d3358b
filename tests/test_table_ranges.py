"""Ranges in the dispatch table: which piece answers, what a file may say, and what later ranges replace."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_table import CONFIG, HERE, OTHER

from cutegen.errors import ConfigError, TableError, UsageError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.ranges import parse_range
from cutegen.records.range_entry import Piece, Point, RangeEntry, Regret
from cutegen.records.table import Entry, Table
from cutegen.space import Config

LINE = "gemm 1..8192x7168x2048 bf16 kk"
PIECES = (
    Piece(1, 16, OTHER, "cutegen", "a" * 32, 1.2),
    Piece(17, 100, CONFIG, "cutegen", "b" * 32, 1.1),
    Piece(101, 8192, OTHER, "cutegen", "a" * 32, 0.97),
)


def entry(line: str = LINE, pieces: tuple[Piece, ...] = PIECES, **more: Any) -> RangeEntry:
    return RangeEntry(parse_range(line), pieces, **more)


def full() -> RangeEntry:
    points = (Point(16, 10.0, 1.2, None, "t1"), Point(90, 12.5, 1.1, 0.02, "t2"))
    return entry(regret=Regret(0.004, 0.02, 9), points=points, baseline="torch.mm", contended_by="pid 7")


def at(m: int) -> Problem:
    return Problem(m, 7168, 2048)


def legal(config: Config) -> bool:
    return True


def test_a_range_answers_every_size_in_it() -> None:
    """By the piece that holds the size, from its first to its last; the answer names the range."""
    table = Table(HERE, ranges=[full()])
    for m, config in ((1, OTHER), (16, OTHER), (17, CONFIG), (100, CONFIG), (101, OTHER), (8192, OTHER)):
        found = table.lookup(at(m), legal)
        assert (found.how, found.within) == ("range", table.ranges[0])
        assert found.entry is not None and found.entry.problem == at(m) and found.entry.config == config
    assert table.lookup(at(8193), legal).how == "default"
    assert table.lookup(replace(at(64), epilogue=Epilogue(bias="n")), legal).how == "default"
    assert table.lookup(Problem(64, 7168, 2048, ab_dtype="fp16"), legal).how == "default"


def test_the_entry_of_a_size_says_what_was_measured_there() -> None:
    """Its own time and ratio at a measured size; elsewhere no time, and the ratio of its piece."""
    measured, between = full().entry(at(90)), full().entry(at(91))
    assert (measured.time_us, measured.ratio_to_baseline, measured.trial_ids) == (12.5, 1.1, ("t2",))
    assert (between.time_us, between.ratio_to_baseline, between.trial_ids) == (None, 1.1, ())
    assert (between.artifact_key, between.baseline, between.contended_by) == ("b" * 32, "torch.mm", "pid 7")


def test_exact_entries_come_before_ranges_and_ranges_before_neighbours() -> None:
    """An entry wins at its own size only."""
    exact = Entry(at(64), replace_split(CONFIG))
    table = Table(HERE, [exact], [entry()])
    assert table.lookup(at(64), legal).entry == exact
    assert table.lookup(at(63), legal).how == "range"
    assert table.lookup(at(9000), legal).how == "default"


def replace_split(config: Config) -> Config:
    return config.replace(split_k=2)


def test_a_piece_that_is_not_valid_is_passed_over() -> None:
    """The next rule answers, and the reason is told."""
    near = Entry(at(60), OTHER)

    def picky(config: Config) -> bool:
        if config == CONFIG:
            raise ConfigError("no such knob")
        return True

    found = Table(HERE, [near], [entry()]).lookup(at(64), picky)
    assert (found.how, found.entry) == ("bucket", near) and "no such knob" in found.skipped[0]
    assert found.within is None


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30, unique=True), st.integers(1, 400))
def test_the_piece_is_found_by_bisection(lasts: list[int], m: int) -> None:
    """Among any number of pieces it is the one that holds the size."""
    ends = sorted({*lasts, 400})
    starts = [1, *(end + 1 for end in ends[:-1])]
    pieces = tuple(Piece(a, b, replace_split(CONFIG)) for a, b in zip(starts, ends, strict=True))
    found = entry("gemm 1..400x7168x2048 bf16 kk", pieces).piece(at(m))
    assert found is pieces[bisect_left(ends, m)] and found.first <= m <= found.last


def test_ranges_of_other_families_and_sizes_stand_beside_each_other() -> None:
    """RMSNorm's rows, and columns of a GEMM where its layout allows; only multiples are asked for."""
    lines = ("rmsnorm 1..64x4096 bf16", "gemm 64x8..512x64 bf16 kn", LINE)
    ends = (64, 512, 8192)
    firsts = (1, 8, 1)
    table = Table(
        HERE,
        ranges=[entry(line, (Piece(a, b, CONFIG),)) for line, a, b in zip(lines, firsts, ends, strict=True)],
    )
    norm = table.ranges[-1].range.low
    assert norm.family == "rmsnorm" and table.lookup(norm, legal).how == "range"
    assert table.lookup(Problem(64, 256, 64, layout="kn"), legal).how == "range"
    assert table.lookup(Problem(64, 256, 64, layout="kk"), legal).how == "default"


# --- files ---


def test_a_table_with_ranges_comes_back_as_it_was(tmp_path: Path) -> None:
    """Pieces, points and regret; equal configs are written once; its schema is one that 0.1 refuses."""
    table = Table(HERE, [Entry(at(64), CONFIG)], [full()], fallback="torch")
    table.save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert list(data) == ["_metadata", "entries", "fallback", "ranges"]
    assert data["_metadata"]["schema"] == 2
    found = data["ranges"][LINE]
    assert [choice["config"] for choice in found["choices"]] == [OTHER.to_json(), CONFIG.to_json()]
    assert [piece["choice"] for piece in found["pieces"].values()] == [0, 1, 0]
    assert found["points"]["90"] == {"time_us": 12.5, "ratio_to_baseline": 1.1, "regret": 0.02, "trial": "t2"}
    again = Table.load(tmp_path / "t.json")
    assert (again.ranges, again.entries, again.fallback) == (table.ranges, table.entries, "torch")
    assert json.dumps(again.to_json()) == json.dumps(table.to_json())


def test_a_table_without_ranges_is_what_it_always_was() -> None:
    """Not a byte is added, and a file of schema 1 is read; one of a later schema is refused."""
    table = Table(HERE, [Entry(at(64), CONFIG)])
    data = table.to_json()
    assert list(data) == ["_metadata", "entries"]
    assert data["_metadata"] == {"schema": 1, **HERE.to_json()}
    assert Table.from_json(json.loads(json.dumps(data))).ranges == ()
    with pytest.raises(TableError, match="schema 3 is newer than 2"):
        Table.from_json({**data, "_metadata": {"schema": 3, **HERE.to_json()}})


Damage = Callable[[dict[str, Any]], object]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "gap": (lambda e: e["pieces"].pop("17..100"), "piece 101..8192 should begin at 17"),
    "overlap": (
        lambda e: e["pieces"].update({"90..120": {"choice": 0}}),
        "piece 90..120 should begin at 101",
    ),
    "one size twice": (lambda e: e["pieces"].update({"001..16": {"choice": 0}}), "should begin at 17"),
    "short": (lambda e: e["pieces"].pop("101..8192"), "the pieces end at 100, but the range at 8192"),
    "no pieces": (lambda e: e.pop("pieces"), "pieces must be an object"),
    "no choices": (lambda e: e.pop("choices"), "choices must be a list"),
    "piece reversed": (lambda e: e["pieces"].update({"9..2": {"choice": 0}}), "piece 9..2 should begin"),
    "piece of words": (lambda e: e["pieces"].update({"a..b": {}}), "piece 'a..b' is not of the form 17..64"),
    "long piece": (lambda e: e["pieces"].update({f"1..{'9' * 99}": {}}), "is not of the form 17..64"),
    "choice": (lambda e: e["pieces"]["1..16"].update(choice=2), "choice is 2; valid: a place in choices"),
    "choice true": (lambda e: e["pieces"]["1..16"].update(choice=True), "choice is True"),
    "negative choice": (lambda e: e["pieces"]["1..16"].update(choice=-1), "choice is -1"),
    "ratio": (lambda e: e["pieces"]["1..16"].update(ratio_to_baseline=0), "ratio_to_baseline is 0"),
    "field": (lambda e: e.update(more=1), "a range: unknown field 'more'; valid: "),
    "list": (lambda e: e.update(pieces=[]), "pieces must be an object"),
    "config": (lambda e: e["choices"][0].update(config=None), "an entry won by cutegen must have a config"),
    "source": (lambda e: e["choices"][0].update(source="me"), "source is 'me'; valid: "),
    "key": (lambda e: e["choices"][0].update(artifact_key="../x"), "artifact_key is '../x'"),
    "key a number": (lambda e: e["choices"][0].update(artifact_key=1), "artifact_key is 1, not text"),
    "regret": (lambda e: e["regret"].update(worst=-0.1), "worst is -0.1, not a fraction of at least 0"),
    "regret of none": (lambda e: e["regret"].update(sizes=0), "regret was measured at 0 sizes"),
    "half a regret": (lambda e: e["regret"].pop("mean"), "mean is None, not a fraction"),
    "point": (lambda e: e["points"].update({"x": {"time_us": 1}}), "point 'x' is no size"),
    "timeless point": (lambda e: e["points"]["90"].pop("time_us"), "time_us is None, not a positive number"),
    "objective": (lambda e: e.update(objective="speed"), "objective is 'speed'; valid: "),
    "baseline": (lambda e: e.update(baseline=None), "baseline is None, not text"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_wrong_value_of_a_range_is_refused_in_its_place(
    tmp_path: Path, damage: Damage, message: str
) -> None:
    """The error names the file, the range, the value and what would be valid."""
    data = json.loads(json.dumps(Table(HERE, ranges=[full()]).to_json()))
    damage(data["ranges"][LINE])
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TableError) as caught:
        Table.load(path)
    assert f"dispatch table {path}: range '{LINE}': " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gemm 8192..1x7168x2048 bf16 kk", "is reversed"),
        ("gemm 64x7168x2048 bf16 kk", "is no range"),
        ("gemm 100..8192x7168x2048 bf16 kk", "piece 1..16 should begin at 100"),
        ("gemm 4..10x7168x2048  bf16 kk", "piece 1..16 should begin at 4"),
        ("rmsnorm 64x1024..2048 bf16", "compiled in"),
    ],
)
def test_a_wrong_line_of_a_range_is_refused(line: str, message: str) -> None:
    """As a key of the ranges of a table."""
    data = {**Table(HERE).to_json(), "ranges": {line: full().to_json()}}
    with pytest.raises(TableError, match=message):
        Table.from_json(data)


def test_overlapping_ranges_of_a_file_are_refused() -> None:
    """It would not be clear which of them answers; ranges that are no object are refused as well."""
    low = entry("gemm 1..64x7168x2048 bf16 kk", (Piece(1, 64, CONFIG),))
    high = entry("gemm 64..128x7168x2048 bf16 kk", (Piece(64, 128, CONFIG),))
    data = {**Table(HERE).to_json(), "ranges": {str(e.range): e.to_json() for e in (low, high)}}
    with pytest.raises(TableError, match=r"1\.\.64x.* and .*64\.\.128x.* overlap"):
        Table.from_json(data)
    for wrong in ([], None, "1..64"):
        with pytest.raises(TableError, match="ranges must be an object"):
            Table.from_json({**data, "ranges": wrong})


# --- what replaces what ---


def test_a_later_range_answers_where_it_overlaps_an_earlier_one(tmp_path: Path) -> None:
    """The rest of the earlier one stays, its pieces and points cut; entries stay."""
    path = tmp_path / "t.json"
    Table.update(path, HERE, [Entry(at(64), CONFIG)], [full()])
    middle = entry("gemm 10..90x7168x2048 bf16 kk", (Piece(10, 90, replace_split(OTHER)),))
    table = Table.update(path, HERE, ranges=[middle])
    assert [str(each.range).split("x")[0] for each in table.ranges] == [
        "gemm 1..9",
        "gemm 10..90",
        "gemm 91..8192",
    ]
    below, _, above = table.ranges
    assert below.pieces == (replace(PIECES[0], last=9),) and below.points == ()
    assert above.pieces == (replace(PIECES[1], first=91), PIECES[2])
    assert Table.load(path).ranges == table.ranges and len(table.entries) == 1
    whole = Table.update(path, HERE, ranges=[entry()])
    assert [each.range for each in whole.ranges] == [parse_range(LINE)]


def test_what_is_left_of_a_range_are_sizes_that_its_layout_allows() -> None:
    """With multiples of 8 the parts end at multiples of 8; a part of one size is given up."""
    old = entry("gemm 8..512x64x64 bf16 mn", (Piece(8, 512, CONFIG),))
    new = entry("gemm 16..480x64x64 bf16 mn", (Piece(16, 480, OTHER),))
    ranges = Table(HERE, ranges=[old, new]).ranges
    assert [(each.range.first, each.range.last) for each in ranges] == [(16, 480), (488, 512)]


def of_n(line: str, config: Config = CONFIG) -> RangeEntry:
    of = parse_range(line)
    return entry(line, (Piece(of.first, of.last, config),))


def test_ranges_of_n_of_other_alignment_stand_beside_each_other(tmp_path: Path) -> None:
    """Multiples of 8 and the rest are answered by their own range, however the two were added."""
    aligned, odd = of_n("gemm 64x8..64x64 bf16 kk"), of_n("gemm 64x9..63x64 bf16 kk", OTHER)
    path = tmp_path / "t.json"
    for each in (aligned, odd):
        Table.update(path, HERE, ranges=[each])
    table = Table.load(path)
    assert table.ranges == Table(HERE, ranges=[odd, aligned]).ranges == (aligned, odd)
    for n in range(8, 65):
        found = table.lookup(Problem(64, n, 64), legal)
        assert found.within == (odd if n % 8 else aligned), n
    assert table.lookup(Problem(64, 16, 64, unaligned_out=True), legal).within is None


@pytest.mark.parametrize(
    ("earlier", "later", "left"),
    [
        ("8..64 unaligned", "8..16 unaligned", ["8..16 unaligned", "17..64 unaligned"]),
        ("8..64 unaligned", "9..20", ["9..20", "21..64 unaligned"]),
        ("9..65", "16..32 unaligned", ["9..15", "16..32 unaligned", "33..65"]),
        ("8..64 unaligned", "8..64", ["8..64", "8..64 unaligned"]),
        ("9..65", "16..32 unaligned any_order", ["9..65", "16..32 unaligned any_order"]),
    ],
)
def test_what_is_left_of_a_range_of_n(earlier: str, later: str, left: list[str]) -> None:
    """Parts below and above the later one, which say ``unaligned`` where their sizes do not."""
    lines = []
    for words in (earlier, later, *left):
        n, *options = words.split(" ")
        lines.append(" ".join([f"gemm 64x{n}x64 bf16 kk", *options]))
    table = Table(HERE, ranges=[of_n(line) for line in lines[:2]])
    assert [str(each.range) for each in table.ranges] == lines[2:]
    assert Table.from_json(json.loads(json.dumps(table.to_json()))).ranges == table.ranges


def test_a_range_that_says_unaligned_answers_every_n_in_it() -> None:
    """Also one whose own line need not say it."""
    table = Table(HERE, ranges=[of_n("gemm 64x8..64x64 bf16 kk unaligned")])
    for n in range(8, 65):
        assert table.lookup(Problem(64, n, 64, unaligned_out=True), legal).how == "range", n
    assert table.lookup(Problem(64, 16, 64), legal).how == "default"


def test_files_in_which_earlier_versions_saw_no_overlap_are_read() -> None:
    """Two lines of which one says ``unaligned``; the later one answers."""
    lines = ("gemm 64x9..65x64 bf16 kk", "gemm 64x16..32x64 bf16 kk unaligned")
    data = {**Table(HERE).to_json(), "ranges": {line: of_n(line).to_json() for line in lines}}
    ranges = Table.from_json(data).ranges
    assert [(each.range.first, each.range.last) for each in ranges] == [(9, 15), (16, 32), (33, 65)]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    layout=st.sampled_from(["kk", "mn"]),
    spans=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5),
)
def test_every_size_is_answered_by_the_latest_range_that_holds_it(
    layout: str, spans: list[tuple[int, int]]
) -> None:
    """Through files, in whatever order and however they overlap, but for parts of one size."""
    step = 8 if layout == "mn" else 1
    table, parts = Table(HERE), list[tuple[RangeEntry, list[int]]]()
    for number, (first, last) in enumerate((min(span), max(span)) for span in spans if span[0] != span[1]):
        line = f"gemm {first * step}..{last * step}x256x256 bf16 {layout}"
        later = entry(line, (Piece(first * step, last * step, CONFIG, "cutegen", f"{number:032x}"),))
        cut = [
            (earlier, [size for size in sizes if (size > last if above else size < first)])
            for earlier, sizes in parts
            for above in (False, True)
        ]
        parts = [part for part in cut if len(part[1]) > 1]
        parts.append((later, list(range(first, last + 1))))
        table = Table.from_json(json.loads(json.dumps(table.with_entries((), [later]).to_json())))
    answers = {size: earlier for earlier, sizes in parts for size in sizes}
    for size in range(1, 21):
        problem = Problem(size * step, 256, 256, layout=layout)
        found, latest = table.lookup(problem, legal), answers.get(size)
        assert found.entry == (latest.entry(problem) if latest is not None else None)


def test_the_fallback_of_a_table_is_a_known_word() -> None:
    """In Python and in a file; an update may set it, and leaves it otherwise."""
    with pytest.raises(UsageError, match="fallback is 'cublas'; valid: torch, expected, measured, none"):
        Table(HERE, fallback="cublas")
    for wrong in ("cublas", 1, None, [], True):
        with pytest.raises(TableError, match="valid: torch, expected, measured, none"):
            Table.from_json({**Table(HERE).to_json(), "fallback": wrong})
    table = Table(HERE, fallback="torch").with_entries([Entry(at(64), CONFIG)])
    assert table.fallback == "torch" and table.with_entries(fallback="none").fallback == "none"
    assert table.with_entries(fallback="").to_json()["_metadata"] == {"schema": 1, **HERE.to_json()}
