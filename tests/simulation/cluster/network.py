"""Connections between frontends and engines in virtual time: what is sent arrives later, in order.
A partition holds it up; it is lost with the connection, or with the process that it came from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from shared.errors import ServiceError
from shared.pb import scheduler_pb2 as pb

if TYPE_CHECKING:
    from tests.simulation.cluster.engines import Process
    from tests.simulation.cluster.hosts import Host

_END, _CANCEL = object(), object()
_KEEPALIVE_S = 1.0, 2.0  # after which either end of a partitioned connection gives it up


class DiedError(Exception):
    """Ends what a scheduler was doing when it died."""


class Link:
    """The network between one frontend and one engine's host."""

    def __init__(
        self, rng: Random, delays: Callable[[], float], on_lost: Callable[[Process], None]
    ) -> None:
        """`on_lost`: is called when the frontend learns that its connection is lost."""
        self.rng = rng
        self.delays = delays
        self.on_lost = on_lost
        self.healed = asyncio.Event()
        self.healed.set()
        self.calls: dict[Call, None] = {}
        self._held: list[Callable[[], None]] = []

    @property
    def is_cut(self) -> bool:
        return not self.healed.is_set()

    def deliver(self, take: Callable[[], None]) -> None:
        if self.is_cut:
            self._held.append(take)
        else:
            take()

    def cut(self) -> None:
        """Holds everything up until `heal`. Both ends give up their connection after a while,
        each at its own time."""
        if self.is_cut:
            return
        self.healed.clear()
        loop = asyncio.get_running_loop()
        for give_up in (Call.break_client, Call.break_server):
            loop.call_later(self.rng.uniform(*_KEEPALIVE_S), self._give_up, give_up, [*self.calls])

    def heal(self) -> None:
        self.healed.set()
        held, self._held = self._held, []
        for take in held:
            take()

    def _give_up(self, give_up: Callable[[Call], None], calls: list[Call]) -> None:
        if self.is_cut:
            for call in calls:
                give_up(call)


class _Pipe:
    """One direction of a call."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._arrives_at = 0.0
        self._closed = False
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: object) -> None:
        self.call(partial(self._take, item))

    def call(self, take: Callable[[], None]) -> None:
        """Calls `take` where the pipe ends, once all that was put in before is there."""
        at = self._loop.time() + self._link.delays()
        self._arrives_at = max(self._arrives_at + 1e-9, at)
        self._loop.call_at(self._arrives_at, self._link.deliver, take)

    def close(self, last: object) -> None:
        """Has it end with `last` at once, and lose what is on its way."""
        self._take(last)
        self._closed = True

    async def get(self) -> Any:
        return await self._arrived.get()

    def _take(self, item: object) -> None:
        if not self._closed:
            self._arrived.put_nowait(item)


class Call:
    """A streaming call, as its client sees it, and the server's task."""

    def __init__(
        self, link: Link, process: Process | None, method: str, requests: AsyncIterator[Any] | Any
    ) -> None:
        self._link = link
        self._process = process
        self._up, self._down = _Pipe(link), _Pipe(link)
        self._sender: asyncio.Task[None] | None = None
        self._server: asyncio.Task[None] | None = None
        self._cancelled = False
        if process is None or not process.accepts:
            self._down.put(_lost())
            return
        link.calls[self] = process.calls[self] = None
        argument = requests
        if method.startswith("Connect"):
            self._sender = asyncio.ensure_future(self._send(requests))
            argument = self._received()
        handler = getattr(process.servicer, method)
        self._server = asyncio.ensure_future(self._serve(partial(handler, argument, self)))

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (item := await self._down.get()) is not _END:
            if isinstance(item, BaseException):
                if self._process and self._sender and _is_loss(item):
                    self._link.on_lost(self._process)
                raise item
            yield item

    def cancel(self) -> None:
        """Ends the call from the client's side. Like grpc.aio, it cancels who reads it then."""
        if self._cancelled:
            return
        self._cancelled = True
        if self._sender is not None:
            self._sender.cancel()
        self._down.close(asyncio.CancelledError())
        self._up.call(self.interrupt)
        self._link.calls.pop(self, None)

    def interrupt(self) -> None:
        """Has the server's end of it cancelled."""
        if self._server is not None:
            self._server.cancel()

    def break_client(self) -> None:
        self._down.close(_lost())

    def break_server(self) -> None:
        self._up.close(_CANCEL)
        self.interrupt()

    def lose(self) -> None:
        """The process has died: what it sent arrives, or not."""
        if self._link.rng.random() < 0.5:
            self._down.put(_lost())
        else:
            self._link.deliver(partial(self._down.close, _lost()))
        self.interrupt()

    async def write(self, message: object) -> None:
        """Plays the context of the server's method."""
        if self._process is not None and self._process.alive:
            self._down.put(message)

    async def _send(self, requests: AsyncIterator[pb.FrontendMessage]) -> None:
        used: set[int] = set()
        async for message in requests:
            if message.HasField("submit"):
                first, n = message.submit.request, message.submit.n or 1
                assert used.isdisjoint(range(first, first + n)), "a number is used twice"
                used.update(range(first, first + n))
            self._up.put(message)
        self._up.put(_END)

    async def _received(self) -> AsyncIterator[object]:
        while (item := await self._up.get()) is not _END:
            if item is _CANCEL:
                raise asyncio.CancelledError
            yield item

    async def _serve(self, handle: Callable[[], Coroutine[Any, Any, None]]) -> None:
        end: object = _lost()
        try:
            await handle()
            end = _END
        except ServiceError as error:
            end = _status(error.code, error.trailing_metadata())
        except (asyncio.CancelledError, DiedError):
            pass  # before it was accepted, or the process has died
        finally:
            assert self._process is not None
            self._process.calls.pop(self, None)
            if self._process.alive:
                self._down.put(end)


class Dialer:
    """A frontend's: opens channels to hosts by address."""

    tls = None

    def __init__(self, reach: Callable[[str], tuple[Link, Host]]) -> None:
        self._reach = reach

    @asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[Channel]:
        channel = Channel(*self._reach(address))
        try:
            yield channel
        finally:
            channel.close()


class Channel:
    """The methods of a channel that the generated stubs call."""

    def __init__(self, link: Link, host: Host) -> None:
        self._link = link
        self._host = host
        self._process: Process | None = None  # that it is connected to
        self._calls: list[Call] = []

    async def channel_ready(self) -> None:
        process = None
        while process is None or self._host.process is not process or self._link.is_cut:
            await self._link.healed.wait()
            process = await self._host.listens()
            await asyncio.sleep(2 * self._link.delays())
        self._process = process

    def stream_stream(self, path: str, *_: object, **__: object) -> Callable[..., Call]:
        return partial(self._call, path.rpartition("/")[2])

    unary_stream = stream_stream

    def unary_unary(self, *_: object, **__: object) -> None:
        """Is not called here."""

    def close(self) -> None:
        for call in self._calls:
            call.cancel()

    def _call(self, method: str, requests: object) -> Call:
        call = Call(self._link, self._process, method, requests)
        self._calls.append(call)
        return call


def _lost() -> aio.AioRpcError:
    return _status(grpc.StatusCode.UNAVAILABLE, ())


def _is_loss(error: BaseException) -> bool:
    return isinstance(error, aio.AioRpcError) and error.code() is not grpc.StatusCode.ABORTED


def _status(
    code: grpc.StatusCode, trailers: tuple[tuple[str, str | bytes], ...]
) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailers))
