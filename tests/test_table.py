"""The dispatch table: wildcards, lookups that say how, files that survive, errors that name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.build import Toolchain
from cutegen.errors import ConfigError, StoreError, TableError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.measure.device import Device
from cutegen.records.table import ANY, Entry, Fingerprint, Table
from cutegen.space import Config

HERE = Fingerprint("NVIDIA H200", "9.0a", 132, "13.0", "13", "4.8.1", "0.1.0")
CONFIG = Config({"tile_shape_mn": (128, 256), "pingpong": False, "split_k": 1})
OTHER = Config({"tile_shape_mn": (64, 16), "pingpong": True, "split_k": 4})
SQUARE = Problem(4096, 4096, 4096)


def _legal(config: Config) -> bool:
    return True


def _entry(problem: Problem, config: Config | None = CONFIG, **more: Any) -> Entry:
    return Entry(problem, config, **more)


def _full(problem: Problem) -> Entry:
    return Entry(problem, OTHER, "cutegen", "a" * 32, 205.1, (204.0, 206.5), 1.013, 1.2, ("t1", "t2"))


@pytest.mark.parametrize("field", [f.name for f in fields(Fingerprint)])
def test_a_mismatch_names_the_field_and_a_star_relaxes_it(field: str) -> None:
    """Every field counts, its message shows both values, and "*" in the table accepts anything."""
    value: Any = 148 if field == "sm_count" else "another"
    table = Table(replace(HERE, **{field: value}))
    (reason,) = table.mismatch(HERE)
    assert reason.startswith(field) and repr(value) in reason and repr(getattr(HERE, field)) in reason
    with pytest.raises(TableError, match=f"for another machine: {field} is"):
        table.require(HERE)
    relaxed = Table(replace(HERE, **{field: ANY}))
    assert relaxed.mismatch(HERE) == ()
    relaxed.require(HERE)


def test_all_mismatches_are_listed() -> None:
    """A table from another GPU says everything that differs at once."""
    there = replace(HERE, gpu_name="NVIDIA B200", compute_capability="10.0a", sm_count=148)
    assert [reason.split()[0] for reason in there.mismatch(HERE)] == [
        "gpu_name",
        "compute_capability",
        "sm_count",
    ]


def test_a_fingerprint_describes_device_and_toolchain() -> None:
    """The capability carries the target's suffix; without a compiler its fields match any table."""
    device = Device("NVIDIA H200", (9, 0), 132, 52428800, 150754820096, "580.1", "13.0", "GPU-0")
    with_compiler = Toolchain((("nvidia-cutlass-dsl", "4.8.1"),), "cu13", "linux", "r")
    assert Fingerprint.of(device, with_compiler) == replace(HERE, cutegen=Fingerprint.of(device).cutegen)
    without = Fingerprint.of(device, Toolchain((), "", "linux", "r"))
    assert (without.cuda_runtime, without.cutlass_dsl) == (ANY, ANY)
    assert replace(HERE, cutegen=without.cutegen).mismatch(without) == ()
    assert Fingerprint.of(device).cutegen.replace(".", "").isdigit()


# --- files ---

_finite = st.floats(1e-3, 1e7)
_problems = st.builds(
    Problem,
    m=st.integers(1, 10**6),
    n=st.integers(1, 1000).map(lambda x: 8 * x),
    k=st.integers(1, 1000).map(lambda x: 8 * x),
    batch=st.integers(1, 9),
    out_dtype=st.sampled_from(["bf16", "fp32"]),
    epilogue=st.builds(Epilogue, alpha=st.booleans(), bias=st.sampled_from(["", "n"])),
)
_configs = st.builds(
    lambda tile, flag, word: Config({"tile_shape_mn": tile, "pingpong": flag, "reduction": word}),
    st.tuples(st.integers(8, 256), st.integers(8, 256)),
    st.booleans(),
    st.sampled_from(["fixed", "arrival"]),
)
_entries = st.builds(
    Entry,
    problem=_problems,
    config=_configs,
    source=st.sampled_from(["cutegen", "torch"]),
    artifact_key=st.just("") | st.text("0123456789abcdef", min_size=32, max_size=32),
    time_us=st.none() | _finite,
    interval=st.none() | st.tuples(_finite, _finite),
    ratio_to_baseline=st.none() | _finite,
    ratio_to_default=st.none() | _finite,
    trial_ids=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_entries, max_size=6))
def test_a_table_comes_back_as_it_was(entries: list[Entry]) -> None:
    """Any table survives JSON, and equal tables give equal text whatever the order of adding."""
    table = Table(HERE, entries)
    text = json.dumps(table.to_json())
    again = Table.from_json(json.loads(text))
    assert dict(again.entries) == dict(table.entries)
    assert again.fingerprint == table.fingerprint
    assert json.dumps(again.to_json()) == text
    reverse = Table(HERE, reversed(list(table.entries.values())))
    assert json.dumps(reverse.to_json()) == text


def test_a_file_is_for_people(tmp_path: Path) -> None:
    """The file has the metadata first, problems by name in order, and full configs with evidence."""
    path = tmp_path / "new folder" / "table.json"
    Table(HERE, [_full(SQUARE), _entry(Problem(64, 7168, 2048))]).save(path)
    data = json.loads(path.read_text())
    assert list(data) == ["_metadata", "entries"]
    assert data["_metadata"]["gpu_name"] == "NVIDIA H200"
    assert list(data["entries"]) == ["gemm 64x7168x2048 bf16 kk", "gemm 4096x4096x4096 bf16 kk"]
    entry = data["entries"]["gemm 4096x4096x4096 bf16 kk"]
    assert entry["config"] == OTHER.to_json()
    assert entry["ratio_to_baseline"] == 1.013 and entry["trial_ids"] == ["t1", "t2"]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    loaded = Table.load(path)
    assert loaded.entries[SQUARE] == _full(SQUARE)


def test_a_table_of_version_0_1_is_read(tmp_path: Path) -> None:
    """It named the baseline in a field."""
    path = tmp_path / "table.json"
    Table(HERE, [_full(SQUARE)]).save(path)
    path.write_text(path.read_text().replace('"ratio_to_baseline"', '"ratio_to_torch"'))
    assert Table.load(path).entries[SQUARE] == _full(SQUARE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.pop("_metadata"), "_metadata and entries"),
        (lambda d: d.update(entries=[]), "entries must be an object"),
        (lambda d: d["_metadata"].pop("sm_count"), "_metadata lacks sm_count"),
        (lambda d: d["_metadata"].update(sm_count="132"), "sm_count is '132', which is of the wrong type"),
        (lambda d: d["_metadata"].update(schema=99), "schema 99 is newer"),
        (lambda d: d["_metadata"].update(schema="x"), "schema 'x'"),
        (lambda d: d["entries"].update({"gemm 4096": {}}), "entry 'gemm 4096'"),
        (lambda d: _first(d).update(speed=1), "unknown field 'speed'"),
        (lambda d: _first(d).update(config=None), "must have a config"),
        (lambda d: _first(d).update(config=[1]), "config must be an object"),
        (lambda d: _first(d).update(config={"tile": 1.5}), "knob tile holds 1.5"),
        (lambda d: _first(d).update(source="triton"), "source is 'triton'"),
        (lambda d: _first(d).update(time_us=-1), "time_us is -1"),
        (lambda d: _first(d).update(interval=[1]), "interval is"),
        (lambda d: _first(d).update(trial_ids="t"), "trial_ids is 't'"),
        (lambda d: _first(d).update(artifact_key=3), "artifact_key is 3"),
        (lambda d: _first(d).update(context="between"), "context is 'between'; valid: alone, behind"),
        (lambda d: _first(d).update(context=None), "context is None, not text"),
    ],
)
def test_a_malformed_table_is_explained(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    """What is missing or wrong is named, with the file and, inside an entry, its problem."""
    path = tmp_path / "table.json"
    data: Any = Table(HERE, [_full(SQUARE)]).to_json()
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TableError) as caught:
        Table.load(path)
    assert message in str(caught.value) and "table.json" in str(caught.value)


def _first(data: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(iter(data["entries"].values()))
    return entry


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"_metadata": NaN}', b"[]"]
)
def test_a_corrupt_file_is_a_table_error(tmp_path: Path, content: bytes) -> None:
    """Whatever bytes a table file holds, reading it either works or is a TableError that names it."""
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(TableError, match=r"table\.json"):
        Table.load(path)


def test_a_missing_or_unwritable_file_is_a_store_error(tmp_path: Path) -> None:
    """A path that cannot be read or written is named; nothing half-written stays behind."""
    with pytest.raises(StoreError, match=r"dispatch table .*none\.json does not exist"):
        Table.load(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Table(HERE).save(tmp_path / "file" / "table.json")
    with pytest.raises(StoreError, match="cannot be written"):
        Table.update(tmp_path / "file" / "table.json", HERE, [])
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        Table(HERE).save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk fills up in the middle, readers still see the old table and no draft remains."""
    path = tmp_path / "table.json"
    Table(HERE, [_entry(SQUARE)]).save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        Table(HERE).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


_ADD_MANY = """
import json, sys
from cutegen.families.gemm.problem import Problem
from cutegen.records.table import Entry, Fingerprint, Table
here = Fingerprint(*json.loads(sys.argv[2]))
for i in range(10):
    Table.update(sys.argv[1], here, [Entry(Problem(int(sys.argv[3]) + i, 8, 8), None, "torch")])
"""


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Processes that update one table at the same time all find their entries in it afterwards."""
    path = tmp_path / "table.json"
    here = json.dumps(list(HERE.to_json().values()))
    starts = ("100", "200", "300", "400")
    command = [sys.executable, "-c", _ADD_MANY, str(path), here]
    writers = [subprocess.Popen([*command, start]) for start in starts]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert len(Table.load(path)) == 40


def test_an_update_never_mixes_machines(tmp_path: Path) -> None:
    """Entries from another GPU are refused by field name and the file stays; a star lets them in."""
    path = tmp_path / "table.json"
    Table.update(path, HERE, [_entry(SQUARE)])
    before = path.read_bytes()
    with pytest.raises(TableError, match="gpu_name is 'NVIDIA H200' in the table but 'NVIDIA H100' here"):
        Table.update(path, replace(HERE, gpu_name="NVIDIA H100"), [_entry(SQUARE, OTHER)])
    assert path.read_bytes() == before
    Table(replace(HERE, gpu_name=ANY), [_entry(SQUARE)]).save(path)
    table = Table.update(path, replace(HERE, gpu_name="NVIDIA H100"), [_entry(SQUARE, OTHER)])
    assert table.entries[SQUARE].config == OTHER
    assert table.fingerprint.gpu_name == ANY


# --- lookups ---


def test_the_exact_problem_answers_first() -> None:
    """An entry of the problem itself wins over any neighbour."""
    table = Table(HERE, [_entry(SQUARE, OTHER), _entry(Problem(4095, 4096, 4096))])
    found = table.lookup(SQUARE, _legal)
    assert (found.how, found.entry) == ("exact", table.entries[SQUARE])


def test_a_bucket_shares_the_powers_of_two_above_its_sizes() -> None:
    """Sizes that round up to the same powers of two share entries; one more row is another bucket."""
    entry = _entry(Problem(4096, 4096, 4096))
    table = Table(HERE, [entry])
    for m in (2049, 3000, 4095):
        found = table.lookup(Problem(m, 4096, 4096), _legal)
        assert (found.how, found.entry) == ("bucket", entry)
    assert table.lookup(Problem(4097, 4096, 4096), _legal).how == "nearest"
    assert table.lookup(Problem(2048, 4096, 4096), _legal).how == "nearest"


def test_the_closest_of_a_bucket_answers() -> None:
    """Among entries of one bucket the one nearest in logarithm answers, whatever their order."""
    near, far = _entry(Problem(3900, 4096, 4096)), _entry(Problem(2100, 4096, 4096), OTHER)
    for entries in ([near, far], [far, near]):
        assert Table(HERE, entries).lookup(Problem(4000, 4096, 4096), _legal).entry == near


def test_neighbours_beyond_reach_do_not_answer() -> None:
    """An entry four times as large in any size says nothing; the default is better."""
    table = Table(HERE, [_entry(SQUARE)])
    assert table.lookup(Problem(1025, 4096, 4096), _legal).how == "nearest"
    found = table.lookup(Problem(1024, 4096, 4096), _legal)
    assert (found.how, found.entry) == ("default", None)
    assert Table(HERE).lookup(SQUARE, _legal).how == "default"


@pytest.mark.parametrize(
    "change",
    [
        {"ab_dtype": "fp16", "out_dtype": "fp16"},
        {"out_dtype": "fp32"},
        {"layout": "kn"},
        {"unaligned_out": True},
    ],
)
def test_another_signature_does_not_answer(change: dict[str, Any]) -> None:
    """Dtype, layout and alignment are compiled in, so entries of others are no neighbours."""
    table = Table(HERE, [_entry(SQUARE)])
    assert table.lookup(replace(SQUARE, **change), _legal).how == "default"


def test_a_fused_epilogue_may_use_the_plain_product() -> None:
    """Without an entry of its own, a fused problem takes the plain one's config and says whose it is."""
    plain, fused = SQUARE, replace(SQUARE, epilogue=Epilogue(bias="n", activation="gelu"))
    table = Table(HERE, [_entry(plain)])
    found = table.lookup(fused, _legal)
    assert found.how == "nearest" and found.entry is not None and found.entry.problem == plain
    near = replace(fused, m=3000)
    both = Table(HERE, [_entry(plain), _entry(near, OTHER)])
    bucket = both.lookup(fused, _legal)
    assert bucket.how == "bucket" and bucket.entry is not None and bucket.entry.problem == near
    assert both.lookup(plain, _legal).how == "exact"


def test_kin_are_asked_in_order() -> None:
    """The plain product of the same bucket goes before the same epilogue further away, before others."""
    gelu, relu = Epilogue(activation="gelu"), Epilogue(activation="relu")
    asked = replace(SQUARE, epilogue=gelu)
    plain_here, same = _entry(Problem(3000, 4096, 4096)), _entry(replace(asked, m=2048))
    plain, other = _entry(Problem(2000, 4096, 4096)), _entry(replace(SQUARE, epilogue=relu))
    order = [plain_here, same, plain, other]
    for at, expected in enumerate(order):
        found = Table(HERE, order[at:]).lookup(asked, _legal)
        assert (found.how, found.entry) == ("nearest", expected)


def test_an_illegal_config_is_passed_over_with_a_reason() -> None:
    """A config that the rules refuse for this problem does not answer; the reason names the entry."""
    table = Table(HERE, [_entry(SQUARE, OTHER), _entry(Problem(4000, 4096, 4096), CONFIG)])
    found = table.lookup(SQUARE, lambda config: config == CONFIG)
    assert found.how == "bucket" and found.entry is not None and found.entry.config == CONFIG
    assert "gemm 4096x4096x4096 bf16 kk" in found.skipped[0]

    def refuse(config: Config) -> bool:
        raise ConfigError("unknown knob 'tile_shape_mn'")

    none = table.lookup(SQUARE, refuse)
    assert none.how == "default" and len(none.skipped) == 2
    assert "unknown knob" in none.skipped[0]


def test_a_prediction_may_choose_among_neighbours() -> None:
    """With an estimate, the neighbour with the fastest predicted config answers, not the closest."""
    near, far = _entry(Problem(3900, 4096, 4096)), _entry(Problem(2100, 4096, 4096), OTHER)
    table = Table(HERE, [near, far])
    problem = Problem(4000, 4096, 4096)
    assert table.lookup(problem, _legal, lambda config: 1.0 if config == OTHER else 2.0).entry == far
    assert table.lookup(problem, _legal, lambda config: 1.0).entry == near


def test_the_vendor_library_may_hold_an_entry() -> None:
    """An entry that torch won needs no config, answers its bucket, but no other epilogue."""
    table = Table(HERE, [_entry(SQUARE, None, source="torch")])
    exact = table.lookup(SQUARE, _legal, lambda config: 1.0)
    assert exact.entry is not None and exact.entry.source == "torch"
    assert table.lookup(Problem(4000, 4096, 4096), _legal, lambda config: 1.0).how == "bucket"
    assert table.lookup(replace(SQUARE, epilogue=Epilogue(alpha=True)), _legal).how == "default"


@settings(max_examples=100, deadline=None)
@given(st.lists(_entries, max_size=8), _problems)
def test_any_lookup_answers_what_it_claims(entries: list[Entry], problem: Problem) -> None:
    """Exact is the problem, a bucket shares its signature, a neighbour its dtypes; the default has none."""
    table = Table(HERE, entries)
    found = table.lookup(problem, _legal)
    assert found == table.lookup(problem, _legal)
    if found.how == "default":
        assert found.entry is None
        return
    assert found.entry is not None
    theirs = found.entry.problem
    assert (found.how == "exact") == (theirs == problem)
    assert (theirs.layout, theirs.out_dtype) == (problem.layout, problem.out_dtype)
    if found.how == "bucket":
        assert theirs.signature == problem.signature
        assert max(theirs.m, problem.m) <= 2 * min(theirs.m, problem.m)


@settings(max_examples=50, deadline=None)
@given(st.lists(_entries, min_size=1, max_size=8))
def test_every_entry_answers_its_own_problem(entries: list[Entry]) -> None:
    """Whatever else is in the table, each measured problem gets its own, latest entry."""
    table = Table(HERE, entries)
    for problem in {e.problem for e in entries}:
        assert table.lookup(problem, _legal).entry == [e for e in entries if e.problem == problem][-1]


def test_adding_replaces_and_leaves_the_original() -> None:
    """A changed copy has the new entry of a problem; the table itself does not change."""
    table = Table(HERE, [_entry(SQUARE)])
    changed = table.with_entries([_entry(SQUARE, OTHER), _entry(Problem(8, 8, 8))])
    assert len(table) == 1 and len(changed) == 2
    assert changed.entries[SQUARE].config == OTHER and table.entries[SQUARE].config == CONFIG
