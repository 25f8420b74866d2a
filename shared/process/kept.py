"""Data that outlives the forks of a process, in memory files (memfd_create(2)) of that process.

The parent process makes the files before its first fork, and never maps them. A fork finds what the
last one left. So does the program that `restart_program` starts, if it is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

PREFIX = "nanovllm-"  # of the names of memory files
_MFD_NOEXEC_SEAL = 8  # of Linux 6.3; some hosts allow no other memory files
_KEPT = "kept-"  # of the names of those that `restart_program` passes on
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


def kept_file(name: str, version: str = "") -> int:
    """Finds the memory file with this name of the program before `restart_program`, or creates one
    -> its descriptor.

    Args:
        version: everything, besides the modules loaded at the first call, on which the meaning of
            the bytes depends. A file of another version is not found.

    Raises:
        OSError: there are too many descriptors.
    """
    digest = hashlib.sha256(f"{_loaded_code()} {version}".encode()).hexdigest()[:32]
    wanted = f"{_KEPT}{name}-{digest}"
    for descriptor, found in _kept_files():
        if found == wanted and os.get_inheritable(descriptor):
            os.set_inheritable(descriptor, False)
            return descriptor
    return memory_file(wanted)


def close_unclaimed() -> None:
    """Closes the memory files of the program before that no `kept_file` has found."""
    for descriptor, _ in _kept_files():
        if os.get_inheritable(descriptor):
            os.close(descriptor)


def restart_program() -> NoReturn:
    """Replaces this program by a new start of the same command, whose `kept_file` finds the files.

    Raises:
        OSError: the command no longer exists.
    """
    for descriptor, _ in _kept_files():
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _kept_files() -> Iterator[tuple[int, str]]:
    """Yields the descriptors and names of this process's kept files."""
    folder, begin = "/proc/self/fd", f"/memfd:{PREFIX}"
    for descriptor in os.listdir(folder):
        with suppress(OSError):  # the folder's own
            target = os.readlink(f"{folder}/{descriptor}")
            if target.startswith(begin + _KEPT):
                yield int(descriptor), target.removeprefix(begin).removesuffix(" (deleted)")


@cache
def _loaded_code() -> list[tuple[str, int, int]]:
    """The files of all modules that are loaded at the first call, with their sizes and times."""
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    states = []
    for file in sorted(filter(None, files)):
        with suppress(OSError):
            status = os.stat(file)
            states.append((file, status.st_size, status.st_mtime_ns))
    return states


class KeptObject:
    """A JSON object in a memory file. A reader finds None until it is written completely.

    Args:
        name, version: see `kept_file`.
    """

    def __init__(self, name: str, version: str = "") -> None:
        self._file = kept_file(name, version)

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
