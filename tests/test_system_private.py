"""Folders of one user: made for nobody else, and told from those that others may have written to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cutegen.system.private import make_private, why_untrusted

ME = os.geteuid()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_every_folder_that_is_made_is_for_its_user_alone(tmp_path: Path, umask: int) -> None:
    """Those above it too, whatever the mask; one that is there is left as it is."""
    tmp_path.chmod(0o755)
    before = os.umask(umask)
    try:
        make_private(tmp_path / "a" / "b" / "c")
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("", "a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o700, 0o700, 0o700]


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    """Of the system, with its reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (0o700, ""),
        (0o755, ""),
        (0o550, ""),
        (0o775, "can be written by its group (mode 0775)"),
        (0o777, "can be written by everybody (mode 0777)"),
        (0o1777, "can be written by everybody (mode 1777)"),
        (0o702, "can be written by everybody (mode 0702)"),
    ],
)
def test_what_others_can_write_to_is_untrusted(tmp_path: Path, mode: int, reason: str) -> None:
    """Reading is harmless; the sticky bit does not keep others from adding files."""
    tmp_path.chmod(mode)
    try:
        assert why_untrusted(tmp_path, {ME}) == reason
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_of_somebody_else_is_untrusted_and_the_user_is_named(tmp_path: Path) -> None:
    """By name where there is one."""
    assert why_untrusted(tmp_path, {ME + 1}).startswith("belongs to user ")
    assert str(ME) in why_untrusted(tmp_path, {ME + 1})


def test_a_link_is_as_trusted_as_what_it_leads_to(tmp_path: Path) -> None:
    """A cache is often a link to a larger disk."""
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    assert why_untrusted(tmp_path / "cache", {ME}) == ""
    (tmp_path / "disk").chmod(0o777)
    assert "everybody" in why_untrusted(tmp_path / "cache", {ME})
