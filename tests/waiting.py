"""Waiting for what other threads and processes do: by asking again and again, up to a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

Answer = TypeVar("Answer")

# For steps that take seconds, on a machine that is busy with other work. Less than any test's time
# limit, so that what was waited for is named.
WAIT_S = 180.0
_POLL_S = 0.02


def wait_for(ask: Callable[[], Answer | None], what: str, timeout_s: float = WAIT_S) -> Answer:
    """Returns the first answer that is not None, 0 or False.

    Raises:
        TimeoutError: there was none within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(_POLL_S)
    return answer


async def until(ask: Callable[[], Answer | None], what: str, timeout_s: float = WAIT_S) -> Answer:
    """`wait_for` beside an event loop."""
    deadline = time.monotonic() + timeout_s
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        await asyncio.sleep(_POLL_S)
    return answer


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
