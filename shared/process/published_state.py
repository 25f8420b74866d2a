"""Publishes a JSON object in a process's memory to other processes of the same user.

The memory is no file on a disk, so a full disk does not matter. (Setting a process title instead
would overwrite `/proc/PID/environ`, by which the launcher finds the processes of a stack.)
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Any

from shared.process.kept import PREFIX, memory_file
from shared.process.owner import opened, own_process

_BYTES = 64 << 10


class PublishedState:
    """Shows an object to other processes, which read it by `name`."""

    def __init__(self, name: str) -> None:
        self._shown: dict[str, Any] | None = None
        try:
            self._fd = memory_file(name)
            os.ftruncate(self._fd, _BYTES)
            self._memory = mmap.mmap(self._fd, _BYTES)
        except OSError:  # no descriptors, or a file size limit: nobody will see the object
            self._fd, self._memory = -1, mmap.mmap(-1, _BYTES)

    def show(self, value: dict[str, Any]) -> None:
        """Replaces the object that readers see, unless `value` is too long."""
        text = json.dumps(value).encode() + b"\0"
        if value != self._shown and len(text) <= _BYTES:
            self._memory[: len(text)] = text
            self._shown = value

    def close(self) -> None:
        """Closes the inherited memory in a fork."""
        self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)


def read_published_state(pid: int, name: str) -> dict[str, Any] | None:
    """Returns the object that a process of this user shows; None if there is none, or it is being
    written."""
    try:
        with own_process(pid) as (folder, _):
            text = _shown(folder, f"/memfd:{PREFIX}{name} ")
        shown = json.loads(text.partition(b"\0")[0])
    except (OSError, ValueError):
        return None
    return shown if isinstance(shown, dict) else None


def _shown(process: int, begin: str) -> bytes:
    """Returns the first `_BYTES` of the memory file whose name begins like this; none without one.

    Args:
        process: a descriptor of the process's `/proc/PID`.
    """
    with opened("fd", os.O_DIRECTORY, process) as descriptors:
        for each in os.listdir(descriptors):
            if os.readlink(each, dir_fd=descriptors).startswith(begin):
                with opened(each, folder=descriptors) as file:
                    # A program that another user started may have inherited the user's file.
                    own = os.fstat(file).st_uid == os.geteuid()
                    return os.read(file, _BYTES) if own else b""
    return b""
