"""Data that outlives the forks of a process, in memory files (memfd_create(2)) of that process.

The parent process makes the files before its first fork, and never maps them. A fork finds what the
last one left.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

PREFIX = "nanovllm-"  # of the names of memory files
_MFD_NOEXEC_SEAL = 8  # of Linux 6.3; some hosts allow no other memory files
_HARMLESS = (-signal.SIGKILL, -signal.SIGTERM, 0)


def may_have_damaged(status: int) -> bool:
    """Whether what ended a fork may also have damaged what it wrote: anything but SIGKILL, SIGTERM
    and an end in order.

    Args:
        status: the fork's exit status; negative: the signal that killed it.
    """
    return status not in _HARMLESS


def memory_file(name: str) -> int:
    """Creates a memory file that can be sealed -> its descriptor, which no other program inherits.

    Raises:
        OSError: there are too many descriptors.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(PREFIX + name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        return os.memfd_create(PREFIX + name, flags)


class KeptObject:
    """A JSON object in a memory file. A reader finds None until it is written completely."""

    def __init__(self, name: str) -> None:
        self._file = memory_file(name)

    def read(self) -> Any:
        with suppress(ValueError):
            return json.loads(os.pread(self._file, os.fstat(self._file).st_size, 0))
        return None

    def write(self, value: object) -> None:
        """Replaces the object. If there is a limit on the size of files, none is left."""
        self.clear()
        with suppress(OSError):
            os.pwrite(self._file, json.dumps(value).encode(), 0)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)
