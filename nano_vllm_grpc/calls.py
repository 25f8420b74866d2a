"""Calls that are repeated or resumed if their server goes away."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from grpc import ChannelConnectivity, aio

from nano_vllm_grpc.connections import Connections, ServerConnection
from nano_vllm_grpc.errors import UnavailableError, from_rpc_error
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.resume import Call, ResumableRequest
from nano_vllm_grpc.retry import Retries
from nano_vllm_grpc.types import Chunk

if TYPE_CHECKING:
    from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceAsyncStub

Response = TypeVar("Response")
Item = TypeVar("Item")
Received = tuple[Call, pb.GenerateStreamResponse]


def seconds_until(deadline: float) -> float | None:
    """The timeout of a call, for a deadline by `time.monotonic`; None if that is infinite."""
    return None if deadline == math.inf else deadline - time.monotonic()


class Calls:
    """Makes calls, and repeats them if that may help. All methods may raise `LLMError`.

    Args:
        connections: on which the calls are made.
        max_retry_wait_s: how long a call may wait, counted from its first failure since it last
            received anything.
    """

    def __init__(self, connections: Connections, max_retry_wait_s: float) -> None:
        self._connections = connections
        self._max_retry_wait_s = max_retry_wait_s
        self._reached = False  # whether a server has ever answered

    async def stream(self, request: ResumableRequest) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of `request`, from as many calls as needed."""
        async with aclosing(self._messages(request, request.whole)) as messages:
            async for call, message in messages:
                if (chunk := request.take(call, message)) is not None:
                    yield chunk

    async def _messages(
        self, request: ResumableRequest, call: Call
    ) -> AsyncGenerator[Received, None]:
        """Yields the messages of a call of `request`, and of the calls that resume it if it breaks
        off. The request must take each message before the next one is asked for."""
        deadline = request.deadline
        retries = Retries(self._max_retry_wait_s, deadline)
        while True:
            timeout_s = seconds_until(deadline)
            with self._connections.lend() as connection:
                stream = connection.stub.GenerateStream(call.message, timeout=timeout_s)
                try:
                    async for message in stream:
                        self._reached = True
                        retries.progressed()
                        yield call, message
                    return
                except aio.AioRpcError as error:
                    rest = request.resume(call)
                    if not rest:
                        return
                    delay = self._next_delay(error, connection, retries)
                finally:
                    stream.cancel()
            await asyncio.sleep(delay)
            if len(rest) > 1:
                break
            (call,) = rest
        each_one = [self._messages(request, each_call) for each_call in rest]
        async with aclosing(_merge(each_one)) as received:
            async for each in received:
                yield each

    async def unary(
        self,
        start: Callable[[InferenceServiceAsyncStub], Awaitable[Response]],
        deadline: float = math.inf,
    ) -> Response:
        """Returns the response to the call that `start` makes. It is not repeated after
        `deadline`, which is by `time.monotonic`."""
        retries = Retries(self._max_retry_wait_s, deadline)
        while True:
            with self._connections.lend() as connection:
                try:
                    response = await start(connection.stub)
                    self._reached = True
                    return response
                except aio.AioRpcError as error:
                    delay = self._next_delay(error, connection, retries)
            await asyncio.sleep(delay)

    def _next_delay(
        self, error: aio.AioRpcError, connection: ServerConnection, retries: Retries
    ) -> float:
        """Seconds to wait before the next attempt. Raises an `LLMError` if there is to be none."""
        typed = from_rpc_error(error, connection.address)
        unreached = connection.channel.get_state() is ChannelConnectivity.TRANSIENT_FAILURE
        self._reached |= not unreached
        if isinstance(typed, UnavailableError) and typed.retry_after_s is None:
            connection.failed()
        return retries.next_delay(typed, reached=self._reached)


async def _merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yields the items of all streams as they arrive. It asks a stream for the next item only once
    the last one was taken. The first error ends all streams, as does closing."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    item = task.result()
                except StopAsyncIteration:
                    del waiting[task]
                    continue
                stream = waiting.pop(task)
                yield item
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
