"""Tells this user's processes from those of other users, who can give theirs any environment, name
and memory file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_STATUS_BYTES = 4096  # the user is within the first few hundred


@contextmanager
def own_process(pid: int) -> Iterator[tuple[int, int]]:
    """Opens the `/proc/PID` of a process of this user -> a descriptor, and the id of its parent.

    The descriptor never shows a later process with the same id. The real, effective and saved user
    must be this one: a program that another user starts may have this effective user (setuid).

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    with opened(f"/proc/{pid}", os.O_DIRECTORY) as folder:
        with opened("status", folder=folder) as status:
            text = os.read(status, _STATUS_BYTES).decode(errors="replace")
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        users = [int(each) for each in fields["Uid"].split()[:3]]
        if {*users} != {os.geteuid()}:
            raise PermissionError(f"process {pid} belongs to user {users[0]}")
        yield folder, int(fields["PPid"])


@contextmanager
def opened(path: str, flags: int = os.O_RDONLY, folder: int | None = None) -> Iterator[int]:
    """Opens a file, relative to `folder` if given -> a descriptor."""
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_own(pid: int, parent: int | None = None) -> bool:
    """Whether a process is this user's and, if `parent` is given, a child of that process."""
    try:
        with own_process(pid) as (_, found):
            return parent in (None, found)
    except OSError:
        return False
