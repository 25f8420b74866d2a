"""Where log lines go: a standard error that can neither fail nor block."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

# How long a reader of the log may make the first line wait that finds its pipe full.
_PATIENCE_MS = 100


class LogOutput(io.RawIOBase):
    """Writes lines to a file descriptor, and drops what cannot be written at once: on a full disk,
    to a pipe that nobody reads, to one whose reader is gone.

    `notice`: given how many lines were dropped, the line that says so, which is written before the
    first one that can be written again.
    """

    def __init__(self, fd: int, notice: Callable[[int], str]) -> None:
        self._fd = fd
        self._notice = notice
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = threading.RLock()  # a finalizer may warn while this thread writes
        self._dropped = 0
        self._torn = False  # the last line that was written lacks its end

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """Takes all of `data`, whole lines, whatever becomes of them."""
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
        """Whether all of `data` was written."""
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
    """From now on nothing that Python writes to `sys.stderr` raises, or blocks.

    `notice`: see `LogOutput`.
    """
    # Without one, it was closed when the program started. The descriptor taken here is then its
    # number, which nothing else gets that libraries would write their own lines to.
    fd = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY)
    # Line buffering makes each line one write.
    sys.stderr = io.TextIOWrapper(
        LogOutput(fd, notice), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
