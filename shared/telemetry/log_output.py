"""A standard error for log lines that can neither fail nor block."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

# How long the reader of a full pipe may keep a line waiting; once one is dropped, the next do not.
_PATIENCE_MS = 100


class LogOutput(io.RawIOBase):
    """Writes lines to a file descriptor and drops those that cannot be written at once: to a full
    disk, a pipe that nobody reads, or one whose reader is gone.

    `notice`: makes the line that says how many were dropped, which is written as soon as lines can
    be written again.
    """

    def __init__(self, fd: int, notice: Callable[[int], str]) -> None:
        self._fd = fd
        self._notice = notice
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = threading.RLock()  # a finalizer may warn while this thread writes
        self._dropped = 0
        self._torn = False  # the last line written lacks its end

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """Takes all of `data`, which is whole lines, whether or not they can be written."""
        lines = bytes(data)
        with self._lock:
            if not (self._say_what_was_dropped() and self._send(lines)):
                self._dropped += max(lines.count(b"\n"), 1)
        return len(lines)

    def _say_what_was_dropped(self) -> bool:
        if not self._dropped:
            return True
        line = "\n" * self._torn + self._notice(self._dropped) + "\n"
        if not self._send(line.encode()):
            return False
        self._dropped, self._torn = 0, False
        return True

    def _send(self, data: bytes) -> bool:
        """Writes what it can, and tells whether that was all of `data`."""
        rest = memoryview(data)
        try:
            # A pipe that is ready takes PIPE_BUF bytes without blocking.
            while rest and self._poll.poll(0 if self._dropped else _PATIENCE_MS):
                rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]
        except OSError:
            pass  # as if it were not ready
        self._torn |= 0 < len(rest) < len(data)
        return not rest


def shield_stderr(notice: Callable[[int], str]) -> None:
    """Replaces `sys.stderr` by one to which no write of Python's can raise or block.

    `notice`: see `LogOutput`.
    """
    # If there is none, it was closed when the program started. The descriptor opened here then gets
    # its number, so that no other file does, which libraries would write their own lines to.
    fd = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY)
    # Line buffering makes each line one write.
    sys.stderr = io.TextIOWrapper(
        LogOutput(fd, notice), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
