"""The stream to a scheduler: requests up, tokens down, one connection after another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import structlog
from grpc import StatusCode, aio

from frontend.engines.engine_calls import EngineCalls
from nano_vllm_grpc.tls import FileError
from shared.backoff import Backoff
from shared.channels import Dialer
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger(__name__)

Outgoing = asyncio.Queue[pb.FrontendMessage | None]  # None: nothing follows

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_CONNECT_TIMEOUT_S = 10.0  # then comes a new channel, with the certificates of that time


class Connection:
    """Connects to the scheduler at `address`, again whenever the connection is lost."""

    def __init__(
        self,
        address: str,
        dialer: Dialer,
        on_message: Callable[[pb.SchedulerMessage], Awaitable[None]],
        on_lost: Callable[[bool], Awaitable[None]],
        *,
        names_clients: bool,
    ) -> None:
        """Args:
        on_message: is given each message, of each connection an `engine_info` first.
        on_lost: is called once a connection is lost, and told whether the scheduler died.
        names_clients: whether requests have a client with a name.
        """
        self.address = address
        self.calls = EngineCalls()
        self.info: pb.EngineInfo | None = None  # None: there is no connection
        self._dialer = dialer
        self._on_message = on_message
        self._on_lost = on_lost
        self._names_clients = names_clients
        self._outgoing: Outgoing = asyncio.Queue()
        self._backoff = Backoff(_MIN_BACKOFF_S, _MAX_BACKOFF_S)

    def send(self, message: pb.FrontendMessage) -> None:
        """Sends a message, which is lost unless there is a connection."""
        if self.info is not None:
            self._outgoing.put_nowait(message)

    def close(self) -> None:
        """Has the scheduler end the connection, on which there is nothing left to do."""
        if self.info is not None:
            self._outgoing.put_nowait(None)

    async def run(self) -> None:
        """Connects again and again. Only cancellation ends it."""
        while True:
            reason = await self._connect()
            log.warning("no connection to the scheduler", address=self.address, reason=reason)
            await asyncio.sleep(self._backoff.next_s())

    async def _connect(self) -> str:
        """Runs one connection on a channel of its own; returns why it failed or ended."""
        try:
            async with self._dialer.open(self.address) as channel:
                with contextlib.suppress(TimeoutError):  # then the call says why
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        await channel.channel_ready()
                self.calls.stub = SchedulerServiceStub(channel)
                return await self._converse(self.calls.stub)
        except FileError as error:
            return str(error)
        finally:
            self.calls.stub = None

    async def _converse(self, stub: SchedulerServiceAsyncStub) -> str:
        outgoing: Outgoing = asyncio.Queue()
        self._outgoing = outgoing
        if self._names_clients:
            outgoing.put_nowait(pb.FrontendMessage(names_clients=True))
        call = stub.Connect(_drain(outgoing))
        reason, died = "the scheduler ended the stream", False
        try:
            async for message in call:
                if message.HasField("engine_info"):
                    self.info = message.engine_info
                    self._backoff.reset()
                await self._on_message(message)
        except aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            died = error.code() is not StatusCode.ABORTED  # with which it asks for another stream
        finally:
            call.cancel()
            outgoing.put_nowait(None)  # grpc.aio leaves an ended call's iterator waiting
        if self.info is not None:
            self.info = None
            await self._on_lost(died)
        return reason


async def _drain(outgoing: Outgoing) -> AsyncIterator[pb.FrontendMessage]:
    while (message := await outgoing.get()) is not None:
        yield message
