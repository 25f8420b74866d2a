"""Data that outlives the forks of a process, in memory files (memfd_create(2)) of that process.
Descriptors outlive them, too (`KeptDescriptors`).

The parent process makes the files before its first fork, and never maps them. A fork finds what the
last one left. So does a successor of the parent process (`shared.process.successor`), if it is the
same program. It also gets the TCP sockets, so that no port is free meanwhile.
"""

from __future__ import annotations

import array
import errno
import hashlib
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

PREFIX = "nanovllm-"  # of the names of memory files
_MFD_NOEXEC_SEAL = 8  # of Linux 6.3; some hosts allow no other memory files
_KEPT = "kept-"  # of the names of those that a successor gets, and of sockets
_MAX_DESCRIPTORS = 253  # in a message (SCM_MAX_FD of Linux)
_LISTENER = "listener"  # the name of a socket that listens
_INTERNET = (socket.AF_INET, socket.AF_INET6)
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


def kept_file(name: str) -> int:
    """Finds the memory file with this name of the predecessor, or creates one -> its descriptor.

    Raises:
        OSError: there are too many descriptors.
    """
    wanted = _versioned(name)
    found = _claim(wanted)
    return memory_file(wanted) if found is None else found


def _versioned(name: str, version: str = "") -> str:
    digest = hashlib.sha256(f"{_loaded_code()} {version}".encode()).hexdigest()[:32]
    return f"{_KEPT}{name}-{digest}"


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


def _kept() -> Iterator[tuple[int, str]]:
    """Yields the descriptors and names of this process's kept files, of its sockets that keep
    descriptors, and of its TCP sockets that listen or hold a port."""
    folder, begin = "/proc/self/fd", f"/memfd:{PREFIX}"
    for descriptor in map(int, os.listdir(folder)):
        with suppress(OSError):  # the folder's own
            target = os.readlink(f"{folder}/{descriptor}")
            if target.startswith(begin + _KEPT):
                yield descriptor, target.removeprefix(begin).removesuffix(" (deleted)")
            elif target.startswith("socket:") and (name := _name_of(descriptor)):
                yield descriptor, name


def _name_of(descriptor: int) -> str:
    """The name of a socket that keeps descriptors, or of a TCP socket that listens or holds a port;
    empty for other sockets."""
    found = socket.socket(fileno=descriptor)
    try:
        if found.family == socket.AF_UNIX:
            begin, address = f"\0{PREFIX}".encode(), found.getsockname()
            is_kept = isinstance(address, bytes) and address.startswith(begin + _KEPT.encode())
            return address[len(begin) :].split()[0].decode() if is_kept else ""
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
        name: see `kept_file`.
    """

    def __init__(self, name: str) -> None:
        self._file = kept_file(name)

    def read(self) -> Any:
        return _read_json(self._file)

    def write(self, value: object) -> None:
        """Replaces the object. If there is a limit on the size of files, none is left."""
        self.clear()
        with suppress(OSError):
            os.pwrite(self._file, json.dumps(value).encode(), 0)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)


def _read_json(file: int) -> Any:
    with suppress(ValueError):
        return json.loads(os.pread(file, os.fstat(file).st_size, 0))
    return None


class KeptDescriptors:
    """Descriptors, such as those of memory, and a JSON value that describes them.

    They are in a message that stays in the queue of a socket. A reader gets copies. The kernel
    holds them as long as any process has the receiving socket, and no process has to receive them.
    A fork that dies before it writes leaves nothing.

    Args:
        name: of the socket.
        version: everything, besides the modules loaded at the first call, on which the meaning of
            the value depends. Descriptors of another version are not found.
    """

    def __init__(self, name: str, version: str = "") -> None:
        names = [_versioned(f"{name}-{end}", version) for end in ("in", "out")]
        found = [_claim(each) for each in names]
        if found[0] is None or found[1] is None:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for each, wanted in zip(pair, names, strict=True):
                # The address names the socket for `_claim`. Other processes cannot connect to it.
                each.bind(f"\0{PREFIX}{wanted} {uuid.uuid4().hex}")
        else:
            pair = socket.socket(fileno=found[0]), socket.socket(fileno=found[1])
        self._in, self._out = pair

    def __del__(self) -> None:
        for each in vars(self).values():
            each.close()

    def value(self) -> Any:
        """The value; None if there is none."""
        return self._copy(1)[0]

    def read(self) -> tuple[Any, list[int]]:
        """The value, and new descriptors of this process, which no other program inherits. Nothing
        is found if this process cannot have so many."""
        return self._copy(_MAX_DESCRIPTORS)

    def write(self, value: object, descriptors: Sequence[int]) -> None:
        """Replaces value and descriptors.

        Raises:
            OSError: there are too many, or the value is over a limit on files. None are kept.
        """
        self.clear()
        file = memory_file("value")
        try:
            with open(file, "wb", closefd=False) as opened:
                opened.write(json.dumps({"value": value, "count": len(descriptors)}).encode())
            if len(descriptors) >= _MAX_DESCRIPTORS:
                raise OSError(errno.EMFILE, f"{len(descriptors)} descriptors in a message")
            socket.send_fds(self._in, [b"."], [file, *descriptors])
        finally:
            os.close(file)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            self._out.recvmsg(1, 0, socket.MSG_DONTWAIT)

    def _copy(self, count: int) -> tuple[Any, list[int]]:
        """Copies of the first `count` descriptors, and the value, which is in the first."""
        found, flags = array.array("i"), socket.MSG_PEEK | socket.MSG_DONTWAIT
        room = socket.CMSG_LEN(count * found.itemsize)
        try:
            _, messages, *_ = self._out.recvmsg(1, room, flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None, []
        for *_, data in messages:
            found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
        kept: Any = _read_json(found[0]) if found else None
        # With few free descriptors, a process gets some of them.
        is_whole = kept is not None and len(found) == min(count, 1 + kept["count"])
        for each in found[:1] if is_whole else found:
            os.close(each)
        return (kept["value"], found[1:].tolist()) if is_whole else (None, [])
