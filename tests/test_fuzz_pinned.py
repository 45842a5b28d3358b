"""Manifests of deployments that are malformed, by hand and at random: each ends in an answer or in one error.

What is changed is sealed again, as if somebody had meant it: the digests do not save the loader here.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployments import LINES, Workshop, contents, load_module, operands, write_table
from fake_torch import Torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pinned_families import LINES as FAMILY_LINES
from pinned_families import values_of, write_family

from cutegen.deploy import pin_table
from cutegen.deploy.shipped_loader import loader_text, sealed
from cutegen.errors import PinError
from cutegen.families import registry
from cutegen.families.gemm.problem import Problem

pytest.importorskip("torch")
RANGES = ("gemm 1..300x64x128 bf16 kk", "rmsnorm 1..300x4096 fp16")
FUZZ = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Field:
    """A deployment, and beside it a file that nobody may touch.

    Attributes:
        root: Holds all of it.
        folder: The deployment.
        module: Its loader, imported.
        text: Its manifest, as it was written.
    """

    def __init__(self, root: Path, lines: tuple[str, ...], ranges: tuple[str, ...] = ()) -> None:
        self.root, self.folder = root / "field", root / "field" / "deploy"
        self.folder.parent.mkdir()
        (self.root / "mine.txt").write_text("mine")
        self.table = write_table(root / "t.json", (*lines, *ranges))
        self.workshop = Workshop(root / "cache")
        pin_table(self.table, self.folder, kernels=self.workshop.kernels())
        self.module = load_module(self.folder)
        self.text = (self.folder / "manifest.json").read_bytes()
        # Of every range one size is called, which is not pinned by itself.
        self.lines = (*lines, *(line.replace("1..300", "77") for line in ranges))

    def use(self, text: bytes) -> list[str]:
        """Call every pinned problem under the manifest ``text``; what became of each."""
        (self.folder / "manifest.json").write_bytes(text)
        self.module.MANIFEST_SHA256 = hashlib.sha256(text).hexdigest()
        torch = Torch()
        torch.mm = torch.bmm = lambda a, b, out: out
        try:
            deployment = self.module.Deployment(self.folder)
        except self.module.PinnedError as error:
            return [str(error)]
        deployment.torch, deployment.raw_stream = torch, torch._C._cuda_getCurrentRawStream
        deployment.count_writes = torch._C._increment_version
        return [self._call(deployment, torch, line) for line in self.lines]

    def _call(self, deployment: Any, torch: Torch, line: str) -> str:
        try:
            if line.startswith("gemm"):
                a, b, options = operands(Problem.parse(line), torch)
                assert deployment.gemm(a, b, **options) is options["out"]
            else:
                deployment.call(line.split()[0], **values_of(line, torch))
        except self.module.PinnedError as error:
            return str(error)
        return "answered"


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    root = tmp_path_factory.mktemp("field")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_LOG", str(root / "calls.txt"))
        patch.setattr(registry, "_registered", dict(registry._all()))
        registry.load_families(write_family(root))
        yield Field(root, (*LINES, *FAMILY_LINES), RANGES)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Field:
    """One with a GEMM and a kernel of another family, to be copied for every example."""
    return Field(tmp_path_factory.mktemp("small"), (LINES[0], FAMILY_LINES[0]))


def with_records(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**manifest, "kernels": [{**record, **changes} for record in manifest["kernels"]]}


BROKEN: dict[str, tuple[Any, str]] = {
    "no object": (lambda m: [m], "malformed: TypeError"),
    "no kernels": (
        lambda m: {k: v for k, v in m.items() if k != "kernels"},
        "malformed: KeyError: 'kernels'",
    ),
    "kernels of a kind": (lambda m: {**m, "kernels": {"a": 1}}, "malformed: TypeError: kernels is no list"),
    "numbers for kernels": (lambda m: {**m, "kernels": [7]}, "malformed: TypeError"),
    "nested keys": (lambda m: with_records(m, key=[[]]), "malformed: TypeError"),
    "no ranges": (lambda m: {k: v for k, v in m.items() if k != "ranges"}, "malformed: KeyError: 'ranges'"),
    "ranges of a kind": (lambda m: {**m, "ranges": {"a": 1}}, "malformed: TypeError: ranges is no list"),
    "no table": (lambda m: {**m, "files": {}}, "malformed: its files do not list 'table.json'"),
    "flags": (lambda m: {**m, "cpu_flags": [1]}, "malformed: TypeError: cpu_flags"),
    "facts of a GPU": (lambda m: {**m, "gpu": {**m["gpu"], "color": "red"}}, "malformed: .* gpu must have"),
    "nesting": (lambda m: b"[" * 100_000, "malformed: RecursionError"),
    "a long number": (lambda m: b'{"kernels": ' + b"9" * 5000 + b"}", "malformed: "),
    "bytes": (lambda m: b"\xff\xfe", "malformed: "),
    "nothing": (lambda m: b"", "malformed: "),
    **{
        f"{field} {value!r:.20}": (
            lambda m, change={field: value}: with_records(m, **change),
            "malformed: the record of gemm",
        )
        for field, value in (
            *(("scalars", value) for value in (7, ["7"], [2**70], [True], [1.5], None)),
            *(("workspace_bytes", value) for value in (-1, "7", 2**70, 1.5, None, True)),
            *(("symbol", value) for value in ("../x", "a b", 7, None)),
            *(("library", value) for value in ("../x.so", "/etc/passwd", "kernels/other.so", 7)),
            *(("source", value) for value in ("../x.py", None)),
            ("zeroed", 7),
        )
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_manifest_is_refused_by_name(field: Field, name: str) -> None:
    """An error with the file's name, and no traceback."""
    change, message = BROKEN[name]
    changed = change(json.loads(field.text))
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    said = field.use(text)[0]
    assert re.match(rf"manifest\.json in .* is {message}", said), said


def with_families(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the manifest with something changed in every family."""
    families = {name: {**family, **changes} for name, family in manifest["families"].items()}
    return {**manifest, "families": families}


def with_argument(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the manifest with something changed in every argument of every family."""
    families = {
        name: {**family, "arguments": [{**argument, **changes} for argument in family["arguments"]]}
        for name, family in manifest["families"].items()
    }
    return {**manifest, "families": families}


def with_ranges(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the manifest with something changed in every range."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "ranges": [{**record, **changes} for record in part["ranges"]]}

    families = {name: changed(family) for name, family in manifest["families"].items()}
    return {**changed(manifest), "families": families}


def with_calls(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the manifest with something changed in every record of every family."""
    families = {
        name: {**family, "kernels": [{**record, **changes} for record in family["kernels"]]}
        for name, family in manifest["families"].items()
    }
    return {**manifest, "families": families}


BROKEN_FAMILIES: dict[str, tuple[Any, str]] = {
    **{
        f"family {field} {value!r:.20}": (
            lambda m, change={field: value}: with_families(m, **change),
            "malformed: family rmsnorm: ",
        )
        for field, value in (
            *(("arguments", value) for value in (7, [7], [{}], None)),
            *(("sizes", value) for value in (7, {"m": "7"}, {"m": 1.5}, {})),
            *(("options", value) for value in (7, None)),
        )
    },
    **{
        f"argument {field} {value!r:.20}": (
            lambda m, change={field: value}: with_argument(m, **change),
            "malformed: family rmsnorm: ",
        )
        for field, value in (
            *(("name", value) for value in (7, None, "x", ["x"])),
            *(("kind", value) for value in ("input", 7, None, "launch")),
            *(("dims", value) for value in (["k"], 7, [["m"]], None, [])),
            *(("optional", value) for value in (1, None)),
            *(("may_alias", value) for value in ([7], 7, None)),
            *(("align_bytes", value) for value in (0, 7, 32, "8", True, None)),
        )
    },
    **{
        f"call {field} {value!r:.20}": (
            lambda m, change={field: value}: with_calls(m, **change),
            "malformed: the record of rmsnorm",
        )
        for field, value in (
            *(("dtypes", value) for value in (7, None, {"x": "bf16"}, {"x": 7}, {"nobody": "bf16"})),
            *(("options", value) for value in (7, None)),
            *(("unaligned", value) for value in (0, None, "yes")),
            *(("symbol", value) for value in ("", "../x", 7)),
            *(("library", value) for value in ("../x.so", "kernels/other.so")),
            *(("scalars", value) for value in (7, ["7"], [2**70])),
            *(("workspace_bytes", value) for value in (-1, 1.5)),
            ("zeroed", 7),
        )
    },
    "families of a kind": (lambda m: {**m, "families": [1]}, "malformed: TypeError: families is no dict"),
    "a family of a kind": (
        lambda m: {**m, "families": {"rmsnorm": 7}},
        "malformed: family rmsnorm: TypeError",
    ),
    "a call of a kind": (lambda m: with_families(m, kernels=[7]), "malformed: family rmsnorm: TypeError"),
    "sizes of a call": (lambda m: with_calls(m, sizes=[[7]]), "malformed: family rmsnorm: TypeError"),
    "no second part": (
        lambda m: {**m, "files": {k: v for k, v in m["files"].items() if k != "family_calls.py"}},
        "malformed: its files do not list 'family_calls.py'",
    ),
}


BROKEN_RANGES: dict[str, dict[str, Any]] = {
    **{f"steps {value!r:.20}": {"steps": value} for value in (7, None, [7], [[]], [["a", 0, 0, False, []]])},
    **{
        f"one step {step!r:.30}": {"steps": [step]}
        for step in (
            [300, 9, 0, False, []],
            [300, "0", 0, False, []],
            [300, 0, -1, False, []],
            [300, 0, "0", False, []],
            [300, 0, 0, 7, []],
            [300, 0, 0, False, ["7"]],
            [300, 0, 0, False, [2**70]],
            [300, 0, 0, False, 7],
            [300, 0, 0, False],
        )
    },
    **{f"kernels {value!r:.20}": {"kernels": value} for value in (7, None, [7], [], [{}])},
    "a kernel outside": {"kernels": [{"symbol": "x", "library": "../x.so", "source": "kernels/x.py"}] * 2},
    **{f"first {value!r}": {"first": value} for value in (None, "1", [])},
    **{f"multiple_of {value!r}": {"multiple_of": value} for value in (0, None, "1")},
}


@pytest.mark.parametrize("name", BROKEN_RANGES)
def test_a_malformed_range_is_refused_by_name(field: Field, name: str) -> None:
    """By the call that would use it; all others are answered."""
    said = field.use(json.dumps(with_ranges(json.loads(field.text), **BROKEN_RANGES[name])).encode())
    assert said[:-2] == ["answered"] * (len(field.lines) - 2)
    for text in said[-2:]:
        assert re.match(
            r"(manifest\.json in .* is malformed: the (range|record of) |.* is missing in )", text
        ), text


@pytest.mark.parametrize("name", BROKEN_FAMILIES)
def test_a_malformed_family_is_refused_by_name(field: Field, name: str) -> None:
    """As a malformed manifest; the GEMMs beside it are still answered if the manifest is one."""
    change, message = BROKEN_FAMILIES[name]
    said = field.use(json.dumps(change(json.loads(field.text))).encode())
    assert re.match(rf"manifest\.json in .* is {message}", said[min(len(LINES), len(said) - 1)]), said
    assert len(said) == 1 or said[: len(LINES)] == ["answered"] * len(LINES)


def test_a_manifest_names_no_file_outside(field: Field) -> None:
    """Not even to be read: verify() goes by the same names."""
    manifest = json.loads(field.text)
    manifest["files"]["../mine.txt"] = hashlib.sha256(b"mine").hexdigest()
    text = json.dumps(manifest).encode()
    assert field.use(text) == ["answered"] * len(field.lines)
    with pytest.raises(field.module.PinnedError, match=r"malformed: its files do not list '\.\./mine\.txt'"):
        field.module.Deployment(field.folder).verify()


# --- at random ---

NASTY: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        7,
        2**63,
        2**70,
        1.5,
        1e308,
        float("nan"),
        "",
        "*",
        "a\0b",
        "\ud800",
        "x" * 300,
    ),
    *("../../mine.txt", "/etc/passwd", "kernels/../../mine.txt", "kernels/x.so", "table.json", "pinned.py"),
    *([], {}, [[]], [1, "2"], {"a": {}}, "0" * 64),
]
SNIPPETS = [
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b"\xff\xfe",
    b"\0",
    b'"',
    b"}",
    b",",
    b"null",
    b"1e999",
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container below ``value`` with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@st.composite
def structures(draw: st.DrawFn, text: bytes) -> bytes:
    """Return the manifest with a few values replaced, removed, renamed or exchanged."""
    manifest = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(manifest))
        if not found:
            break
        holder, key = draw(st.sampled_from(found))
        other, name = draw(st.sampled_from(found))
        way = draw(st.sampled_from(["replace", "remove", "rename", "copy"]))
        if way == "replace":
            holder[key] = draw(st.sampled_from(NASTY))
        elif way == "copy":
            holder[key] = json.loads(json.dumps(other[name]))
        else:
            value = holder.pop(key)
            if way == "rename" and isinstance(holder, dict):
                holder[str(draw(st.sampled_from(NASTY)))] = value
    return json.dumps(manifest).encode()


@st.composite
def texts(draw: st.DrawFn, text: bytes) -> bytes:
    """Return the manifest with bytes cut out, changed or put in."""
    start, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    way = draw(st.sampled_from(["cut", "end", "insert", "flip"]))
    if way == "flip" and start < len(text):
        return text[:start] + bytes([text[start] ^ 1 << draw(st.integers(0, 7))]) + text[start + 1 :]
    if way == "insert":
        return text[:start] + draw(st.sampled_from(SNIPPETS)) + text[start:]
    return text[:start] + (text[end:] if way == "cut" else b"")


@settings(FUZZ, max_examples=300)
@given(st.data())
def test_any_manifest_ends_in_an_answer_or_an_error_of_the_loader(field: Field, data: st.DataObject) -> None:
    """Another exception would end this test; nothing in or beside the folder changes."""
    text = data.draw(st.one_of(structures(field.text), texts(field.text)))
    before = contents(field.root)
    field.use(text)
    after = contents(field.root)
    assert before.pop("deploy/manifest.json") is not None and after.pop("deploy/manifest.json") == text
    assert after == before


def test_the_fuzzed_calls_are_answered_when_nothing_is_changed(field: Field) -> None:
    """So that answers are among what the test above sees."""
    assert field.use(field.text) == ["answered"] * len(field.lines)


@settings(FUZZ, max_examples=150)
@given(st.data())
def test_no_manifest_makes_pinning_remove_what_it_did_not_write(small: Field, data: st.DataObject) -> None:
    """In the place of the deployment and in what seems left over, sealed, and with a file of one's own."""
    name = data.draw(st.sampled_from(["deploy", ".deploy.0123456789ab", ".deploy.0123456789ab.old"]))
    text = data.draw(st.one_of(structures(small.text), texts(small.text), st.just(small.text)))
    mine = data.draw(st.sampled_from(["", "app.py", "kernels/app.py", "data/app.py", "__pycache__/app.pyc"]))
    scratch = small.root.parent / "scratch"
    shutil.copytree(small.root, scratch)
    (scratch / "deploy").rename(scratch / name)
    (scratch / name / "manifest.json").write_bytes(text)
    (scratch / name / "pinned.py").write_bytes(sealed(loader_text(), text))
    if mine:
        (scratch / name / mine).parent.mkdir(exist_ok=True)
        (scratch / name / mine).write_text("mine")
    before = contents(scratch)
    try:
        pin_table(small.table, scratch / "deploy", kernels=small.workshop.kernels())
    except PinError:
        assert contents(scratch) == before
    after = contents(scratch)
    shutil.rmtree(scratch)
    assert after["mine.txt"] == b"mine"
    assert not mine or after[f"{name}/{mine}"] == b"mine"
