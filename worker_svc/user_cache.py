"""Keeps files, such as those of the user's cache directory, and opens those that only this user or
root can have written."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The path of this project's folder `name` in `$XDG_CACHE_HOME`, or in `~/.cache`.

    Raises:
        OSError: the user has no home directory.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    return base / "nano-vllm-grpc" / name


class DamagedError(OSError):
    """A kept file does not have the bytes that were written to it."""


def keep(made: Path, path: Path) -> None:
    """Moves the complete file `made` to `path`, which is in the same file system. Even if the host
    loses power, `path` is then as before or complete.

    Raises:
        OSError: the file cannot be written or moved.
    """
    sync(made)
    made.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until the disk has a file's bytes, or a folder's entries."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # nothing to sync in such file systems
            raise
    finally:
        os.close(number)


def digest_of(file: Path | int) -> str:
    """The SHA-256 of the bytes of a file or of an open descriptor, in hex digits. A CPU with
    instructions for it hashes 1.5 GB/s, another 0.4.

    Raises:
        OSError: the file cannot be read.
    """
    with open(file, "rb", buffering=0, closefd=not isinstance(file, int)) as opened:
        opened.seek(0)
        return hashlib.file_digest(opened, "sha256").hexdigest()


def digest_of_sources(root: Path, paths: Iterable[Path], others: str = "") -> str:
    """The SHA-256 of `others`, and of the names in `root` and the bytes of files, in hex digits.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.sha256(others.encode())
    for path in paths:
        content = path.read_bytes()
        found.update(f"\n{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def state_of(status: os.stat_result) -> str:
    """A text that changes when a file is written or replaced, as far as its file system tells."""
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{status.st_dev} {status.st_ino} {status.st_size} {times}"


def make_folders(path: Path, mode: int) -> None:
    """Makes folder `path` and those above it, as far as they are missing."""
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode, exist_ok=True)


def private_folder(path: Path, *, create: bool = False) -> AbstractContextManager[int]:
    """Opens folder `path` -> a descriptor. The folders above are not checked: whoever replaces one
    can only lead to another folder that this user or root has made.

    Raises:
        OSError: the folder is missing, is a link, belongs to another user than root, or other
            users may write to it.
    """
    if create:
        make_folders(path, 0o700)
    return private_file(None, path, os.O_RDONLY | os.O_DIRECTORY)


@contextmanager
def private_file(
    folder: int | None, path: Path | str, flags: int = os.O_RDONLY, *, any_mode: bool = False
) -> Iterator[int]:
    """Opens file `path`, relative to `folder` if that is given -> a descriptor.

    Args:
        any_mode: whether the file may have any mode, because no other user can enter the folder.

    Raises:
        OSError: as `private_folder`.
    """
    # Opening a FIFO would otherwise block.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    number = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        status = os.fstat(number)
        if not flags & os.O_DIRECTORY and not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not any_mode:
            raise PermissionError(f"other users may write to {path}; chmod go-w allows its use")
        yield number
    finally:
        os.close(number)
