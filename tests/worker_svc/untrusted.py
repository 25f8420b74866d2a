"""Ways in which a file or folder in a cache may be another user's work."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


def foreign(path: Path) -> None:
    os.chown(path, 12345, -1)


def writable_by_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def writable_by_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def of_another_kind(path: Path) -> None:
    """A file instead of a folder, or a FIFO instead of a file."""
    make = Path.touch if path.is_dir() else os.mkfifo
    path.rename(path.with_name("elsewhere"))
    make(path)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
untrusted = pytest.mark.parametrize(
    "change",
    [
        pytest.param(foreign, marks=as_root),
        writable_by_group,
        writable_by_all,
        linked,
        of_another_kind,
    ],
)
