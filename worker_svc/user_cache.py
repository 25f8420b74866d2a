"""Keeps files, such as those of the user's cache directory, and opens those that only this user or
root can have written."""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def state_of(status: os.stat_result) -> str:
    """A text that changes when a file is written or replaced, as far as its file system tells."""
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{status.st_dev} {status.st_ino} {status.st_size} {times}"


def make_folders(path: Path, mode: int) -> None:
    """Makes folder `path` and those above it, as far as they are missing."""
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode, exist_ok=True)


@contextmanager
def private_folder(
    path: Path, *, create: bool = False, trusted: Path | None = None
) -> Iterator[int]:
    """Opens folder `path` -> a descriptor.

    Args:
        trusted: a folder. If `path` is in it, this folder and those above it are not checked: other
            users who could replace them could replace the program, too, or the caller checks them.

    Raises:
        OSError: the folder is missing, is a link, belongs to another user than root, or other
            users may write to it or replace a folder above it.
    """
    if create:
        make_folders(path, 0o700)
    above = list(path.absolute().parents)
    if trusted is not None and trusted.absolute() in above:
        del above[above.index(trusted.absolute()) :]
    for each in reversed(above):
        _check_folder(each)
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY, None) as folder:
        yield folder


@contextmanager
def private_file(folder: int, name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens file `name` in `folder` -> a descriptor.

    Raises:
        OSError: as `private_folder`.
    """
    with _opened(name, flags, folder) as file:
        yield file


def _check_folder(folder: Path) -> None:
    """Checks that only this user or root can replace what is in `folder`, or where it leads to if
    it is a link. The folders above have been checked."""
    status = folder.stat()
    for user in (status.st_uid, folder.lstat().st_uid):
        if user not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to user {user}")
    if folder.is_symlink():
        target = folder.parent / folder.readlink()
        for each in (*reversed(target.parents), target):
            _check_folder(each)
    # In a sticky folder, such as /tmp, a user can move or remove only what is the user's own.
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_mode & stat.S_ISVTX or not writable:
        return
    if writable & stat.S_IWOTH or not _is_alone_in(status.st_gid):
        raise PermissionError(f"other users may write to {folder}; chmod go-w allows its use")


def _is_alone_in(group: int) -> bool:
    """Whether `group` is this user's private one. Where users have such groups, the umask lets
    groups write."""
    user = os.geteuid()
    with suppress(KeyError):
        name, found = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
        return user != 0 and found.gr_name == name and set(found.gr_mem) <= {name}
    return False


@contextmanager
def _opened(path: Path | str, flags: int, folder: int | None) -> Iterator[int]:
    # Opening a FIFO would otherwise block.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    number = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        status = os.fstat(number)
        if not flags & os.O_DIRECTORY and not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"other users may write to {path}; chmod go-w allows its use")
        yield number
    finally:
        os.close(number)
