"""A stream to a rank. Any failure on it means that the workers are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from collections.abc import Sequence as Seq
from typing import Any, Generic, TypeVar

from grpc import aio

from scheduler_svc.engine import WorkersLostError

Request = TypeVar("Request")
Response = TypeVar("Response")
Result = TypeVar("Result")


class RankStream(Generic[Request, Response]):
    """Carries messages of one epoch to one rank and brings its answers back. `write` and `read`
    raise WorkersLostError once the stream has ended or was cancelled."""

    def __init__(self, call: aio.StreamStreamCall[Request, Response]) -> None:
        self._call = call

    def done(self) -> bool:
        """Whether the stream has ended."""
        return self._call.done()

    def cancel(self) -> None:
        self._call.cancel()

    async def write(self, request: Request) -> None:
        """Sends a message."""
        await self._or_lost(self._call.write(request))

    async def read(self) -> Response:
        """Receives the next answer."""
        response = await self._or_lost(self._call.read())
        if response is aio.EOF:
            raise WorkersLostError(await self.end_reason())
        return response  # type: ignore[return-value]  # not EOF, which has no type of its own

    async def end_reason(self) -> str:
        """Waits until the stream has ended, and returns its status."""
        return f"{(await self._call.code()).name}: {await self._call.details()}"

    async def _or_lost(self, operation: Awaitable[Result]) -> Result:
        try:
            return await operation
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkersLostError(await self.end_reason()) from error
        except asyncio.CancelledError as error:
            # grpc.aio raises this error for a cancelled call, too.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise WorkersLostError("the scheduler gave up the steps in flight") from error


async def together(calls: Seq[Coroutine[Any, Any, Result]]) -> Seq[Result]:
    """`asyncio.gather`, but without a task for a lone rank, which saves two loop iterations."""
    if len(calls) == 1:
        return [await calls[0]]
    return await asyncio.gather(*calls)
