"""Threads that callers share fairly, and pieces of work that leave turns to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.slots import Slots

Result = TypeVar("Result")
Item = TypeVar("Item")

_PAUSE_S = 1e-5


class FairThreads:
    """Runs functions on `threads` threads, for which callers take turns. A caller with a thousand
    jobs delays another caller's job by at most one job per thread. Use it on the event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._slots = Slots(threads)

    async def run(self, caller: str, work: Callable[[], Result]) -> Result:
        """Runs `work` at its caller's turn, unless it is cancelled before."""
        await self._slots.enter(caller)
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        running.add_done_callback(lambda _: self._slots.leave())
        return await asyncio.shield(running)  # a thread is busy until the end, even if cancelled

    def close(self) -> None:
        """Lets the threads end. Call it when nothing is queued."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def in_pieces(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yields `items`, `size` at a time, for a thread that works on them in Python.

    It sleeps in between, so that the event loop, which needs the interpreter's lock, waits for one
    piece at most. Otherwise the loop would wait until the interpreter takes the lock from this
    thread (`sys.getswitchinterval`).
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
        time.sleep(_PAUSE_S)
