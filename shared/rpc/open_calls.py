"""Tracks the calls that a server is answering, so that it can end them in an orderly way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.errors import UnavailableError
from shared.rpc.interceptors import Context, SpanInterceptor

# These calls last as long as their clients want: gRPC's own services (mostly health watches) and
# watches of the prefix cache.
_ENDLESS = (
    "/grpc.health.",
    "/grpc.reflection.",
    "/nanovllm.scheduler.v1.SchedulerService/WatchBlocks",
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)
_Task = asyncio.Task[object]


class OpenCalls(SpanInterceptor):
    """Records the task of each call. Must come after the interceptor that translates errors."""

    def __init__(self) -> None:
        self._tasks: set[_Task] = set()
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
    async def span(self, method: str, context: Context) -> AsyncIterator[None]:
        """Records a call while it runs; raises UnavailableError if the server ends the call."""
        if self._ending:
            raise _stopping()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        if not method.startswith(_ENDLESS):
            self._served.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._ending:
                raise _stopping() from None
            raise
        finally:
            self._tasks.discard(task)
            self._served.discard(task)


def _stopping() -> UnavailableError:
    return UnavailableError("this server is stopping")
