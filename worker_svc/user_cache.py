"""Opens folders and files, such as those of the user's cache directory, that only this user or root
can have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def private_folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """Opens folder `path` -> a descriptor.

    Raises:
        OSError: the folder is missing, is a link, belongs to another user than root, or other
            users may write to it.
    """
    if create:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
