"""Whose cache it is: code is only taken from folders that nobody else can write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import source

from cutegen.build import Builder
from cutegen.build.store import Store
from cutegen.errors import StoreError

ARCH, KEY = "sm_90a", "0123456789abcdef0123456789abcdef"


def write(store: Store, key: str = KEY) -> None:
    with store.lock(ARCH, key) as lock:
        (store.stage(lock) / "kernel.py").write_text("hello")
        store.publish(lock, {"made": "here"})


def pretend_owner(monkeypatch: pytest.MonkeyPatch, top: Path, number: int) -> None:
    """Let everything in ``top`` seem to belong to the user ``number``."""
    real = Path.stat

    def of_another(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        status = real(self, follow_symlinks=follow_symlinks)
        if self != top and top not in self.parents:
            return status
        return os.stat_result([*status[:4], number, *status[5:10]])

    monkeypatch.setattr(Path, "stat", of_another)


def below(top: Path) -> dict[Path, bytes | None]:
    """Everything in a folder, with the content of each file."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(top.rglob("*"))}


def test_a_cache_of_another_user_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To read from it would be to run that user's code; nothing is written into it either."""
    write(Store(tmp_path / "cache"))
    before = below(tmp_path)
    pretend_owner(monkeypatch, tmp_path / "cache", 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for act in (
        lambda store: store.find(ARCH, KEY),
        lambda store: store.find(ARCH, KEY, verify=False),
        lambda store: store.read(ARCH, KEY),
        lambda store: store.try_lock(ARCH, KEY),
        lambda store: store.discard(ARCH, KEY),
    ):
        with pytest.raises(StoreError, match=r"belongs to user 12345.*CUTEGEN_CACHE_DIR.*shared=True"):
            act(Store(tmp_path / "cache"))
    assert below(tmp_path) == before


@pytest.mark.parametrize(
    "level", ["", "v1", f"v1/{ARCH}", f"v1/{ARCH}/{KEY[:2]}", f"v1/{ARCH}/{KEY[:2]}/{KEY}"]
)
@pytest.mark.parametrize(("mode", "who"), [(0o770, "its group"), (0o707, "everybody")])
def test_a_cache_that_others_can_write_to_is_refused_with_the_remedy(
    tmp_path: Path, level: str, mode: int, who: str
) -> None:
    """On every level from the root to the entry."""
    root = tmp_path / "a cache"
    write(Store(root))
    (root / level).chmod(mode)
    with pytest.raises(StoreError, match=f"by {who} .*chmod -R go-w '.*/a cache'.*CUTEGEN_CACHE_DIR"):
        Store(root).find(ARCH, KEY)
    if level != f"v1/{ARCH}/{KEY[:2]}/{KEY}":
        with pytest.raises(StoreError, match="is refused"):
            Store(root).try_lock(ARCH, KEY)
    (root / level).chmod(0o755)
    assert Store(root).find(ARCH, KEY) is not None


def test_a_folder_is_looked_at_once_per_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second lookup costs no more than it did."""
    write(Store(tmp_path))
    store, seen = Store(tmp_path), []
    real = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **more: seen.append(self) or real(self, **more))
    assert store.find(ARCH, KEY) is not None
    first = len(seen)
    assert store.find(ARCH, KEY) is not None
    assert (first, len(seen)) == (5, 5)


def test_an_own_cache_that_others_can_read_is_used_as_it_is(tmp_path: Path) -> None:
    """As earlier versions made it under the usual mask."""
    write(Store(tmp_path))
    for folder in (tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    assert Store(tmp_path).find(ARCH, KEY) is not None
    write(Store(tmp_path), "f" * 32)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.fixture
def open_mask() -> Iterator[None]:
    """New files are for everybody, unless whoever makes them says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_all_folders_of_a_cache_are_made_for_their_user_alone(tmp_path: Path, open_mask: None) -> None:
    """Root, layout, architecture, prefix, entry and quarantine, whatever the mask."""
    store = Store(tmp_path / "above" / "cache")
    write(store)
    (store.folder(ARCH, KEY) / "kernel.py").write_text("changed")
    assert store.find(ARCH, KEY) is None
    write(store)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.name for path in folders} >= {"above", "cache", "v1", ARCH, KEY[:2], KEY, "quarantine"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


@pytest.mark.parametrize("shared", [False, True])
def test_a_cache_of_the_superuser_is_read_by_everybody_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, shared: bool
) -> None:
    """Without any option; an entry that is corrupt counts as absent and stays."""
    write(Store(tmp_path / "cache"))
    write(Store(tmp_path / "cache"), "f" * 32)
    (Store(tmp_path / "cache").folder(ARCH, "f" * 32) / "kernel.py").write_text("changed")
    before = below(tmp_path)
    pretend_owner(monkeypatch, tmp_path / "cache", 0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    store = Store(tmp_path / "cache", shared=shared)
    assert store.find(ARCH, KEY) is not None
    assert store.find(ARCH, "f" * 32) is None and store.find(ARCH, "e" * 32) is None
    assert f"{'f' * 32} of the read-only cache" in caplog.text and "kernel.py has changed" in caplog.text
    assert below(tmp_path) == before


def test_a_shared_cache_trusts_its_owner_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A third user in it, or one who can write to it, is refused as ever."""
    write(Store(tmp_path / "cache"))
    pretend_owner(monkeypatch, tmp_path / "cache", 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Store(tmp_path / "cache", shared=True).find(ARCH, KEY) is not None
    with monkeypatch.context() as patch:
        pretend_owner(patch, tmp_path / "cache" / "v1", 666)
        with pytest.raises(StoreError, match=r"v1 belongs to user 666"):
            Store(tmp_path / "cache", shared=True).find(ARCH, KEY)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(StoreError, match="can be written by everybody"):
        Store(tmp_path / "cache", shared=True).find(ARCH, KEY)


def test_a_shared_cache_is_only_read(tmp_path: Path) -> None:
    """Also by its owner; nothing is compiled into it, and what is missing is missing."""
    write(Store(tmp_path / "cache"))
    before = below(tmp_path)
    store = Store(tmp_path / "cache", shared=True)
    assert store.find(ARCH, "f" * 32) is None
    for act in (store.try_lock, store.discard):
        with pytest.raises(StoreError, match="is shared, so it is only read"):
            act(ARCH, KEY)
    with Builder(store) as builder, pytest.raises(StoreError, match="is shared"):
        builder.submit([source("pass\n")])
    assert below(tmp_path) == before
    assert Store(tmp_path / "missing", shared=True).find(ARCH, KEY) is None
    assert not (tmp_path / "missing").exists()
