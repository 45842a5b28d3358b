"""Artifacts in one tar file, for machines without a compiler; importing it checks every byte."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from cutegen.build.artifact import OBJECT, SOURCE, Artifact, from_entry
from cutegen.build.store import LIBRARY, META, KeyLock, Store, StoredEntry, file_digest
from cutegen.build.toolchain import host_name, host_runs, is_artifact_key
from cutegen.digest import Json
from cutegen.errors import BuildError, StoreError
from cutegen.system.documents import parse_json
from cutegen.system.publish import publishing
from cutegen.text import shown

__all__ = ["Bundle", "Packed", "export_bundle", "open_bundle"]

FORMAT = 1
MANIFEST = "manifest.json"
#: Most bytes of each file. Source: judgement; a library has about 0.1 MB, a source 0.06 MB.
LIMITS = {SOURCE: 2**22, META: 2**20, OBJECT: 2**26, LIBRARY: 2**26}
MANIFEST_LIMIT = 2**26
#: Most bytes of a bundle. Source: judgement; room for some 10,000 artifacts.
BUNDLE_LIMIT = 2**32
_CHUNK = 2**20
_ARCH = re.compile(r"sm_\d+[a-z]?", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Packed:
    """An artifact in a bundle.

    Attributes:
        artifact: What its ``meta.json`` says; its folder is its place inside the bundle.
        text_digest: The SHA-256 of its ``kernel.py``, 64 hexadecimal digits.
    """

    artifact: Artifact
    text_digest: str


# --- out ---


def export_bundle(path: Path, store: Store, artifacts: Iterable[Artifact], manifest: Json) -> None:
    """Write ``artifacts`` and the caller's ``manifest`` into the tar file ``path``.

    Raises:
        BuildError: The bundle would be larger than one may be.
        StoreError: An artifact is not (or no longer) in the store, or the file cannot be written.
    """
    entries: list[StoredEntry] = []
    for artifact in artifacts:
        entry = store.find(artifact.arch, artifact.key)
        if entry is None:
            raise StoreError(f"artifact {artifact.key} is not in {store.root}; build it again")
        entries.append(entry)
    with publishing(path, "bundle") as file:
        with _plain_tar(file) as tar:
            _write(tar, entries, manifest)
        if file.tell() > BUNDLE_LIMIT:
            raise BuildError(f"bundle {path} would pass {BUNDLE_LIMIT} bytes; export fewer candidates")


def _plain_tar(file: IO[bytes]) -> tarfile.TarFile:
    """A tar file of plain headers, the only ones that :class:`Bundle` reads."""
    return tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)


def _write(tar: tarfile.TarFile, entries: list[StoredEntry], manifest: Json) -> None:
    listed: list[Json] = []
    for entry in entries:
        files = {name: file_digest(entry.folder / name) for name in sorted(LIMITS)}
        listed.append({"arch": entry.arch, "key": entry.key, "files": files})
    head = json.dumps({"format": FORMAT, "manifest": manifest, "entries": listed}, indent=1).encode() + b"\n"
    _add(tar, MANIFEST, io.BytesIO(head), len(head))
    for entry in entries:
        for name in sorted(LIMITS):
            with (entry.folder / name).open("rb") as file:
                _add(tar, f"{entry.arch}/{entry.key}/{name}", file, os.fstat(file.fileno()).st_size)


def _add(tar: tarfile.TarFile, name: str, file: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    tar.addfile(member, file)


# --- in ---


@contextmanager
def open_bundle(path: Path) -> Iterator[Bundle]:
    """Open the bundle ``path`` and check all of it; nothing is written anywhere until :meth:`Bundle.adopt`.

    Raises:
        BuildError: The file is no bundle, was changed, or was built for another kind of CPU.
        StoreError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield Bundle(path, file)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read bundle {path}: {error.strerror or error}") from error


class Bundle:
    """An open bundle: each file that its manifest lists is there, as it was written, and there is no other.

    Use :func:`open_bundle`. Files are read in pieces, so that memory does not grow with them.

    Attributes:
        manifest: The caller's manifest.
        packed: The artifacts.

    Raises:
        BuildError: It is not that; see :func:`open_bundle`.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        if self._size > BUNDLE_LIMIT:
            raise BuildError(f"{path} is not a bundle: it has {self._size} bytes, more than {BUNDLE_LIMIT}")
        members = self._members()
        name, at, size = next(members, ("", 0, 0))
        if name != MANIFEST or size > MANIFEST_LIMIT:
            raise BuildError(f"{path} is not a bundle: it does not start with {MANIFEST}")
        self.manifest, self._wanted = _parse_head(self._read(at, size), path)
        self._places = self._placed(members)
        for member in self._wanted:
            self._copy(member)
        entries = dict.fromkeys(tuple(member.split("/")[:2]) for member in self._wanted)
        self.packed = tuple(self._packed(arch, key) for arch, key in entries)

    def _members(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, place and size of each member; only plain headers of plain files are understood.

        Extensions (long names, sparse files, pax records) would let a header say more than the file holds.
        """
        path, at = self._path, 0
        while True:
            header = self._read(at, tarfile.BLOCKSIZE)
            if len(header) < tarfile.BLOCKSIZE:
                raise BuildError(f"{self._path} is not a bundle, or it is cut short")
            at += tarfile.BLOCKSIZE
            if not any(header):
                break
            try:
                member = tarfile.TarInfo.frombuf(header, "ascii", "surrogateescape")
            except (tarfile.TarError, ValueError) as error:
                raise BuildError(f"{path} is not a bundle: {error}") from error
            if member.type != tarfile.REGTYPE:
                raise BuildError(
                    f"bundle {path} holds {shown(member.name)}, which is not a plain file of a bundle"
                )
            if not 0 <= member.size <= self._size - at:
                raise BuildError(f"bundle {path} is cut short in {shown(member.name)}")
            yield member.name, at, member.size
            at += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if self._size - at > 2 * tarfile.RECORDSIZE or any(self._read(at, self._size - at)):
            raise BuildError(f"bundle {path} goes on behind its end")

    def _read(self, at: int, size: int) -> bytes:
        self._file.seek(at)
        return self._file.read(size)

    def _placed(self, members: Iterator[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
        """Return place and size of each file that the manifest lists; the sizes are within the limits."""
        found: dict[str, tuple[int, int]] = {}
        for name, at, size in members:
            if name not in self._wanted or name in found:
                raise BuildError(f"bundle {self._path} holds {shown(name)}, which its manifest does not list")
            limit = LIMITS[name.rpartition("/")[2]]
            if size > limit:
                raise BuildError(f"bundle {self._path}: {name} has {size} bytes, more than {limit}")
            found[name] = at, size
        missing = sorted(self._wanted.keys() - found.keys())
        if missing:
            raise BuildError(
                f"bundle {self._path} lacks {missing[0]}, which its manifest lists; it may be cut short"
            )
        return found

    def _copy(self, name: str, target: IO[bytes] | None = None) -> None:
        """Read a file piece by piece, write it to ``target`` if given, and compare its digest."""
        at, left = self._places[name]
        running = hashlib.sha256()
        self._file.seek(at)
        while left and (piece := self._file.read(min(left, _CHUNK))):
            running.update(piece)
            left -= len(piece)
            if target is not None:
                target.write(piece)
        if running.hexdigest() != self._wanted[name]:
            raise BuildError(f"bundle {self._path}: {name} has changed since it was written")

    def _packed(self, arch: str, key: str) -> Packed:
        meta = self._meta(arch, key)
        folder = Path(arch) / key
        files = {name: self._wanted[f"{arch}/{key}/{name}"] for name in LIMITS}
        own = {"key": key, "arch": arch, "files": {n: sha for n, sha in files.items() if n != META}}
        try:
            if any(meta.get(field) != value for field, value in own.items()):
                raise BuildError(f"{folder / META} is that of another artifact")
            artifact = from_entry(StoredEntry(arch, key, folder, meta))
        except BuildError as error:
            raise BuildError(f"bundle {self._path}: {error}") from error
        if not isinstance(artifact, Artifact):
            raise BuildError(
                f"bundle {self._path} holds {folder}, a build that failed ({artifact.outcome}), not a kernel"
            )
        built_for = artifact.toolchain.host
        if not host_runs(built_for):
            raise BuildError(
                f"bundle {self._path} was built for {built_for}, "
                f"which this machine ({host_name()}) cannot run"
            )
        return Packed(artifact, files[SOURCE])

    def _meta(self, arch: str, key: str) -> Mapping[str, Json]:
        name, data = f"{arch}/{key}/{META}", io.BytesIO()
        self._copy(name, data)
        meta = parse_json(data.getvalue(), f"bundle {self._path}: {name}", malformed=BuildError)
        if not isinstance(meta, dict):
            raise BuildError(f"bundle {self._path}: {name} is not an object")
        return meta

    def adopt(self, store: Store, about: Mapping[str, Mapping[str, Json]]) -> None:
        """Put the artifacts into ``store``: all of them, or after an error none.

        They keep the keys they were built with; those that the store has already stay as they are.

        Args:
            store: Where they go.
            about: What their ``meta.json`` shall say of the origin of each, by key.

        Raises:
            BuildError: The file has changed since it was opened.
            StoreError: The store cannot be written.
        """
        adopted: list[Artifact] = []
        try:
            for each in self.packed:
                artifact = each.artifact
                with store.lock(artifact.arch, artifact.key) as lock:
                    if not _is_there(store, artifact):
                        adopted.append(artifact)
                        self._publish(store, lock, artifact, about[artifact.key])
        except BaseException:
            for artifact in adopted:
                with suppress(StoreError):
                    store.discard(artifact.arch, artifact.key)
            raise

    def _publish(self, store: Store, lock: KeyLock, artifact: Artifact, about: Mapping[str, Json]) -> None:
        staged = store.stage(lock)
        try:
            for name in LIMITS.keys() - {META}:
                with (staged / name).open("xb") as target:
                    self._copy(f"{artifact.arch}/{artifact.key}/{name}", target)
            store.publish(lock, {**about, **artifact.to_meta()})
        except BaseException as error:
            store.unstage(lock)
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise StoreError(f"cannot write to {store.root}: {error.strerror or error}") from error
            raise


def _is_there(store: Store, artifact: Artifact) -> bool:
    """Whether the store has the artifact, for holders of its lock."""
    entry = store.read(artifact.arch, artifact.key)
    try:
        return entry is not None and isinstance(from_entry(entry), Artifact)
    except BuildError:
        return False


def _parse_head(data: bytes, path: Path) -> tuple[Json, dict[str, str]]:
    """Return the caller's manifest, and the SHA-256 of each file by its name in the tar."""
    where = f"{path} is not a bundle: its {MANIFEST}"
    try:
        head = cast("Mapping[str, Any]", parse_json(data, where, malformed=BuildError))
        if head["format"] != FORMAT:
            form = shown(head["format"])
            raise BuildError(f"bundle {path} has format {form}; this version reads {FORMAT}")
        wanted: dict[str, str] = {}
        for entry in head["entries"]:
            arch, key, files = entry["arch"], entry["key"], entry["files"]
            # Names are put together here from checked parts, so none can point outside the store.
            if not _ARCH.fullmatch(arch) or not is_artifact_key(key) or set(files) != set(LIMITS):
                raise BuildError(f"bundle {path} lists an entry of unknown form: {shown(arch)}/{shown(key)}")
            if f"{arch}/{key}/{META}" in wanted:
                raise BuildError(f"bundle {path} lists {arch}/{key} twice")
            if not all(_DIGEST.fullmatch(sha) for sha in files.values()):
                raise BuildError(f"bundle {path} lists an entry of unknown form: {arch}/{key}")
            wanted.update({f"{arch}/{key}/{name}": sha for name, sha in files.items()})
        return head["manifest"], wanted
    except KeyError as error:
        raise BuildError(f"{where} is malformed: it lacks {shown(error.args[0])}") from error
    except (TypeError, AttributeError) as error:
        raise BuildError(f"{where} is malformed: a value in it has the wrong type") from error
