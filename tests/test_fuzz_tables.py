"""Random tables, shapes files, lines and arguments: each gives a result or one error, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fake_kernels import H200, FakeGpu
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cutegen.arch import find_arch
from cutegen.build import Toolchain
from cutegen.cli import main as cli
from cutegen.cli.args import parse_fixed, parse_set
from cutegen.errors import (
    ConfigError,
    DeviceError,
    ProblemError,
    TableError,
    UsageError,
)
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Problem
from cutegen.families.ranges import parse_range
from cutegen.families.registry import find_space, is_legal
from cutegen.families.shapes import read_shapes
from cutegen.records.entry import ANY, Entry, Fingerprint
from cutegen.records.paths import default_table_path
from cutegen.records.range_entry import Piece, Point, RangeEntry, Regret
from cutegen.records.table import Table
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
PROBLEM, NEAR = Problem(256, 256, 256), Problem(200, 256, 256)
#: What has ended in a traceback somewhere: sizes, depths, encodings, types, text that controls a terminal.
DIGITS = "9" * 5000
# fmt: off
TEXTS = (
    "", "a\0b", "\ud800", "\x1b[31m", "[/]", "../../x", "x" * 300, DIGITS, "1e999", "nan", "-1", "0",
    "\u0663", "64x64x64", f"gemm {DIGITS}x8x8 bf16 kk", f"{DIGITS}x8x8", f"8x{'9' * 21}x8", "2147483647x8x8",
    "1x2x3x4x5", "%s{0}", "a=b,c", "=", ",", "1..64x64x64", "64..1x64x64", "1...2", "..", f"1..{DIGITS}x8x8",
    "gemm 1..512x256x256 bf16 kk", "1..16",
)
# fmt: on
SHAPES = "".join(
    f'[[shape]]\nid = "{name}"\nm = {m}\nn = 64\nk = 64\nbatch = 2\ndtype = "bf16"\nbias = "n"\nbeta = true\n'
    for name, m in (("up", 64), ("down", 128))
)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of a test with so many random inputs, always the same ones."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def good_table() -> dict[str, Any]:
    fingerprint = Fingerprint.of(H200, Toolchain.current())
    plain = Entry(PROBLEM, SPACE.default(PROBLEM), "cutegen", "a" * 32, 1.5, (1.4, 1.6), 1.1, 1.2, ("t",))
    vendor = Entry(Problem(512, 256, 256), None, "torch", time_us=2.0)
    config = SPACE.default(PROBLEM)
    pieces = (Piece(1, 199, config, "cutegen", "b" * 32, 1.1), Piece(200, 512, None, "torch", "", 0.9))
    points = (Point(64, 1.5, 1.1, 0.01, "t"), Point(256, 2.5))
    within = parse_range("gemm 1..512x256x256 bf16 kk")
    ranges = [RangeEntry(within, pieces, Regret(0.01, 0.02, 2), points, baseline="torch.mm", run="r")]
    table = Table(fingerprint, [plain, vendor], ranges, fallback="torch")
    return json.loads(json.dumps(table.to_json()))  # type: ignore[no-any-return]


GOOD = good_table()


# --- what is varied ---

_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**19])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(TEXTS)
)
_values = st.recursive(
    _scalars,
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)
_edits = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 4),
        st.binary(min_size=1, max_size=4)
        | st.sampled_from([*"{}[]\",:\\=#\n'", DIGITS, "[" * 5000, "1e999", "NaN", "true", "\x1b"]).map(
            str.encode
        ),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Return ``data`` with a few bytes replaced by others, at places given as fractions of its length."""
    for at, removed, put in edits:
        start = int(at * len(data))
        data = data[:start] + put + data[start + removed :]
    return data


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a document with every key or index of it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


@st.composite
def _documents(draw: st.DrawFn) -> bytes:
    """The good table with one or two values replaced, removed, added or renamed."""
    document = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 2))):
        container, key = draw(st.sampled_from(list(places(document))))
        act = draw(st.sampled_from(["replace", "remove", "add", "rename"]))
        if act == "replace":
            container[key] = draw(_values)
        elif act == "remove":
            del container[key]
        elif isinstance(container, dict):
            name = draw(st.text(max_size=8) | st.sampled_from([*TEXTS, *GOOD["entries"]]))
            container[name] = container.pop(key) if act == "rename" else draw(_values)
    return json.dumps(document).encode()


# --- tables ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def judge_table(folder: Path, data: bytes) -> None:
    """Load the table, look up in it, and call with it lying in the cache folder."""
    gpu = FakeGpu(folder)
    path = default_table_path(folder, H200)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    try:
        table = Table.load(path)
    except TableError as error:
        assert str(path) in str(error)
        with pytest.raises(TableError):
            Table.update(path, Fingerprint.of(H200), [])
    else:
        text = json.dumps(table.to_json(), allow_nan=False)
        again = Table.from_json(json.loads(text))
        assert (again.entries, again.ranges) == (table.entries, table.ranges)
        for problem in (PROBLEM, NEAR, Problem(512, 256, 256), Problem(7, 256, 256)):
            table.lookup(problem, partial(is_legal, problem=problem, arch=ARCH))
    assert path.read_bytes() == data
    logging.disable(logging.CRITICAL)
    try:
        dispatcher = gpu.dispatcher()
        for problem in (PROBLEM, NEAR, Problem(7, 256, 256)):
            choice = dispatcher.kernel(problem)
            assert choice is None or SPACE.explain(problem, choice.answer.config or {}) == ()
    finally:
        logging.disable(logging.NOTSET)


@fuzz(150)
@given(edits=_edits)
@example(edits=[(0.0, 0, b"["), (1.0, 0, b"," + DIGITS.encode() + b"]")])
def test_bytes_of_a_table(folder: Path, edits: list[tuple[float, int, bytes]]) -> None:
    """Load or TableError; calls go on; the file stays as it is."""
    judge_table(folder, edited(json.dumps(GOOD).encode(), edits))


@fuzz(150)
@given(data=_documents())
@example(data=json.dumps(GOOD).replace("a" * 32, "../../x").encode())
def test_structure_of_a_table(folder: Path, data: bytes) -> None:
    """The same for values of wrong types and sizes in every place."""
    judge_table(folder, data)


# --- text ---


@fuzz(300)
@given(edits=_edits)
@example(edits=[(0.0, 999, b"[[shape]]\nm = " + DIGITS.encode())])
@example(edits=[(0.0, 999, b"shape = [" + b"[" * 400 + b"]" * 400 + b"]")])
def test_shapes_files(folder: Path, edits: list[tuple[float, int, bytes]]) -> None:
    """Problems or UsageError with the name of the file."""
    path = folder / "shapes.toml"
    data = edited(SHAPES.encode(), edits)
    path.write_bytes(data)
    try:
        assert all(isinstance(shape.problem, Problem) for shape in read_shapes(path))
    except UsageError as error:
        assert str(path) in str(error)
    assert path.read_bytes() == data


_toml = st.recursive(
    st.booleans().map(lambda value: str(value).lower())
    | st.integers().map(str)
    | st.sampled_from(
        [DIGITS, f"0x{'f' * 5000}", "1e999", "-inf", "nan", "1979-05-27", "07:32:00", '"""x"""', "''"]
    )
    | st.text(max_size=5).map(lambda text: json.dumps(text, ensure_ascii=False)),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.tuples(inner).map(lambda item: f"{{a = {item[0]}}}")
    ),
    max_leaves=4,
)
_keys = st.sampled_from(
    ["id", "m", "n", "k", "batch", "dtype", "out", "layout", "bias", "act", "beta", "note", "x.y"]
)


@fuzz(300)
@given(tables=st.lists(st.dictionaries(_keys, _toml, max_size=3), min_size=1, max_size=2))
def test_values_of_shapes_files(folder: Path, tables: list[dict[str, str]]) -> None:
    """The same for every key with values of every type."""
    base = {"m": "64", "n": "64", "k": "64"}
    lines = ["[[shape]]\n" + "\n".join(f"{k} = {v}" for k, v in {**base, **t}.items()) for t in tables]
    path = folder / "values.toml"
    path.write_bytes("\n".join(lines).encode("utf-8", "replace"))
    with contextlib.suppress(UsageError):
        assert all(str(shape.problem) and shape.name for shape in read_shapes(path))


_WORDS = "gemm 256x256x256 3x8x8x8 bf16 nvfp4 int8 kk mn out=fp32 bias=n act=gelu beta unaligned promote"
_word = st.sampled_from([*_WORDS.split(), *TEXTS]) | st.text(max_size=6)


@fuzz(400)
@given(line=st.lists(_word, max_size=6).map(" ".join))
def test_problem_lines(line: str) -> None:
    """A problem whose line parses back, or ProblemError; the words of shapes likewise."""
    with contextlib.suppress(ProblemError):
        problem = Problem.parse(line)
        assert Problem.parse(str(problem)) == problem
    with contextlib.suppress(UsageError):
        GEMM.parse_shape(line)


_knobs = st.sampled_from([*SPACE.domains, "source", "tile", "\x1b", ""])
_settings = st.lists(
    st.tuples(
        _knobs, st.sampled_from(["=", "", "=="]), st.sampled_from([*TEXTS, "1", "true", "64x64", "1,2"])
    ),
    max_size=4,
).map(lambda words: ["".join(word) for word in words])


@fuzz(400)
@given(words=_settings)
def test_configs_and_restrictions(words: list[str]) -> None:
    """A config or ConfigError; restrictions that exist, else UsageError or ConfigError."""
    with contextlib.suppress(ConfigError):
        config = Config.parse(" ".join(words))
        assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
        assert not is_legal(config, PROBLEM, ARCH)
    with contextlib.suppress(UsageError, ConfigError):
        parse_fixed(words)
        parse_set(words, SPACE, PROBLEM)


# --- commands ---

COMMON: Mapping[str, tuple[str, ...]] = {
    "--shape": ("64x64x64", "1..64x64x64", *TEXTS),
    "--shapes": ("good.toml", "bad.toml", "deep.toml", "none.toml", ".", *TEXTS),
    "--dtype": ("fp16", *TEXTS),
    "--out-dtype": ("fp32", *TEXTS),
    "--layout": ("nn", *TEXTS),
    "--options": ("beta bias=n", *TEXTS),
    "--set": ("tile_k=64", f"split_k={DIGITS}", *TEXTS),
}
OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "space": {**COMMON, "--list": ("1", *TEXTS), "--explain": ("tile_k=64", f"split_k={DIGITS}", *TEXTS)},
    "tune": {
        **COMMON,
        **dict.fromkeys(("--budget", "--candidates", "--workers", "--seed"), ("1", *TEXTS)),
        "--sources": ("cutegen", *TEXTS),
        "--objective": ("time", *TEXTS),
        **dict.fromkeys(("--table", "--db"), ("table.json", *TEXTS)),
        "--import": ("good.toml", "table.json", "none.tar", ".", *TEXTS),
    },
    "pin": {
        "--table": ("table.json", "vendor.json", "bad.json", "deep.json", "none.json", ".", *TEXTS),
        "--problem": (str(PROBLEM), *TEXTS),
    },
}


@st.composite
def _arguments(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from([*OPTIONS]))
    words = [command]
    if command == "pin":
        words += ["--no-build", "--out", draw(st.sampled_from(["out", "out", *TEXTS]))]
        words += ["--table", draw(st.sampled_from(OPTIONS["pin"]["--table"]))]
    else:
        words += [draw(st.sampled_from(["gemm"] * 200 + [*TEXTS])), "--arch", "sm_90a"]
        words += draw(st.sampled_from([["--shape", "64x64x64"], ["--shapes", "good.toml"], []]))
    if command == "space":
        words += ["--list", "1"]
    for _ in range(draw(st.integers(0, 2))):
        option = draw(st.sampled_from([*OPTIONS[command]]))
        good, *others = OPTIONS[command][option]
        words += [f"{option}={good if draw(st.booleans()) else draw(st.sampled_from(others))}"]
    return words


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with good and bad files; commands stop where they would start a compiler."""
    folder, here = tmp_path_factory.mktemp("place"), Path.cwd()
    bad = copy.deepcopy(GOOD)
    bad["entries"][str(PROBLEM)]["config"] = {"\x1b[2J": DIGITS}
    vendor = copy.deepcopy(GOOD)
    del vendor["entries"][str(PROBLEM)]
    vendor["_metadata"].update(dict.fromkeys(("gpu_name", "cutlass_dsl"), ANY))
    for name, document in (("table.json", GOOD), ("bad.json", bad), ("vendor.json", vendor)):
        (folder / name).write_text(json.dumps(document))
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "good.toml").write_text(SHAPES)
    (folder / "bad.toml").write_text("[[shape]]\nid = '\\x1b[2J[/]'\nm = 64\nn = 64\nk = 63\n")
    (folder / "deep.toml").write_text("shape = " + "[" * 100_000)

    def stop(*args: object, **options: object) -> NoReturn:
        raise DeviceError("this test starts no compiler")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("cutegen.cli.tune.AutoTuner", stop)
        os.chdir(folder)
        yield folder
        os.chdir(here)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.name: (path.stat().st_mode, path.read_bytes())
        for path in folder.iterdir()
        if path.is_file() and not path.is_symlink()
    }


@fuzz(200)
@given(words=_arguments())
@example(words=["space", "gemm", "--arch", "sm_90a", "--shape", "64x64x64", "--list", "9" * 20])
@example(words=["pin", "--no-build", "--out", "out", "--table", "vendor.json"])
def test_arguments_of_commands(place: Path, words: list[str]) -> None:
    """Exit code 0, 2 or 3, a message without control characters, and no file that was there changes."""
    before = contents(place)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as error:
            code = int(str(error.code))
    assert code in (0, 2, 3)
    assert (code == 0) != bool(err.getvalue())
    text = out.getvalue() + err.getvalue()
    assert all(char.isprintable() or char == "\n" for char in text)
    after = contents(place)
    assert {name: after.get(name) for name in before} == before
