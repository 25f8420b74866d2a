"""The state of a keeper (`shared.process.keeper`), for other processes of the same user to read.

It is in memory that only the keeper's descriptors lead to, so that no disk can be too full for it.
(A process title would do, but setting one overwrites `/proc/PID/environ`, by which the launcher
finds the processes of a stack.)
"""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_NAME = "keeper-state"
_BYTES = mmap.PAGESIZE
_MAX_REASON = 500  # characters


@dataclass(frozen=True)
class KeeperState:
    """A keeper's fork, or what it waits for."""

    pid: int  # of the fork that serves, or will; 0: there is none now
    reason: str = ""  # why the last one could not start or died, until another is ready
    due: float = 0.0  # when the next is forked, by the monotonic clock

    @property
    def trouble(self) -> str:
        """`starts again in 4.0 s: REASON`; empty if there is none."""
        if not self.reason:
            return ""
        wait_s = self.due - time.monotonic()
        when = f"starts again in {wait_s:.1f} s" if wait_s > 0 else "is starting again"
        return f"{when}: {self.reason}"


class StateBoard:
    """Where a keeper shows its state."""

    def __init__(self) -> None:
        self._shown: KeeperState | None = None
        try:
            self._fd = os.memfd_create(_NAME)
            os.ftruncate(self._fd, _BYTES)
            self._memory = mmap.mmap(self._fd, _BYTES)
        except OSError:  # no descriptors, or no files of any size: nobody will see it
            self._fd, self._memory = -1, mmap.mmap(-1, _BYTES)

    def show(self, state: KeeperState) -> None:
        if state != self._shown:
            text = json.dumps(asdict(state) | {"reason": state.reason[:_MAX_REASON]}).encode()
            self._memory[: len(text) + 1] = text + b"\0"
            self._shown = state

    def close(self) -> None:
        """Gives it up, in a fork."""
        self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)


def read_keeper_state(keeper: int) -> KeeperState | None:
    """Returns the state of the keeper with this process id; None if it is none, or just writes."""
    try:
        for descriptor in Path(f"/proc/{keeper}/fd").iterdir():
            if os.readlink(descriptor).startswith(f"/memfd:{_NAME} "):
                return KeeperState(**json.loads(descriptor.read_bytes().partition(b"\0")[0]))
    except (OSError, ValueError):
        return None
    return None
