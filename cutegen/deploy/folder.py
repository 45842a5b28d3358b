"""The folder of a deployment: which of its files are ours, and how a new one takes its place.

No file is removed unless a manifest of ours lists it with the SHA-256 that it has. A new deployment is
written beside the old one, under a name of its own, and the two folders are exchanged.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cutegen.build.store import file_digest
from cutegen.deploy.manifest import KERNELS, MANIFEST, is_pinned_name
from cutegen.deploy.shipped_loader import LOADER, changed_of_pair
from cutegen.errors import PinError
from cutegen.system.documents import read_json
from cutegen.system.publish import real_path

__all__ = ["SCHEMA", "ready_place", "replace_folder"]

SCHEMA = 2
#: Python writes these when it imports a file, and can write them again.
_BYTECODE = re.compile(r"(?P<stem>\w+)\.[\w.+-]+\.pyc(\.\d+)?")
_FOLDERS = (f"{KERNELS}/__pycache__", "__pycache__", KERNELS)
_ASIDE = ".old"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h
_log = logging.getLogger("cutegen")


def ready_place(out: Path) -> Path:
    """Return the folder that ``out`` stands for, if a deployment may be written there.

    What a killed process left beside it is removed first, or put back where it had been moved aside.

    Args:
        out: Nothing yet, an empty folder, a deployment that nobody changed, or a link to such a place.

    Raises:
        PinError: It is anything else; the message names the files that would be lost.
        StoreError: No file can have that name.
        OSError: It cannot be read.
    """
    place = real_path(out)
    if place.is_symlink():
        raise PinError(f"{out} is a circle of links")
    if place.is_mount():
        raise PinError(f"{out} is a mount point, which cannot be replaced; name a folder below it")
    if place.parent.is_dir():
        with _alone(place.parent) as alone:
            if alone:
                _sweep(place)
            _require(place, out)
    return place


def replace_folder(place: Path, out: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` into the folder ``place``, whole or not at all; a deployment that was there is removed.

    Args:
        place: As :func:`ready_place` returned it.
        out: What to call it in messages.
        files: Contents by name: first the manifest, which the removal after a failure goes by, and last the
            loader, without which nobody uses the folder, with its bytecode.

    Raises:
        PinError: Files that are not ours have appeared in ``place``; they are left there.
        OSError: The folder cannot be written or replaced; what was there is left.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(place.parent):
        staged = place.with_name(f".{place.name}.{uuid.uuid4().hex[:12]}")
        try:
            _write(staged, files)
            _publish(staged, place, out)
        except BaseException:
            _remove_own(staged)
            raise
        _remove_own(staged)


@contextmanager
def _alone(parent: Path) -> Iterator[bool]:
    """Let one process at a time write deployments into ``parent``; says whether that can be had there."""
    handle = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # of the folder itself, so that no lock file stays behind
            alone = True
        except OSError:
            alone = False  # as on NFS
        yield alone
    finally:
        os.close(handle)


def _write(staged: Path, files: Mapping[str, bytes]) -> None:
    staged.mkdir()
    (staged / KERNELS).mkdir()
    for name, data in files.items():
        (staged / name).parent.mkdir(exist_ok=True)
        try:
            with (staged / name).open("xb") as file:
                file.write(data)
        except BaseException:
            (staged / name).unlink(missing_ok=True)  # a manifest that is cut off would not be known as ours
            raise


# --- one folder in the place of another ---


def _publish(staged: Path, place: Path, out: Path) -> None:
    """Put ``staged`` in the place of ``place``; where a deployment was there, ``staged`` is that one then."""
    if place.is_dir():
        shutil.copymode(place, staged)
    try:
        staged.rename(place)  # nothing is there, or an empty folder
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _exchange(staged, place)
    try:
        _own_files(staged, out)  # once more: compiling takes time, in which files may have come
    except BaseException:
        _exchange(staged, place)
        raise


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders: in one step where the file system can, else so that ``other`` is never lost."""
    if _exchange_at_once(one, other):
        return
    aside = one.with_name(one.name + _ASIDE)
    try:
        other.rename(aside)
        one.rename(other)
    except BaseException:
        if aside.exists() and not other.exists():
            aside.rename(other)
        raise
    aside.rename(one)


def _exchange_at_once(one: Path, other: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


# --- what is ours ---


def _require(place: Path, out: Path) -> None:
    for folder in (place.parent, place, place / KERNELS):
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise PinError(f"{out} cannot be written: no permission to write in {folder}")
    if place.is_dir():
        _own_files(place, out)
    elif place.exists():
        raise PinError(f"{out} is a file; name a new or empty folder")


def _sweep(place: Path) -> None:
    """Remove the folders beside ``place`` that are certainly ours: by name, owner and manifest."""
    name = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{12}}(?P<aside>{re.escape(_ASIDE)})?")
    for path in sorted(place.parent.iterdir()):
        found = name.fullmatch(path.name)
        if found is None or not _is_own_folder(path):
            continue
        if found["aside"] and not os.path.lexists(place):
            _put_back(path, place)
        else:
            _remove_own(path)


def _is_own_folder(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _put_back(aside: Path, place: Path) -> None:
    """Rename a whole deployment to ``place``; anything else stays where it is, with a warning."""
    try:
        _own_files(aside, aside)
        aside.rename(place)
    except (OSError, PinError) as error:
        _log.warning("%s was not put back as %s: %s", aside, place, error)


def _remove_own(folder: Path) -> None:
    """Remove a deployment, whole or in part; one that holds anything else stays, with a warning."""
    try:
        if not folder.exists():
            return
        for name in _own_files(folder, folder, leftover=True):
            (folder / name).unlink()
        for name in _FOLDERS:
            if (folder / name).exists():
                (folder / name).rmdir()
        folder.rmdir()
    except (OSError, PinError) as error:
        _log.warning("%s is left over from pinning and was not removed: %s", folder, error)


def _own_files(folder: Path, out: Path, *, leftover: bool = False) -> list[str]:
    """Return the names of a deployment's files, in the order in which they may be removed.

    Args:
        folder: A folder.
        out: What to call it in messages.
        leftover: It may be the remains of a deployment that was being written or removed. Without its loader
            nobody has used it, or uses it any more, so files may be cut off.

    Raises:
        PinError: Some file is not ours, or no longer as it was; the message names it.
        OSError: The folder cannot be read.
    """
    found = list(_walk(folder, ""))
    if not found and (leftover or not any(folder.iterdir())):
        return []
    if MANIFEST not in found:
        raise PinError(f"{out} exists and is no deployment; name a new or empty folder")
    files, loader = _read_manifest(folder / MANIFEST, out)
    listed = {*files, MANIFEST, LOADER}
    foreign = [name for name in found if name not in listed and not _is_bytecode(name, listed)]
    if foreign:
        raise PinError(f"{out} cannot be replaced: cutegen did not write {_some(foreign)}; move that away")
    if LOADER in found or not leftover:
        changed = [name for name in files if name in found and file_digest(folder / name) != files[name]]
        changed += changed_of_pair(folder, loader)
        if changed:
            raise PinError(
                f"{out} cannot be replaced: {_some(changed)} changed since it was pinned; move {out} away"
            )
    last = [LOADER, MANIFEST]
    return [name for name in found if name not in last] + [name for name in last if name in found]


def _walk(folder: Path, inside: str) -> Iterator[str]:
    """Yield the files below ``folder`` by name, and whatever no deployment has, marked as what it is."""
    with os.scandir(folder / inside) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = inside + entry.name
            if not entry.is_dir(follow_symlinks=False):
                regular = entry.is_file(follow_symlinks=False)
                yield name if regular else f"{name} (a link or special file)"
            elif name in _FOLDERS and not os.path.ismount(entry.path):
                yield from _walk(folder, f"{name}/")
            else:
                yield f"{name}/"


def _read_manifest(path: Path, out: Path) -> tuple[dict[str, str], str]:
    """Return what a manifest of ours lists, with digests, and the digest of its loader.

    Raises:
        PinError: It is none, or malformed.
    """

    def foreign(why: str) -> PinError:
        return PinError(
            f"{out} holds a {MANIFEST} that is not of this version of cutegen ({why}), so nothing there is "
            "replaced; move the folder away, or name a new or empty one"
        )

    manifest = read_json(path, "the file", malformed=foreign, unreadable=foreign)
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise foreign(f"its schema is not {SCHEMA}")
    files, loader = manifest.get("files"), manifest.get("loader")
    if not isinstance(files, dict) or not all(map(_is_digest, [loader, *files.values()])):
        raise foreign("it does not list files with their digests")
    if not all(map(is_pinned_name, files)):
        raise foreign("it lists files that no deployment has")
    return files, str(loader)


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None


def _is_bytecode(name: str, listed: set[str]) -> bool:
    """Whether ``name`` is what Python keeps of a listed source."""
    folder, _, file = name.rpartition("__pycache__/")
    found = _BYTECODE.fullmatch(file)
    return folder in ("", f"{KERNELS}/") and found is not None and f"{folder}{found['stem']}.py" in listed


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
