"""What a process shows to other processes of its user: a JSON object in its memory.

Only the process's descriptors lead to that memory, so no disk can be too full for it. (A process
title would do, but setting one overwrites `/proc/PID/environ`, by which the launcher finds the
processes of a stack.)
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

_PREFIX = "nanovllm-"
_BYTES = 64 << 10


class Board:
    """Where a process shows an object. `name`: what readers ask for."""

    def __init__(self, name: str) -> None:
        self._shown: dict[str, Any] | None = None
        try:
            self._fd = os.memfd_create(_PREFIX + name)
            os.ftruncate(self._fd, _BYTES)
            self._memory = mmap.mmap(self._fd, _BYTES)
        except OSError:  # no descriptors, or no files of any size: nobody will see it
            self._fd, self._memory = -1, mmap.mmap(-1, _BYTES)

    def show(self, value: dict[str, Any]) -> None:
        """Shows `value` from now on, unless it is too long."""
        text = json.dumps(value).encode() + b"\0"
        if value != self._shown and len(text) <= _BYTES:
            self._memory[: len(text)] = text
            self._shown = value

    def close(self) -> None:
        """Gives it up, in a fork."""
        self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)


def read_board(pid: int, name: str) -> dict[str, Any] | None:
    """Returns what the process shows; None if it shows nothing, or is writing at this moment."""
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(descriptor).startswith(f"/memfd:{_PREFIX}{name} "):
                shown = json.loads(descriptor.read_bytes().partition(b"\0")[0])
                return shown if isinstance(shown, dict) else None
    except (OSError, ValueError):
        return None
    return None
