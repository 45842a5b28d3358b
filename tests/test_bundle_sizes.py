"""Sizes of bundles: nothing small stands for something large, and nothing large is held in memory."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from bundles import HEAD, stored, unpack, write_bundle

from cutegen.build.store import Store
from cutegen.errors import BuildError
from cutegen.tuning.transfer import import_candidates


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good bundle of two kernels."""
    write_bundle(tmp_path / "good.tar", Store(tmp_path / "here"))
    return tmp_path / "good.tar"


def sparse_member(name: str, size: int) -> bytes:
    """The header of an old GNU sparse file without data, as large as told."""

    def octal(value: int, width: int) -> bytes:
        return f"{value:0{width - 1}o}\0".encode()

    header = bytearray(512)
    fields = {0: name.encode(), 100: octal(0o644, 8), 108: octal(0, 8), 116: octal(0, 8)}
    fields |= {124: octal(0, 12), 136: octal(0, 12), 148: b" " * 8, 156: b"S", 257: b"ustar  \0"}
    fields |= {386: octal(size, 12), 398: octal(0, 12), 483: octal(size, 12)}
    for at, data in fields.items():
        header[at : at + len(data)] = data
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


def head_of(path: Path) -> bytes:
    """The first member of a tar, with its header."""
    with tarfile.open(path) as tar:
        first = tar.next()
        assert first is not None
        return path.read_bytes()[: first.offset_data + -(-first.size // 512) * 512]


def peak_mb(work: Callable[[], None]) -> float:
    """The most memory, in MiB, that ``work`` holds at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_sparse_files_are_refused_unread(path: Path, tmp_path: Path) -> None:
    """A few bytes that stand for gigabytes take no memory."""
    names = [name for name in unpack(path) if name != HEAD]
    data = head_of(path) + b"".join(sparse_member(name, 64 * 2**20) for name in names) + bytes(1024)
    path.write_bytes(data)

    def refused() -> None:
        with pytest.raises(BuildError, match="not a plain file"):
            import_candidates(path, Store(tmp_path / "there"))

    assert peak_mb(refused) < 16
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("form", "name", "records"),
    [
        (tarfile.GNU_FORMAT, "x" * 200, {}),
        (tarfile.PAX_FORMAT, "x" * 200, {}),
        (tarfile.PAX_FORMAT, "", {"GNU.sparse.realsize": "999"}),
        (tarfile.PAX_FORMAT, "", {"size": "1"}),
    ],
)
def test_extended_headers_are_refused(
    form: int, name: str, records: dict[str, str], path: Path, tmp_path: Path
) -> None:
    """Long names and pax records could rename a file, or change its size, behind its header."""
    files = unpack(path)
    with tarfile.open(path, "w", format=form) as tar:
        for at, (own, data) in enumerate(files.items()):
            member = tarfile.TarInfo(name if name and at == 1 else own)
            member.size, member.pax_headers = len(data), records if at == 1 else {}
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(BuildError, match="not a plain file"):
        import_candidates(path, Store(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_large_files_pass_through_in_pieces(tmp_path: Path) -> None:
    """Export and import of two kernels of 60 MiB each never hold more than one of them."""
    here, there, library = Store(tmp_path / "here"), Store(tmp_path / "there"), bytes(60 * 2**20)

    def across() -> None:
        write_bundle(tmp_path / "b.tar", here, library)
        import_candidates(tmp_path / "b.tar", there)

    assert peak_mb(across) < 100
    for key in there.keys("sm_90a"):
        assert stored(there, key).shared_object.stat().st_size == 60 * 2**20
