"""A standard error stream whose writes neither fail nor block."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

# How long a line waits for the reader of a full pipe. After a dropped line, the next ones do not
# wait.
_PATIENCE_MS = 100


class LogOutput(io.RawIOBase):
    """Writes lines to a file descriptor, and drops lines that cannot be written at once. That
    happens with a full disk, a pipe that nobody reads or a pipe whose reader is gone.

    `notice`: makes the line that says how many lines were dropped. It is written as soon as lines
    can be written again.
    """

    def __init__(self, fd: int, notice: Callable[[int], str]) -> None:
        self._fd = fd
        self._notice = notice
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = threading.RLock()  # a finalizer may warn while this thread writes
        self._dropped = 0
        self._torn = False  # whether the last line written lacks its end

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """Writes or drops `data`, which is whole lines; always returns its length."""
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
        """Writes as much of `data` as possible; returns whether that was all."""
        rest = memoryview(data)
        try:
            # A pipe that is ready takes PIPE_BUF bytes without blocking.
            while rest and self._poll.poll(0 if self._dropped else _PATIENCE_MS):
                rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]
        except OSError:
            pass  # counts as a descriptor that is not ready
        self._torn |= 0 < len(rest) < len(data)
        return not rest


def shield_stderr(notice: Callable[[int], str]) -> None:
    """Replaces `sys.stderr` by a stream to which writes from Python neither raise nor block.

    `notice`: see `LogOutput`.
    """
    # Without `sys.stderr`, descriptor 2 was closed when the program started. The null device then
    # takes that number. Otherwise another file would get it, and libraries would write to the file.
    fd = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY)
    # Line buffering makes each line one write.
    sys.stderr = io.TextIOWrapper(
        LogOutput(fd, notice), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
