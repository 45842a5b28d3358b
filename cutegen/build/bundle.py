"""Artifacts carried to machines without a compiler: one tar file, every byte accounted for."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

from cutegen.build.artifact import LIBRARY, OBJECT, SOURCE, Artifact, from_entry
from cutegen.build.toolchain import host_name, host_runs
from cutegen.digest import Json, digest
from cutegen.errors import BuildError, StoreError
from cutegen.store import META, Entry, Store

__all__ = ["export_bundle", "import_bundle"]

FORMAT = 1
MANIFEST = "manifest.json"
#: Most bytes of one file in a bundle; a library has about 0.1 MB.
FILE_LIMIT = 64 * 2**20
_FILES = {SOURCE, OBJECT, LIBRARY, META}
_ARCH = re.compile(r"sm_\d+[a-z]?")
_KEY = re.compile(r"[0-9a-f]{32}")


def export_bundle(path: Path, store: Store, artifacts: Iterable[Artifact], manifest: Json) -> None:
    """Write ``artifacts`` and the caller's ``manifest`` into the tar file ``path``.

    Raises:
        StoreError: An artifact is not (or no longer) in the store, or the file cannot be written.
    """
    entries: list[Entry] = []
    for artifact in artifacts:
        entry = store.find(artifact.arch, artifact.key)
        if entry is None:
            raise StoreError(f"artifact {artifact.key} is not in {store.root}; build it again")
        entries.append(entry)
    partial = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(partial, "w") as tar:
            _write(tar, entries, manifest)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise StoreError(f"cannot write bundle {path}: {error.strerror or error}") from error


def _write(tar: tarfile.TarFile, entries: list[Entry], manifest: Json) -> None:
    listed: list[Json] = []
    blobs: list[tuple[str, bytes]] = []
    for entry in entries:
        files: dict[str, Json] = {}
        for name in sorted(_FILES):
            data = (entry.folder / name).read_bytes()
            files[name] = digest(data, length=64)
            blobs.append((f"{entry.arch}/{entry.key}/{name}", data))
        listed.append({"arch": entry.arch, "key": entry.key, "files": files})
    head = {"format": FORMAT, "manifest": manifest, "entries": listed}
    for name, data in [(MANIFEST, json.dumps(head, indent=1).encode() + b"\n"), *blobs]:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def import_bundle(path: Path, store: Store) -> tuple[Json, list[Artifact]]:
    """Put the artifacts of the bundle ``path`` into ``store``; return its manifest and the artifacts.

    They keep the keys they were built with. A bundle holds native code: import only what you trust.

    Raises:
        BuildError: The file is no bundle, was changed, or was built for another kind of CPU.
        StoreError: The file cannot be read or the store cannot be written.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            return _import(tar, path, store)
    except tarfile.TarError as error:
        raise BuildError(f"{path} is not a bundle: {error}") from error
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read bundle {path}: {error.strerror or error}") from error


def _import(tar: tarfile.TarFile, path: Path, store: Store) -> tuple[Json, list[Artifact]]:
    first = tar.next()
    if first is None or first.name != MANIFEST:
        raise BuildError(f"{path} is not a bundle: it does not start with {MANIFEST}")
    manifest, wanted = _parse_head(_content(tar, first, path), path)
    found: dict[str, bytes] = {}
    for member in iter(tar.next, None):
        if member.name not in wanted or member.name in found:
            raise BuildError(f"bundle {path} holds {member.name!r}, which its manifest does not list")
        found[member.name] = _content(tar, member, path)
        if digest(found[member.name], length=64) != wanted[member.name]:
            raise BuildError(f"bundle {path}: {member.name} has changed since it was written")
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise BuildError(f"bundle {path} lacks {missing[0]}, which its manifest lists; it may be cut short")
    keys = sorted({tuple(name.split("/")[:2]) for name in wanted})
    return manifest, [_adopt(store, arch, key, found, path) for arch, key in keys]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    if not member.isreg() or member.size > FILE_LIMIT:
        raise BuildError(f"bundle {path} holds {member.name!r}, which is not a plain file of a bundle")
    stream = tar.extractfile(member)
    assert stream is not None  # a regular file
    return stream.read()


def _parse_head(data: bytes, path: Path) -> tuple[Json, dict[str, str]]:
    """The caller's manifest, and the SHA-256 of each file by its name in the tar."""
    try:
        head = json.loads(data)
        if head["format"] != FORMAT:
            raise BuildError(f"bundle {path} has format {head['format']}; this version reads {FORMAT}")
        wanted: dict[str, str] = {}
        for entry in head["entries"]:
            arch, key, files = entry["arch"], entry["key"], entry["files"]
            # Names are put together here from checked parts, so none can point outside the store.
            if not _ARCH.fullmatch(arch) or not _KEY.fullmatch(key) or set(files) != _FILES:
                raise BuildError(f"bundle {path} lists an entry of unknown form: {arch!r}/{key!r}")
            wanted.update({f"{arch}/{key}/{name}": str(sha) for name, sha in files.items()})
        return head["manifest"], wanted
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path} is not a bundle: its {MANIFEST} is malformed: {error!r}") from error


def _adopt(store: Store, arch: str, key: str, found: Mapping[str, bytes], path: Path) -> Artifact:
    meta = json.loads(found[f"{arch}/{key}/{META}"])
    built_for = str(meta.get("toolchain", {}).get("host", ""))
    if not host_runs(built_for):
        raise BuildError(
            f"bundle {path} was built for {built_for}, which this machine ({host_name()}) cannot run"
        )
    entry = store.find(arch, key)
    if entry is None:
        with store.lock(arch, key) as lock:
            staged = store.stage(lock)
            try:
                for name in _FILES - {META}:
                    (staged / name).write_bytes(found[f"{arch}/{key}/{name}"])
                entry = store.publish(lock, meta)
            except OSError as error:
                store.unstage(lock)
                raise StoreError(f"cannot write to {store.root}: {error.strerror or error}") from error
    return cast("Artifact", from_entry(entry))
