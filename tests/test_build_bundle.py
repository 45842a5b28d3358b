"""Bundles: what arrives is what was sent, or nothing; no file leaves the store's folders."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from samples import source

from cutegen.build import (
    Artifact,
    Builder,
    Toolchain,
    artifact_key,
    bundle,
    export_bundle,
    find_result,
    from_entry,
    open_bundle,
    symbol_of,
)
from cutegen.build.kernel_resources import KernelResources, Resources
from cutegen.build.store import Store
from cutegen.digest import Json
from cutegen.errors import BuildError, StoreError

MANIFEST = {"problem": "gemm 64x64x64 bf16 kk", "configs": [1, 2]}


def make(store: Store, text: str, toolchain: Toolchain | None = None) -> Artifact:
    """Publish an artifact whose library is no library."""
    tools = toolchain or Toolchain.current()
    wanted = source(text)
    key = artifact_key(wanted, tools)
    with store.lock(wanted.arch, key) as lock:
        staged = store.stage(lock)
        for name in ("kernel.py", "kernel.o", "kernel.so"):
            (staged / name).write_text(f"{name} {text}")
        meta = {
            "outcome": "ok",
            "symbol": symbol_of(key),
            "source_digest": wanted.digest,
            "toolchain": tools.to_json(),
            "resources": Resources.of((KernelResources(8, threads=32, name="k"),)).to_json(),
            "build_s": 0.5,
        }
        result = from_entry(store.publish(lock, meta))
    assert isinstance(result, Artifact)
    return result


def import_bundle(path: Path, store: Store) -> tuple[Json, list[Artifact]]:
    """Adopt what is in a bundle whatever its manifest says; return that, and what the store then has."""
    with open_bundle(path) as opened:
        keys = [packed.artifact.key for packed in opened.packed]
        opened.adopt(store, {key: {} for key in keys})
    found = [find_result(store, "sm_90a", key) for key in keys]
    return opened.manifest, [result for result in found if isinstance(result, Artifact)]


@pytest.fixture
def sent(tmp_path: Path) -> tuple[Path, list[Artifact]]:
    store = Store(tmp_path / "here")
    artifacts = [make(store, "a"), make(store, "b")]
    export_bundle(tmp_path / "out" / "bundle.tar", store, artifacts, MANIFEST)
    return tmp_path / "out" / "bundle.tar", artifacts


def test_a_bundle_brings_manifest_artifacts_and_keys_across(
    sent: tuple[Path, list[Artifact]], tmp_path: Path
) -> None:
    path, artifacts = sent
    store = Store(tmp_path / "there")
    for _ in range(2):  # the second time it is all there already
        manifest, got = import_bundle(path, store)
        assert manifest == MANIFEST
        assert {a.key for a in got} == {a.key for a in artifacts} == set(store.keys("sm_90a"))
        for artifact in got:
            assert artifact.folder == store.folder("sm_90a", artifact.key)
            [origin] = [a for a in artifacts if a.key == artifact.key]
            assert artifact.shared_object.read_bytes() == origin.shared_object.read_bytes()
            assert (artifact.resources, artifact.symbol) == (origin.resources, origin.symbol)
            assert store.find("sm_90a", artifact.key) is not None


def test_an_empty_bundle_carries_its_manifest(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    export_bundle(tmp_path / "b.tar", store, [], MANIFEST)
    assert import_bundle(tmp_path / "b.tar", store) == (MANIFEST, [])


def test_exporting_what_is_gone_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    artifact = make(store, "a")
    store.discard("sm_90a", artifact.key)
    with pytest.raises(StoreError, match="build it again"):
        export_bundle(tmp_path / "b.tar", store, [artifact], MANIFEST)
    assert not (tmp_path / "b.tar").exists()


def repack(path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    with tarfile.open(path) as tar:
        members = [(m, (tar.extractfile(m) or io.BytesIO()).read()) for m in tar]
    change(members)
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def flip_byte(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members[2] = (members[2][0], b"X" + members[2][1][1:])


def drop_file(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    del members[-1]


def add_outside(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append((tarfile.TarInfo("../../evil"), b"x"))


def add_twice(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append(members[1])


def make_special(kind: bytes, target: str = "") -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        info = tarfile.TarInfo(members[1][0].name)
        info.type, info.linkname = kind, target or members[2][0].name
        members[1] = (info, b"")

    return change


def list_twice(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    head = json.loads(members[0][1])
    head["entries"].append(head["entries"][0])
    members[0] = (members[0][0], json.dumps(head).encode())


def replace_head(data: bytes) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[0] = (members[0][0], data)

    return change


def change_head(**changes: object) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        head = json.loads(members[0][1])
        for name, value in changes.items():
            if name in head:
                head[name] = value
            else:
                head["entries"][0][name] = value
        members[0] = (members[0][0], json.dumps(head).encode())

    return change


def no_head(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    del members[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_byte, "kernel.py|kernel.so|kernel.o|meta.json.* has changed"),
        (drop_file, "lacks .*cut short"),
        (add_outside, r"'\.\./\.\./evil', which its manifest does not list"),
        (add_twice, "does not list"),
        (make_special(tarfile.SYMTYPE, "/etc/passwd"), "not a plain file"),
        (make_special(tarfile.LNKTYPE), "not a plain file"),
        (make_special(tarfile.FIFOTYPE), "not a plain file"),
        (make_special(tarfile.CHRTYPE), "not a plain file"),
        (make_special(tarfile.DIRTYPE), "not a plain file"),
        (no_head, "does not start with manifest.json"),
        (change_head(format=99), "format 99; this version reads 1"),
        (change_head(key="../../../../etc"), "unknown form"),
        (change_head(arch=".."), "unknown form"),
        (change_head(files={"../evil": "0"}), "unknown form"),
        (change_head(entries=3), r"malformed: a value in it has the wrong type$"),
        (change_head(entries=[{}]), "malformed: it lacks 'arch'$"),
        (change_head(entries=[3]), "malformed"),
        (change_head(key=["a"]), "malformed"),
        (change_head(files=dict.fromkeys(bundle.LIMITS, "0" * 63)), "unknown form"),
        (change_head(files=dict.fromkeys(bundle.LIMITS, 3)), "malformed"),
        (list_twice, r"lists sm_90a/\w+ twice"),
        (replace_head(b"[" * 100_000), "nested too deeply"),
        (replace_head(b"1" * 5000), "5000 digits"),
        (replace_head(b"\xff"), "is not UTF-8"),
        (replace_head(b"null"), "malformed"),
    ],
)
def test_a_tampered_bundle_is_refused_and_nothing_of_it_arrives(
    sent: tuple[Path, list[Artifact]],
    tmp_path: Path,
    change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None],
    message: str,
) -> None:
    repack(sent[0], change)
    store = Store(tmp_path / "there")
    with pytest.raises(BuildError, match=message):
        import_bundle(sent[0], store)
    assert not store.root.exists() and not (tmp_path / "evil").exists()


def test_a_bundle_that_is_cut_short_is_refused(sent: tuple[Path, list[Artifact]], tmp_path: Path) -> None:
    data = sent[0].read_bytes()
    with tarfile.open(sent[0]) as tar:
        last = tar.getmembers()[-1].offset_data
    for size in (0, 100, 3000, last - 512, last + 1):
        sent[0].write_bytes(data[:size])
        with pytest.raises(BuildError, match="bundle"):
            import_bundle(sent[0], Store(tmp_path / "there"))


def test_nothing_may_follow_the_end_of_a_bundle(sent: tuple[Path, list[Artifact]], tmp_path: Path) -> None:
    for tail in (b"x", bytes(2**20)):
        data = sent[0].read_bytes()
        sent[0].write_bytes(data + tail)
        with pytest.raises(BuildError, match="goes on behind its end"):
            import_bundle(sent[0], Store(tmp_path / "there"))
        sent[0].write_bytes(data)


def test_a_bundle_that_is_too_large_is_neither_read_nor_written(
    sent: tuple[Path, list[Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "BUNDLE_LIMIT", 1000)
    with pytest.raises(BuildError, match=r"has \d+ bytes, more than 1000"):
        import_bundle(sent[0], Store(tmp_path / "there"))
    with pytest.raises(BuildError, match="would pass 1000 bytes; export fewer"):
        export_bundle(tmp_path / "new.tar", Store(tmp_path / "here"), sent[1], MANIFEST)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "out"}


def test_a_missing_bundle_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read bundle .*No such file"):
        import_bundle(tmp_path / "none.tar", Store(tmp_path))


def test_a_bundle_for_a_better_cpu_is_refused(
    sent: tuple[Path, list[Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "host_runs", lambda built_for: False)
    with pytest.raises(BuildError, match=r"was built for linux-.* cannot run"):
        import_bundle(sent[0], Store(tmp_path / "there"))


def test_a_bundle_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"bundle .* cannot be written"):
        export_bundle(tmp_path / "file" / "b.tar", Store(tmp_path / "s"), [], None)


def test_imported_artifacts_are_found_under_the_toolchain_that_made_them(tmp_path: Path) -> None:
    elsewhere = replace(Toolchain.current(), flavour="cu99")
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    export_bundle(tmp_path / "b.tar", here, [make(here, "a", elsewhere)], None)
    _, [artifact] = import_bundle(tmp_path / "b.tar", there)
    assert artifact.toolchain == elsewhere
    assert Builder(there).find(source("a")) is None
    assert Builder(there, toolchain=artifact.toolchain).find(source("a")) == artifact
