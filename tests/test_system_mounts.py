"""File systems: the one on top holds a path, and those of several machines are known by their type."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutegen.system import mounts
from cutegen.system.mounts import file_system, is_network

TABLE = r"""
22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw
24 23 0:22 / /home/me/local rw - xfs /dev/sdb1 rw
25 22 0:23 / /with\040blank rw - fuse.sshfs host: rw
26 22 0:24 / /twice rw - tmpfs none rw
27 22 0:25 / /twice rw - lustre server:/fs rw
28 22 0:26 / /plain rw - fuseblk /dev/sdc1 rw
a line of another form
"""


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    monkeypatch.setattr(mounts, "_MOUNTS", path)
    return path


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/etc/passwd", "ext4", False),
        ("/home", "nfs4", True),
        ("/home/me/.cache/cutegen/trials.db", "nfs4", True),
        ("/home/me/local/trials.db", "xfs", False),
        ("/homeless", "ext4", False),
        ("/with blank/x", "fuse.sshfs", True),
        ("/twice/x", "lustre", True),
        ("/plain/x", "fuseblk", False),
    ],
)
def test_the_longest_mount_point_above_a_path_holds_it(path: str, kind: str, network: bool) -> None:
    """Of two in one place the later; a name that merely begins alike is not above."""
    assert (file_system(Path(path)), is_network(Path(path))) == (kind, network)


def test_a_link_is_where_it_leads(tmp_path: Path) -> None:
    """A home folder is often one."""
    (tmp_path / "cache").symlink_to("/home/me")
    assert is_network(tmp_path / "cache" / "trials.db")


def test_a_system_without_a_table_of_mounts_has_no_network(table: Path) -> None:
    """Nothing is known then, and the usual is assumed."""
    table.unlink()
    assert (file_system(Path("/home")), is_network(Path("/home"))) == ("", False)


def test_the_real_table_names_the_file_system_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form is the kernel's."""
    monkeypatch.setattr(mounts, "_MOUNTS", Path("/proc/self/mountinfo"))
    assert file_system(Path("/")) != ""
