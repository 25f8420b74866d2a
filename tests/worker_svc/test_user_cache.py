"""Folders and files that are kept for this user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker_svc.user_cache import keep, private_folder


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
