"""The connection to a scheduler: the stream of requests and tokens, and single calls beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
from grpc import StatusCode, aio

from nano_vllm_grpc.tls import FileError
from shared.backoff import Backoff
from shared.channels import Dialer
from shared.errors import UnavailableError
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger(__name__)

Outgoing = asyncio.Queue[pb.FrontendMessage | None]  # None ends the stream

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_CONNECT_TIMEOUT_S = 10.0  # then a new channel is opened, with the current certificates
RETRY_AFTER_S = 0.5  # sent to clients while there is no connection


class SchedulerConnection:
    """Connects to the scheduler at `address`, and reconnects whenever the connection is lost."""

    def __init__(
        self,
        address: str,
        dialer: Dialer,
        on_message: Callable[[pb.SchedulerMessage], Awaitable[None]],
        on_lost: Callable[[bool], Awaitable[None]],
        needs_to_be_alone: Callable[[], bool],
    ) -> None:
        """Args:
        on_message: receives each message. The first one of a connection is an `engine_info`.
        on_lost: is called when a connection is lost, with whether the scheduler died.
        needs_to_be_alone: returns whether the next connection is to be the scheduler's only one.
        """
        self.address = address
        self.info: pb.EngineInfo | None = None  # None: there is no connection
        self.is_alone = False  # whether the scheduler has no other connection meanwhile
        self._dialer = dialer
        self._on_message = on_message
        self._on_lost = on_lost
        self._needs_to_be_alone = needs_to_be_alone
        self._stub: SchedulerServiceAsyncStub | None = None  # None: there is no connection
        self._outgoing: Outgoing = asyncio.Queue()
        self._backoff = Backoff(_MIN_BACKOFF_S, _MAX_BACKOFF_S)

    def send(self, message: pb.FrontendMessage) -> None:
        """Sends a message. Without a connection, the message is dropped."""
        if self.info is not None:
            self._outgoing.put_nowait(message)

    def close(self) -> None:
        """Has the scheduler end the connection, which drops the requests that it has from it."""
        if self.info is not None:
            self._outgoing.put_nowait(None)

    @contextmanager
    def stub(self) -> Iterator[SchedulerServiceAsyncStub]:
        """Lends the stub of the connected scheduler for calls beside the stream.

        Raises:
            UnavailableError: there is no connection, or the scheduler ends the call.
        """
        if self._stub is None or self.info is None:
            raise no_engine()
        try:
            yield self._stub
        except aio.AioRpcError as error:
            raise UnavailableError(error.details() or error.code().name) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise no_engine() from None  # closing the channel cancels the waits of its calls

    async def run(self) -> None:
        """Connects, and reconnects after each loss, until cancelled."""
        while True:
            reason = await self._connect()
            event = "no connection to the scheduler; reconnecting"
            log.warning(event, address=self.address, reason=reason)
            await asyncio.sleep(self._backoff.next_s())

    async def _connect(self) -> str:
        """Runs one connection on a channel of its own; returns why it failed or ended."""
        try:
            async with self._dialer.open(self.address) as channel:
                with contextlib.suppress(TimeoutError):  # then the call reports the reason
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        await channel.channel_ready()
                self._stub = SchedulerServiceStub(channel)
                return await self._converse(self._stub)
        except FileError as error:
            return str(error)
        finally:
            self._stub = None

    async def _converse(self, stub: SchedulerServiceAsyncStub) -> str:
        outgoing: Outgoing = asyncio.Queue()
        self._outgoing = outgoing
        self.is_alone = self._needs_to_be_alone()
        connect = stub.ConnectAlone if self.is_alone else stub.Connect
        call = connect(_drain(outgoing))
        reason, died = "the scheduler ended the stream", False
        try:
            async for message in call:
                if message.HasField("engine_info"):
                    self.info = message.engine_info
                    self._backoff.reset()
                await self._on_message(message)
        except aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            died = error.code() is not StatusCode.ABORTED  # ABORTED asks for another stream
        finally:
            call.cancel()
            outgoing.put_nowait(None)  # grpc.aio leaves an ended call's iterator waiting
        if self.info is not None:
            self.info = None
            await self._on_lost(died)
        return reason


def no_engine() -> UnavailableError:
    """The error of a request while there is no connection."""
    return UnavailableError("no engine is ready", RETRY_AFTER_S)


async def _drain(outgoing: Outgoing) -> AsyncIterator[pb.FrontendMessage]:
    while (message := await outgoing.get()) is not None:
        yield message
