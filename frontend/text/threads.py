"""Threads that callers share fairly, and pieces of work that leave turns to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shared.round_robin import RoundRobin

Result = TypeVar("Result")
Item = TypeVar("Item")

_PAUSE_S = 1e-5


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class FairThreads:
    """Runs functions on `threads` threads, with callers in round robin (Nagle, RFC 970). A caller
    with a thousand jobs delays another caller's job by at most one job per thread. Use it on the
    event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threads
        self._waiting: RoundRobin[str, _Job] = RoundRobin()

    def run(self, caller: str, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Runs `work` at its caller's turn. If the future is cancelled before, `work` never runs
        and is dropped at once, because it may hold a long text."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        job = _Job(work, result)
        self._waiting.add(caller, job)
        result.add_done_callback(lambda _: self._waiting.remove(caller, job))
        self._start()
        return result

    def close(self) -> None:
        """Drops queued work and lets the threads end."""
        for job in self._waiting.clear():
            job.result.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and self._waiting:
            job = self._waiting.pop()
            if not job.result.done():  # else it was cancelled
                self._idle -= 1
                run = loop.run_in_executor(self._pool, job.work)
                run.add_done_callback(partial(self._done, job.result))

    def _done(self, result: asyncio.Future[Any], run: asyncio.Future[Any]) -> None:
        self._idle += 1
        if run.cancelled():
            result.cancel()
        elif (error := run.exception()) is not None:
            if not result.done():
                result.set_exception(error)
        elif not result.done():
            result.set_result(run.result())
        self._start()


def in_pieces(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yields `items`, `size` at a time, for a thread that works on them in Python.

    It sleeps in between, so that the event loop, which needs the interpreter's lock, waits for one
    piece at most. Otherwise the loop would wait until the interpreter takes the lock from this
    thread (`sys.getswitchinterval`).
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
        time.sleep(_PAUSE_S)
