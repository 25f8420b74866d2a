"""The state of a parent process (`parent_process`), which it shows to other processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from shared.process.owner import is_own
from shared.process.published_state import read_published_state

STATE_NAME = "parent"


@dataclass(frozen=True)
class ParentState:
    """The service fork of a parent process, or why there is none."""

    pid: int  # of the service fork; 0: there is none now
    reason: str = ""  # why the last fork died or could not start, until another is ready
    due: float = 0.0  # time of the next fork, by the monotonic clock
    num_refused: int = 0  # successors that could not start (`RESTART`)
    remark: str = ""  # on the last successor

    @property
    def trouble(self) -> str:
        """`starts again in 4.0 s: REASON`; empty without a reason."""
        if not self.reason:
            return ""
        wait_s = self.due - time.monotonic()
        when = f"starts again in {wait_s:.1f} s" if wait_s > 0 else "is starting again"
        return f"{when}: {self.reason}"


def read_parent_state(parent: int) -> ParentState | None:
    """Returns the state of the parent process with this id; None if it shows none. A fork counts
    only while it is a child of the parent process."""
    shown = read_published_state(parent, STATE_NAME)
    if not shown:
        return None
    state = ParentState(**shown)
    return state if not state.pid or is_own(state.pid, parent) else replace(state, pid=0)
