"""Threads that callers share fairly: each takes turns with the others, however much it queues."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

# What is to be run, by its result, the first one first.
_Queue = OrderedDict["asyncio.Future[Any]", Callable[[], Any]]


class FairThreads:
    """Runs functions on `threads` threads, callers round robin (Nagle, RFC 970): one with a
    thousand jobs delays another's by at most one job per thread. Use it on the event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threads
        # By caller, the one whose turn it is first; none is empty.
        self._queues: OrderedDict[str, _Queue] = OrderedDict()

    async def run(self, caller: str, work: Callable[[], Result]) -> Result:
        """Runs `work` when it is its caller's turn. If this is cancelled before, it never runs,
        and is let go of at once: it may hold a long text."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, OrderedDict())[result] = work
        del work
        self._start()
        try:
            return await result
        except asyncio.CancelledError:
            self._drop(caller, result)
            raise

    def close(self) -> None:
        """Drops queued work and lets the threads end."""
        for queue in self._queues.values():
            for result in queue:
                result.cancel()
        self._queues.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drop(self, caller: str, result: asyncio.Future[Any]) -> None:
        queue = self._queues.get(caller)
        if queue is not None and result in queue:
            del queue[result]
            if not queue:
                del self._queues[caller]

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and self._queues:
            caller, queue = next(iter(self._queues.items()))
            result, work = queue.popitem(last=False)
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
