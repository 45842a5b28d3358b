"""Content-addressed folders on disk: found whole, published by one rename, locked per key."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cutegen.build.cache_trust import CacheTrust, store_failure
from cutegen.digest import Json
from cutegen.errors import StoreError
from cutegen.system.private import make_private
from cutegen.system.publish import publish, require_file_name

__all__ = ["KeyLock", "Store", "StoredEntry", "file_digest"]

#: Layout of the folders; a change of layout starts a new tree and leaves the old one alone.
LAYOUT = "v1"
META = "meta.json"
#: The library of an entry. It is run, so ``meta.json`` must list its digest.
LIBRARY = "kernel.so"
#: Seconds between two attempts at a lock that another process holds.
LOCK_POLL_S = 0.02
_ARCH = re.compile(r"[a-z0-9_]{1,32}")
_KEY = re.compile(r"[0-9a-f]{8,64}")
_log = logging.getLogger("cutegen")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, 64 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class StoredEntry:
    """One complete folder of the store.

    Attributes:
        arch: The architecture it was made for.
        key: Its name, hexadecimal.
        folder: Where its files are.
        meta: What ``meta.json`` says; ``meta["files"]`` maps each file to its SHA-256.
    """

    arch: str
    key: str
    folder: Path
    meta: Mapping[str, Json]


class KeyLock:
    """The exclusive right to write one key, until :meth:`release` or the end of the process."""

    def __init__(self, arch: str, key: str, path: Path, descriptor: int) -> None:
        self.arch = arch
        self.key = key
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor < 0:
            return
        # Once the file is gone the lock is free, even while a forked child has a copy of the descriptor.
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


class Store:
    """Folders ``<root>/v1/<arch>/<key[:2]>/<key>/``, each complete or absent.

    A writer takes the key's lock, fills a staging folder and renames it into place. A reader trusts only
    files whose SHA-256 is the one in ``meta.json``; anything else is set aside under ``quarantine``.

    Kernels of the store are run, so what another user may have written is refused with a StoreError: every
    folder from the root to an entry must belong to this user or to the superuser, and neither its group nor
    everybody may write to it. A store looks at each folder once. New folders are made with mode 0700.

    Args:
        root: The folder; ``~`` and ``~name`` are understood.
        shared: Trust the user who owns ``root``, whoever that is, and only read.

    Raises:
        StoreError: ``root`` names a user who does not exist, or is no name that a folder can have.
    """

    def __init__(self, root: Path | str, *, shared: bool = False) -> None:
        require_file_name(root)
        try:
            self.root = Path(root).expanduser().absolute()
        except (RuntimeError, OSError) as error:
            raise StoreError(
                f"cannot find the cache {root}: {error}; set CUTEGEN_CACHE_DIR to a path without ~"
            ) from error
        self.shared = shared
        self._trust = CacheTrust(self.root, shared)

    @classmethod
    def at(cls, folder: Path | None) -> Store:
        """Return the store in ``folder``, or without one that of :meth:`default`, whose errors it raises."""
        return cls.default() if folder is None else cls(folder)

    @classmethod
    def default(cls) -> Store:
        """Return the user's store: ``CUTEGEN_CACHE_DIR`` when set, else the user's cache folder.

        That is ``$XDG_CACHE_HOME/cutegen``, or ``~/.cache/cutegen`` (XDG base directories; Linux only, as the
        compiler is).

        Raises:
            StoreError: There is no home folder, or not that of the user who is named.
        """
        chosen = os.environ.get("CUTEGEN_CACHE_DIR")
        if chosen:
            return cls(Path(chosen))
        return cls(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cutegen")

    def folder(self, arch: str, key: str) -> Path:
        """Return where the entry of ``key`` is, or would be.

        Raises:
            StoreError: ``arch`` or ``key`` is no name that a store uses.
        """
        if not _ARCH.fullmatch(arch) or not _KEY.fullmatch(key):
            raise StoreError(
                f"{arch!r}/{key!r} names no entry; valid: an architecture and hexadecimal digits"
            )
        return self.root / LAYOUT / arch / key[:2] / key

    def find(self, arch: str, key: str, *, verify: bool = True) -> StoredEntry | None:
        """Return the entry of ``key``, or None; a corrupt entry is set aside and counts as absent.

        In a cache that is only read it stays where it is, and a warning is logged.

        Args:
            arch: The architecture it was made for.
            key: Its name.
            verify: Whether to compare every file with its recorded SHA-256.

        Raises:
            StoreError: The folder cannot be read or may hold what another user wrote, or a corrupt entry
                cannot be set aside.
        """
        entry, damage = self._read(arch, key, verify)
        if not damage:
            return entry
        if self._is_only_read():
            _log.warning("%s of the read-only cache %s counts as absent: %s", key, self.root, damage)
            return None
        with self.lock(arch, key):
            entry, damage = self._read(arch, key, verify)  # another process may have repaired it meanwhile
            if damage:
                self._set_aside(arch, key)
            return entry

    def read(self, arch: str, key: str) -> StoredEntry | None:
        """Return the whole entry of ``key``, or None; for holders of its lock, who replace corrupt ones."""
        return self._read(arch, key, verify=True)[0]

    def _read(self, arch: str, key: str, verify: bool) -> tuple[StoredEntry | None, str]:
        folder = self.folder(arch, key)
        self._trust.require(folder)
        try:
            meta = json.loads((folder / META).read_bytes())
        except FileNotFoundError:
            return None, f"{META} is missing" if folder.is_dir() else ""
        except (ValueError, RecursionError, IsADirectoryError, NotADirectoryError) as error:
            return None, f"{META} is unreadable: {error}"
        except OSError as error:
            raise store_failure(f"read {folder}", error) from error
        damage = _contradiction(meta, key) or (_changed_file(folder, meta["files"]) if verify else "")
        return (None, damage) if damage else (StoredEntry(arch, key, folder, meta), "")

    def _is_only_read(self) -> bool:
        try:
            return self.shared or self.root.stat().st_uid != os.geteuid()
        except OSError:
            return False

    def host_folder(self) -> Path:
        """Return ``<root>/v1/host``, where libraries for the host are, if no other user may write there.

        Raises:
            StoreError: Another user may have put files there.
        """
        folder = self.root / LAYOUT / "host"
        self._trust.require(folder)
        return folder

    def require_writable(self) -> None:
        """Do nothing if entries may be added.

        Raises:
            StoreError: The store is shared.
        """
        if self.shared:
            raise StoreError(
                f"cache {self.root} is shared, so it is only read; to add kernels, open your own"
            )

    def _set_aside(self, arch: str, key: str) -> None:
        folder = self.folder(arch, key)
        aside = self.root / LAYOUT / "quarantine"
        try:
            make_private(aside)
            folder.rename(aside / f"{arch}-{key}-{time.time_ns()}")
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_failure(f"set aside the corrupt entry {folder}", error) from error

    def find_trace(self, arch: str, trace: str) -> str | None:
        """Return the key of a kernel that was traced to ``trace``, None if none is known.

        Raises:
            StoreError: The folder may hold what another user wrote.
        """
        path = self.folder(arch, trace).with_suffix(".same")
        self._trust.require(path.parent)
        try:
            key = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return key if _KEY.fullmatch(key) else None

    def note_trace(self, arch: str, trace: str, key: str) -> None:
        """Note that the entry of ``key`` is the kernel that was traced to ``trace``.

        Raises:
            StoreError: The store cannot be written.
        """
        path = self.folder(arch, trace).with_suffix(".same")
        try:
            make_private(path.parent)
        except OSError as error:
            raise store_failure(f"write to {self.root}", error) from error
        publish(path, f"{key}\n".encode(), "note of a kernel")

    def try_lock(self, arch: str, key: str) -> KeyLock | None:
        """Return the lock of ``key``, or None while another process holds it.

        Raises:
            StoreError: The store cannot be written, is shared, or may hold what another user wrote.
        """
        self.require_writable()
        path = self.folder(arch, key).with_name(f"{key}.lock")
        self._trust.require(path.parent)
        try:
            make_private(path.parent)
        except OSError as error:
            raise store_failure(f"write to {self.root}", error) from error
        self._trust.require(path.parent)  # what was missing may have been made by another user meanwhile
        while True:
            descriptor = -1
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder removes the file, so the lock may be on a file that is gone.
                if _is_open_file(path, descriptor):
                    return KeyLock(arch, key, path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError as error:
                if descriptor >= 0:
                    os.close(descriptor)
                raise store_failure(f"write to {self.root}", error) from error
            os.close(descriptor)

    @contextmanager
    def lock(self, arch: str, key: str) -> Iterator[KeyLock]:
        """Hold the lock of ``key``, waiting for it as long as it takes.

        Raises:
            StoreError: The store cannot be written.
        """
        held = self.try_lock(arch, key)
        while held is None:
            time.sleep(LOCK_POLL_S)
            held = self.try_lock(arch, key)
        try:
            yield held
        finally:
            held.release()

    def stage(self, lock: KeyLock) -> Path:
        """Return an empty folder to fill for the locked key; what a killed writer left there is removed.

        Raises:
            StoreError: The store cannot be written.
        """
        staged = self._staging(lock)
        try:
            if staged.exists():
                shutil.rmtree(staged)
            staged.mkdir(mode=0o700)
        except OSError as error:
            raise store_failure(f"write to {self.root}", error) from error
        return staged

    def publish(self, lock: KeyLock, meta: Mapping[str, Json]) -> StoredEntry:
        """Turn the staged folder of the locked key into its entry, replacing an earlier one.

        The files are not synced: a power cut can truncate them, and the digests then say so.

        Raises:
            StoreError: The store cannot be written.
        """
        staged, folder = self._staging(lock), self.folder(lock.arch, lock.key)
        try:
            files = {path.name: file_digest(path) for path in sorted(staged.iterdir()) if path.is_file()}
            full: dict[str, Json] = {**meta, "key": lock.key, "arch": lock.arch, "files": files}
            (staged / META).write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")
            if folder.exists():
                self._remove(folder)
            staged.rename(folder)
        except OSError as error:
            raise store_failure(f"write to {self.root}", error) from error
        return StoredEntry(lock.arch, lock.key, folder, full)

    def unstage(self, lock: KeyLock) -> None:
        """Remove the staged folder of the locked key."""
        shutil.rmtree(self._staging(lock), ignore_errors=True)

    def discard(self, arch: str, key: str) -> None:
        """Remove the entry of ``key``, so that it will be made anew.

        Raises:
            StoreError: The store cannot be written.
        """
        with self.lock(arch, key):
            try:
                if self.folder(arch, key).exists():
                    self._remove(self.folder(arch, key))
            except OSError as error:
                raise store_failure(f"write to {self.root}", error) from error

    def set_aside(self, arch: str, key: str) -> None:
        """Move the entry of ``key`` to ``quarantine``: for readers that cannot interpret an intact entry.

        Raises:
            StoreError: The store cannot be written.
        """
        with self.lock(arch, key):
            self._set_aside(arch, key)

    def keys(self, arch: str) -> tuple[str, ...]:
        """Return the keys of all entries for ``arch``, sorted, without looking into them.

        Nothing says yet that they are whole, or may be trusted; :meth:`find` does.
        """
        root = self.root / LAYOUT / arch
        return tuple(sorted(at.parent.name for at in root.glob(f"*/*/{META}") if at.parent.suffix == ""))

    def _staging(self, lock: KeyLock) -> Path:
        return self.folder(lock.arch, lock.key).with_name(f"{lock.key}.tmp")

    def _remove(self, folder: Path) -> None:
        # Renamed first, so that no reader sees a half-removed entry.
        trash = folder.with_name(f"{folder.name}.old{time.time_ns()}")
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _contradiction(meta: object, key: str) -> str:
    """Return how ``meta`` does not describe the entry of ``key``; empty if it does."""
    files = meta.get("files") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or not isinstance(files, dict) or meta.get("key") != key:
        return f"{META} does not describe this entry"
    if any("/" in name for name in files):
        return f"{META} lists a file of another folder"
    if meta.get("outcome") == "ok" and LIBRARY not in files:
        return f"{META} lists no {LIBRARY}"
    return ""


def _changed_file(folder: Path, files: Mapping[str, str]) -> str:
    for name, wanted in files.items():
        try:
            if file_digest(folder / name) != wanted:
                return f"{name} has changed"
        except (OSError, ValueError):
            return f"{name} is missing"
    return ""


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
