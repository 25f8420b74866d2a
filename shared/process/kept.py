"""Data that outlives the forks of a process, in memory files (memfd_create(2)) of that process.

The parent process makes the files before its first fork, and never maps them. A fork finds what the
last one left. So does the next program, if it is the same: a successor of the parent process
(`shared.process.successor`), or what `restart_program` starts. The next program also gets the TCP
sockets, so that no port is free meanwhile. Here, the program before it is its predecessor.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

PREFIX = "nanovllm-"  # of the names of memory files
_MFD_NOEXEC_SEAL = 8  # of Linux 6.3; some hosts allow no other memory files
_KEPT = "kept-"  # of the names of those that a successor gets
_LISTENER = "listener"  # the name of a socket that listens
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_HARMLESS = (-signal.SIGKILL, -signal.SIGTERM, 0)


class UnusableFileError(Exception):
    """A kept file can neither be used nor emptied, but the program after `restart_program` will
    drop it. A fork that ends with this error makes its parent process start that program."""


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
    """Finds the memory file with this name of the predecessor, or creates one -> its descriptor.

    Args:
        version: everything, besides the modules loaded at the first call, on which the meaning of
            the bytes depends. A file of another version is not found.

    Raises:
        OSError: there are too many descriptors.
    """
    digest = hashlib.sha256(f"{_loaded_code()} {version}".encode()).hexdigest()[:32]
    wanted = f"{_KEPT}{name}-{digest}"
    found = _claim(wanted)
    return memory_file(wanted) if found is None else found


def held_socket(host: str, port: int) -> socket.socket | None:
    """Finds the socket with which the predecessor holds this port."""
    found = _claim(_holder(host, port))
    return None if found is None else socket.socket(fileno=found)


def listening_socket() -> socket.socket | None:
    """Finds the socket on which the predecessor listens."""
    found = _claim(_LISTENER)
    return None if found is None else socket.socket(fileno=found)


def _claim(wanted: str) -> int | None:
    for descriptor, name in _kept():
        if name == wanted and os.get_inheritable(descriptor):
            os.set_inheritable(descriptor, False)
            return descriptor
    return None


def close_unclaimed() -> bool:
    """Closes the files and sockets of the predecessor that this process has not found.

    Returns:
        Whether there were such files: the predecessor runs another program.
    """
    unclaimed = [each for each in _kept() if os.get_inheritable(each[0])]
    for descriptor, _ in unclaimed:
        os.close(descriptor)
    return any(name.startswith(_KEPT) for _, name in unclaimed)


def kept_descriptors() -> list[int]:
    """The descriptors that the next program inherits."""
    return [descriptor for descriptor, _ in _kept()]


def own_command() -> list[str]:
    """The command that starts this program again."""
    return [sys.executable, *sys.orig_argv[1:]]


def restart_program() -> NoReturn:
    """Replaces this program by a new start of the same command, which finds what this one kept.

    Raises:
        OSError: the command no longer exists.
    """
    for descriptor in kept_descriptors():
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, own_command())


def _kept() -> Iterator[tuple[int, str]]:
    """Yields the descriptors and names of this process's kept files, and of its TCP sockets that
    listen or hold a port."""
    folder, begin = "/proc/self/fd", f"/memfd:{PREFIX}"
    for descriptor in map(int, os.listdir(folder)):
        with suppress(OSError):  # the folder's own
            target = os.readlink(f"{folder}/{descriptor}")
            if target.startswith(begin + _KEPT):
                yield descriptor, target.removeprefix(begin).removesuffix(" (deleted)")
            elif target.startswith("socket:") and (name := _name_of(descriptor)):
                yield descriptor, name


def _name_of(descriptor: int) -> str:
    """The name of a TCP socket that listens or holds a port; empty for other sockets."""
    found = socket.socket(fileno=descriptor)
    try:
        if found.family not in _INTERNET or found.type != socket.SOCK_STREAM:
            return ""
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            return _holder(*found.getsockname()[:2])
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return _LISTENER if listens else ""
    finally:
        found.detach()


def _holder(host: str, port: int) -> str:
    return f"holds {host} {port}"


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
