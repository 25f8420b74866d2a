"""Threads that callers share fairly: each takes turns with the others, however much it queues."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class FairThreads:
    """Runs functions on `threads` threads, callers round robin (Nagle, RFC 970): one with a
    thousand jobs delays another's by at most one job per thread. Use it on the event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threads
        # By caller, the one whose turn it is first; none is empty.
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()

    async def run(self, caller: str, work: Callable[[], Result]) -> Result:
        """Runs `work` when it is its caller's turn. If this is cancelled before, it never runs."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, deque()).append((work, result))
        self._start()
        return await result

    def close(self) -> None:
        """Drops queued work and lets the threads end."""
        for queue in self._queues.values():
            for _, result in queue:
                result.cancel()
        self._queues.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and self._queues:
            caller, queue = next(iter(self._queues.items()))
            work, result = queue.popleft()
            if queue:
                self._queues.move_to_end(caller)
            else:
                del self._queues[caller]
            if not result.done():  # else nobody waits for it any more
                self._idle -= 1
                job = loop.run_in_executor(self._pool, work)
                job.add_done_callback(partial(self._done, result))

    def _done(self, result: asyncio.Future[Any], job: asyncio.Future[Any]) -> None:
        self._idle += 1
        if job.cancelled():
            result.cancel()
        elif (error := job.exception()) is not None:
            if not result.done():
                result.set_exception(error)
        elif not result.done():
            result.set_result(job.result())
        self._start()
