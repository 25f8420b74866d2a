"""The part of an HTTP/2 client that a benchmark needs to hold gRPC streams open.

Python's gRPC client spends more time on a message than the server being measured, and would take
the server's cores away. This client (RFC 9113, gRPC over HTTP/2) sends plain literal headers, gives
the server the maximum window and ignores the headers that it receives.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_HEADER_BYTES = 9  # size of a frame's header
_PREFIX_BYTES = 5  # size of a gRPC message's prefix: compressed flag, length
_LARGEST_WINDOW = (1 << 31) - 1
_FIRST_WINDOW = (1 << 16) - 1
_SETTING_INITIAL_WINDOW_SIZE = 4

OnMessage = Callable[[bytes], None]


async def connect(address: str, path: str) -> Http2Connection:
    """Connects to `host:port`, for calls to the method `/package.Service/Method`."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(lambda: Http2Connection(address, path), host, int(port))
    return made


class Http2Connection(asyncio.Protocol):
    """Makes calls to one method, each with one request and a stream of responses."""

    def __init__(self, authority: str, path: str) -> None:
        """`authority`: `host:port`; `path`: `/package.Service/Method`."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": authority,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self._headers = b"".join(_literal(name, value) for name, value in headers.items())
        self._calls: dict[int, tuple[OnMessage, asyncio.Future[None]]] = {}
        self._unread: dict[int, bytes] = {}  # by stream: the start of a message
        self._next_stream = 1
        self._buffer = b""

    def call(self, request: bytes, on_message: OnMessage) -> asyncio.Future[None]:
        """Starts a call; the future is done once the server ends the call with any status."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[stream] = on_message, ended
        body = struct.pack(">BI", 0, len(request)) + request
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, stream, self._headers)
            + _frame(_DATA, _END_STREAM, stream, body)
        )
        return ended

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HI", _SETTING_INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        more_window = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        transport.write(
            _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, more_window)
        )

    def connection_lost(self, error: Exception | None) -> None:
        for _, ended in self._calls.values():
            ended.set_exception(ConnectionError("the server closed the connection"))
        self._calls.clear()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        start, size = 0, len(buffer)
        while size - start >= _HEADER_BYTES:
            payload = start + _HEADER_BYTES
            end = payload + int.from_bytes(buffer[start : start + 3], "big")
            if end > size:
                break
            kind, flags = buffer[start + 3], buffer[start + 4]
            stream = int.from_bytes(buffer[start + 5 : payload], "big")
            self._on_frame(kind, flags, stream, buffer[payload:end])
            start = end
        self._buffer = buffer[start:]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._on_data(stream, payload)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY:
            self._transport.close()
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            call = self._calls.pop(stream, None)
            if call is not None:
                call[1].set_result(None)

    def _on_data(self, stream: int, payload: bytes) -> None:
        """Splits a stream into messages. A frame may hold several messages or a part of one."""
        data = self._unread.pop(stream, b"") + payload
        start = 0
        while len(data) - start >= _PREFIX_BYTES:
            body = start + _PREFIX_BYTES
            end = body + int.from_bytes(data[start + 1 : body], "big")
            if end > len(data):
                break
            self._calls[stream][0](data[body:end])
            start = end
        if start < len(data):
            self._unread[stream] = data[start:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is neither indexed nor compressed (RFC 7541, 6.2.2), under 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
