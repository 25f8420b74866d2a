"""An HTTP/2 client of raw frames that keeps to flow control, and remembers what it received."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from tests.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    dial,
    frame,
    message,
)


def call_frames(stream: int, path: str, body: bytes) -> bytes:
    """A whole call with a short message."""
    opening = frame(HEADERS, call_headers("localhost", path), END_HEADERS, stream)
    return opening + frame(DATA, message(body), END_STREAM, stream)


class RawConnection:
    """Sends frames and keeps what comes back; answers settings and pings, and nothing else."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.window = FIRST_WINDOW  # bytes that the server lets us send on this connection
        self.stream_window = FIRST_WINDOW  # and at the start on each stream
        self.windows: dict[int, int] = {}  # what it has added by stream
        self.received: dict[int, bytes] = {}  # by stream
        self.ended: set[int] = set()  # streams
        self.closed = False
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    def send(self, kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> None:
        self._writer.write(frame(kind, payload, flags, stream))

    def open_call(self, stream: int, path: str) -> None:
        """Sends a call's headers and no message."""
        self.send(HEADERS, call_headers("localhost", path), END_HEADERS, stream)

    def send_message(self, stream: int, body: bytes) -> None:
        """Sends a short message and that no other follows."""
        self.send(DATA, message(body), END_STREAM, stream)

    def reset(self, stream: int) -> None:
        """Cancels a call."""
        self.send(RST_STREAM, struct.pack(">I", 8), stream=stream)

    async def send_long_message(self, stream: int, body: bytes) -> None:
        """Sends a message as fast as the server lets it."""
        data, sent = message(body), 0
        while sent < len(data):
            size = self._room(stream, sent)
            if not size:
                await self.wait_until(lambda: self._room(stream, sent))  # noqa: B023
                continue
            size = min(size, len(data) - sent, MAX_FRAME)
            sent += size
            self.window -= size
            self.send(DATA, data[sent - size : sent], END_STREAM * (sent == len(data)), stream)

    def _room(self, stream: int, sent: int) -> int:
        return max(min(self.window, self.stream_window + self.windows.get(stream, 0) - sent), 0)

    async def wait_until(self, seen: Callable[[], object], timeout_s: float = 20) -> None:
        """Waits until `seen()`, which frames may make true."""
        async with asyncio.timeout(timeout_s):
            while not seen():
                self._news.clear()
                await self._news.wait()

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._on_frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                self._news.set()
        self.closed = True
        self._news.set()

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    self.stream_window = value
            self.send(SETTINGS, flags=ACK)
        elif kind == PING and not flags & ACK:
            self.send(PING, payload, ACK)
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self.windows[stream] = self.windows.get(stream, 0) + more
            else:
                self.window += more
        elif kind == DATA:
            self.received[stream] = self.received.get(stream, b"") + payload
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def connect(address: str, window: int = FIRST_WINDOW) -> AsyncIterator[RawConnection]:
    """Connects to a gRPC server, whose streams may each send `window` bytes."""
    reader, writer = await dial(address)
    connection = RawConnection(reader, writer)
    writer.write(PREFACE)
    connection.send(SETTINGS, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))
    try:
        yield connection
    finally:
        await connection.close()
