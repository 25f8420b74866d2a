"""Limits the calls that a process answers at a time, and ends them in an orderly way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.errors import RETRY_AFTER_S, QueueFullError, UnavailableError
from shared.rpc.interceptors import Context, SpanInterceptor

# Calls of a process. Calls of the health service do not count and are never refused.
MAX_CALLS = 1024
_HEALTH = "/grpc.health."
# These calls last as long as their clients want: gRPC's own services (mostly health watches) and
# watches of the prefix cache.
_ENDLESS = (
    _HEALTH,
    "/grpc.reflection.",
    "/nanovllm.scheduler.v1.SchedulerService/WatchBlocks",
)
_Task = asyncio.Task[object]


class OpenCalls(SpanInterceptor):
    """Records the task of each call, and rejects calls beyond `MAX_CALLS`. It must come after the
    interceptor that translates errors. Servers of one process share it."""

    def __init__(self) -> None:
        self._tasks: set[_Task] = set()
        self._num_calls = 0  # without those of the health service
        self._served: set[_Task] = set()  # tasks of calls that end by themselves
        self._ending = False

    @property
    def count(self) -> int:
        """The number of open calls that would end by themselves."""
        return len(self._served)

    async def finished(self, timeout_s: float) -> None:
        """Waits, up to `timeout_s`, until all calls that end by themselves have ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._served:
                    await asyncio.wait(self._served)

    def end(self) -> None:
        """Ends every open call, and any later call, with UNAVAILABLE. The client has received all
        chunks so far and can continue at another server."""
        self._ending = True
        for task in self._tasks:
            task.cancel()

    @asynccontextmanager
    async def span(self, method: str, context: Context | None = None) -> AsyncIterator[None]:
        """Records a call while it runs. A call over HTTP has no context.

        Raises:
            QueueFullError: too many calls are open.
            UnavailableError: the server ends the call.
        """
        if self._ending:
            raise _stopping()
        counts = not method.startswith(_HEALTH)
        if counts and self._num_calls >= MAX_CALLS:
            raise QueueFullError(
                f"calls: {self._num_calls} are open; the limit of this process is {MAX_CALLS}",
                RETRY_AFTER_S,
                "calls",
            )
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._num_calls += counts
        if not method.startswith(_ENDLESS):
            self._served.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._ending:
                raise _stopping() from None
            raise
        finally:
            self._num_calls -= counts
            self._tasks.discard(task)
            self._served.discard(task)


def _stopping() -> UnavailableError:
    return UnavailableError("this server is stopping")
