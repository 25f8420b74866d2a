"""Which folders and files are taken for those of this user or root."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.worker_svc.untrusted import as_root, foreign, writable_by_all, writable_by_group
from worker_svc.user_cache import keep, private_folder

above = pytest.mark.parametrize(
    "change", [pytest.param(foreign, marks=as_root), writable_by_all, writable_by_group]
)


def refused(path: Path, trusted: Path | None = None) -> str:
    """Why a folder is refused; empty: it is not."""
    try:
        with private_folder(path, trusted=trusted):
            return ""
    except PermissionError as error:
        return str(error)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "b" / "c"
    with private_folder(path, create=True):
        return path


@above
def test_a_folder_that_others_may_replace_is_refused(
    folder: Path, change: Callable[[Path], None]
) -> None:
    assert not refused(folder)
    change(folder.parents[1])
    assert str(folder.parents[1]) in refused(folder)


@above
@pytest.mark.parametrize("place", ["held", "target"])
def test_a_link_counts_with_what_it_leads_to(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], place: str
) -> None:
    """Both the folder that holds a link, and those above its target."""
    for each in ("held", "target"):
        (tmp_path / each).mkdir()
    folder.parent.rename(tmp_path / "target" / "b")
    (tmp_path / "held" / "link").symlink_to("../target/b")
    folder.parent.symlink_to(tmp_path / "held" / "link")
    assert not refused(folder)
    change(tmp_path / place)
    assert place in refused(folder)


def test_a_sticky_folder_is_not_refused(folder: Path) -> None:
    """Others cannot move what is in it, as in /tmp."""
    folder.parents[1].chmod(0o1777)
    assert not refused(folder)


@pytest.mark.parametrize(
    ("name", "members", "right"),
    [("me", [], True), ("me", ["me"], True), ("staff", [], False), ("me", ["other"], False)],
)
def test_a_users_private_group_may_write_above(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], right: bool
) -> None:
    """Their users' umask is 002."""
    user = SimpleNamespace(pw_name="me")
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    writable_by_group(folder.parents[1])
    if os.geteuid() == 0:
        assert refused(folder)  # root's group is no private one
        monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert bool(refused(folder)) != right


def test_who_may_replace_the_program_may_replace_its_folders(folder: Path) -> None:
    writable_by_all(folder.parents[1])
    assert not refused(folder, trusted=folder.parents[0])
    assert not refused(folder, trusted=folder.parents[1])
    assert refused(folder, trusted=folder.parents[1] / "elsewhere")
    writable_by_all(folder)
    assert refused(folder, trusted=folder.parents[0])


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with private_folder(tmp_path / "x" / "y", create=True):
            pass
    finally:
        os.umask(umask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700


def test_a_file_that_the_disk_does_not_take_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)

    def fail(number: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        keep(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "old"
