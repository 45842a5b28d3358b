"""Mutated bundles: each is imported, or refused by an error of ours and leaves nothing behind."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from bundles import HEAD, everything_in, pack, unpack, write_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutegen.build.store import Store
from cutegen.errors import CutegenError
from cutegen.tuning.transfer import Imported, import_candidates

fuzzed = settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)

#: What people and broken programs leave in JSON.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["", "sm_90a", "sm_100a", "../../etc", "/etc/passwd", "\x1b[31m", "\ud800", "0" * 32, "ok"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
KINDS = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE)
NAMES = ("../../evil", "/tmp/evil", "./evil", "sm_90a/../../evil", "a" * 300, "sm_90a", "manifest.json", "\n")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A bundle of two kernels."""
    folder = tmp_path_factory.mktemp("good")
    write_bundle(folder / "good.tar", Store(folder / "store"))
    return (folder / "good.tar").read_bytes()


@pytest.fixture(scope="module")
def files(good: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is in it."""
    path = tmp_path_factory.mktemp("files") / "good.tar"
    path.write_bytes(good)
    return unpack(path)


def check(data: bytes) -> bool:
    """Import a bundle and return whether it was taken; what the fuzz promises is asserted."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "b.tar"
        path.write_bytes(data)
        try:
            taken = isinstance(import_candidates(path, Store(Path(folder) / "cache")), Imported)
        except CutegenError:
            taken = False
        inside = everything_in(Path(folder))
        assert {name.split("/")[0] for name in inside} == ({"b.tar", "cache"} if taken else {"b.tar"})
        assert not [name for name in inside if name.endswith((".lock", ".tmp"))]
        assert path.read_bytes() == data
    return taken


def packed(files: dict[str, bytes], *, rehash: bool = True) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "b.tar"
        pack(path, files, rehash=rehash)
        return path.read_bytes()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container inside ``value``, with a key or an index of it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found += [(value, key), *places(value[key])]
    return found


def changed(document: bytes, draw: st.DataObject) -> bytes:
    """The JSON ``document`` with some of its values replaced, removed or put elsewhere."""
    value = json.loads(document)
    for _ in range(draw.draw(st.integers(1, 3))):
        container, key = draw.draw(st.sampled_from(places(value)))
        what = draw.draw(st.sampled_from(["replace", "remove", "copy"]))
        try:
            if what == "remove":
                del container[key]
            elif what == "copy":
                other, its_key = draw.draw(st.sampled_from(places(value)))
                container[key] = json.loads(json.dumps(other[its_key]))
            else:
                container[key] = draw.draw(VALUES)
        except (KeyError, IndexError):  # an earlier change removed it
            continue
        if not places(value):
            break
    return json.dumps(value).encode()


def test_the_bundle_that_is_mutated_is_good(good: bytes, files: dict[str, bytes]) -> None:
    """As it is, and taken apart and put together again."""
    assert check(good) and check(packed(files))


@fuzzed
@given(st.data())
def test_changed_bytes(good: bytes, data: st.DataObject) -> None:
    """A few bytes anywhere, mostly in the head and the headers of files; some bytes cut off or added."""
    mutated = bytearray(good)
    for _ in range(data.draw(st.sampled_from([1, 1, 3, 20]))):
        end = data.draw(st.sampled_from([6000, len(mutated)]))
        mutated[data.draw(st.integers(0, min(end, len(mutated)) - 1))] = data.draw(st.integers(0, 255))
    kept = data.draw(st.one_of(st.just(len(mutated)), st.integers(0, len(mutated))))
    check(bytes(mutated[:kept]) + data.draw(st.binary(max_size=2)))


@fuzzed
@given(st.data())
def test_changed_head(files: dict[str, bytes], data: st.DataObject) -> None:
    """Values of the manifest in the place of others, with digests that fit the files."""
    rehash = data.draw(st.booleans())
    head = changed(files[HEAD], data)
    try:
        mutated = packed({**files, HEAD: head}, rehash=rehash)
    except (KeyError, TypeError, AttributeError):  # no digests left to mend
        mutated = packed({**files, HEAD: head}, rehash=False)
    check(mutated)


@fuzzed
@given(st.data())
def test_changed_records(files: dict[str, bytes], data: st.DataObject) -> None:
    """Values of a ``meta.json``, with digests that fit; a library or a source of another kernel beside it."""
    mutated = dict(files)
    metas = [name for name in files if name.endswith("meta.json")]
    name = data.draw(st.sampled_from(metas))
    mutated[name] = changed(files[name], data)
    if data.draw(st.booleans()):
        one, other = data.draw(st.permutations([n for n in files if n != HEAD]))[:2]
        mutated[one] = files[other]
    check(packed(mutated))


@fuzzed
@given(st.data())
def test_odd_members(files: dict[str, bytes], data: st.DataObject) -> None:
    """Members that are links, devices, twice there, missing, in another order, renamed or extended."""
    members = list(files.items())
    out = io.BytesIO()
    form = data.draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    odd = data.draw(st.integers(0, len(members) - 1))
    trick = data.draw(st.sampled_from(["kind", "name", "twice", "missing", "order", "pax", "size"]))
    if trick == "missing":
        del members[odd]
    elif trick == "twice":
        members.insert(data.draw(st.integers(0, len(members))), members[odd])
    elif trick == "order":
        members = data.draw(st.permutations(members))
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for at, (name, content) in enumerate(members):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if at == odd and trick == "kind":
                member.type = data.draw(st.sampled_from(KINDS))
                member.linkname = data.draw(st.sampled_from(["/etc/passwd", "../../evil", name]))
                member.size = 0
            elif at == odd and trick == "name" and form != tarfile.USTAR_FORMAT:
                member.name = data.draw(st.sampled_from(NAMES))
            elif at == odd and trick == "pax":
                keys = st.sampled_from(
                    ["size", "path", "linkpath", "GNU.sparse.realsize", "GNU.sparse.major"]
                )
                member.pax_headers = {data.draw(keys): data.draw(st.sampled_from(["1", "x", "99999999999"]))}
            elif at == odd and trick == "size":
                member.size = data.draw(st.integers(0, len(content)))
            tar.addfile(member, io.BytesIO(content[: member.size]))
    check(out.getvalue())
