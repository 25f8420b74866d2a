"""Listens for HTTP, bounds what a connection may hold, and drains when the process stops."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from frontend.http.app import MAX_HEAD_BYTES, App
from frontend.settings import FrontendSettings
from shared.rpc.server import FLUSH_S, HANDSHAKE_S, MAX_CONNECTIONS
from shared.tls import server_context

log = structlog.get_logger(__name__)

_HEAD_S = 10.0  # for a request's line and headers to arrive
_IDLE_S = 75.0  # between requests of a connection
_ENGINE_S = 2.0  # that a new process waits for an engine before it answers without one
_BACKLOG = 1024
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
# A client whose host has vanished is noticed after about half a minute.
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A closed connection (TIME_WAIT) keeps no server from the port.
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class HttpServer:
    """Serves an application beside gRPC.

    Raises:
        FileError: a certificate file cannot be used.
    """

    def __init__(self, settings: FrontendSettings, app: App) -> None:
        self.app = app
        tls = settings.server_tls
        self._tls = server_context(tls) if tls else None
        self._config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=int(_IDLE_S),
            server_header=False,
            proxy_headers=False,  # callers could claim to be others
            reset_contextvars=True,
        )
        self._config.load()
        # Its lines would quote paths that callers choose.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._sockets: Sequence[socket.socket] = ()

    async def run(self, sockets: Sequence[socket.socket], was_ready: asyncio.Event) -> None:
        """Listens on bound sockets, which the parent process keeps for the next fork, and continues
        background responses of others, until cancelled.

        Args:
            was_ready: set once an engine is ready, for which connections wait a moment.
        """
        self._sockets = sockets
        for each in sockets:
            each.listen(_BACKLOG)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENGINE_S):
                await was_ready.wait()
        for each in sockets:
            self._servers.append(
                await asyncio.get_running_loop().create_server(
                    self._connection,
                    sock=each.dup(),
                    ssl=self._tls,
                    backlog=_BACKLOG,
                    ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
                )
            )
            log.info("listening for HTTP", address=each.getsockname(), tls=self._tls is not None)
        await self.app.background.sweep()

    def drain(self) -> None:
        """Stops listening, so that other frontends get new connections, and closes idle ones."""
        for server in self._servers:
            server.close()
        for each in self._sockets:
            # Also for the parent process, whose next fork listens again.
            each.shutdown(socket.SHUT_RDWR)
        for connection in [*self._state.connections]:
            connection.shutdown()
        self.app.drain()

    async def close(self) -> None:
        """Waits until the last answers are sent, but not for clients that do not read."""
        if self._state.tasks:
            await asyncio.wait([*self._state.tasks], timeout=FLUSH_S)
        for connection in [*self._state.connections]:
            connection.transport.abort()

    def _connection(self) -> asyncio.Protocol:
        return _Connection(self._config, self._state, {})


class _Connection(HttpToolsProtocol):
    """A connection with limits on the size and the time of unfinished request heads."""

    _timer: asyncio.TimerHandle | None = None  # while a head is expected or unfinished
    _head_bytes = 0  # of an unfinished head, without its first piece
    _refused = False  # whether what still arrives is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        found: Any = transport.get_extra_info("socket")
        for option in _OPTIONS:
            found.setsockopt(*option)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        began = self._timer
        if began or self.cycle is None or self.cycle.response_complete:
            # Clients in Java offer HTTP/2 so. The parser would take the body for another protocol.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest
        super().data_received(data)
        if self._timer and self._timer is began:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                if self.transport.can_write_eof():  # not with TLS
                    self.transport.write_eof()
                # The timer closes it. If it were closed now, unread data would reset it.
                self._refused = True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_S, self.transport.close)

    def _end_head(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer, self._head_bytes = None, 0
