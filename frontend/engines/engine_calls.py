"""Calls to the connected scheduler, apart from the stream of requests and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from grpc import aio

from shared.errors import UnavailableError, passed_on
from shared.pb import scheduler_pb2 as pb

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_TIMEOUT_S = 10.0
_RETRY_AFTER_S = 0.5


class EngineCalls:
    """Makes the calls to the engine that gateways and operators need.

    Each call raises UnavailableError if there is no connection, or if it is lost during the call.
    """

    def __init__(self) -> None:
        self.stub: SchedulerServiceAsyncStub | None = None  # None: there is no connection

    async def load(self) -> pb.GetLoadResponse:
        """The engine's state and counts."""
        with self._connected() as stub:
            return await stub.GetLoad(pb.GetLoadRequest(), timeout=_TIMEOUT_S)

    async def watch_blocks(self) -> AsyncGenerator[pb.BlockEvents, None]:
        """Yields the contents of the prefix cache, then its changes.

        Raises:
            DataLossError: the caller did not read fast enough.
        """
        with self._connected() as stub:
            call = stub.WatchBlocks(pb.WatchBlocksRequest())
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()

    async def flush_cache(self, timeout_s: float) -> bool:
        """Empties the prefix cache once no request runs. Returns whether that happened within
        `timeout_s` seconds."""
        with self._connected() as stub:
            return (await stub.FlushCache(pb.FlushCacheRequest(timeout_s=timeout_s))).flushed

    async def start_profile(self, request: pb.StartProfileRequest) -> Sequence[str]:
        """Has the workers record their next steps. Returns the paths of the future traces.

        Raises:
            InvalidArgumentError, FailedPreconditionError: the workers reject the request.
        """
        with self._connected() as stub:
            return (await stub.StartProfile(request)).traces

    async def stop_profile(self) -> Sequence[str]:
        """Ends a profile. Returns the paths of its traces. Raises what `start_profile` raises."""
        with self._connected() as stub:
            return (await stub.StopProfile(pb.StopProfileRequest())).traces

    @contextmanager
    def _connected(self) -> Iterator[SchedulerServiceAsyncStub]:
        lost = UnavailableError("no engine is ready", _RETRY_AFTER_S)
        if self.stub is None:
            raise lost
        try:
            yield self.stub
        except aio.AioRpcError as error:
            raise passed_on(error, lost) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise lost from None  # closing the channel cancels the waits of its calls
