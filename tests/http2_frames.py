"""HTTP/2 frames by hand (RFC 9113), for what no well-behaved client sends: windows that stay shut,
streams that stay half open, floods of control frames."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    3,
    4,
    6,
    7,
    8,
    9,
)
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4  # a setting
LARGEST_WINDOW = (1 << 31) - 1
FIRST_WINDOW = (1 << 16) - 1
MAX_FRAME = 1 << 14  # bytes of payload, unless the peer allows more
_HEADER_BYTES = 9
_NAMES = {
    DATA: "DATA",
    HEADERS: "HEADERS",
    RST_STREAM: "RST_STREAM",
    SETTINGS: "SETTINGS",
    PING: "PING",
    GOAWAY: "GOAWAY",
    WINDOW_UPDATE: "WINDOW_UPDATE",
}


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Encodes a frame: RFC 9113, 4.1."""
    head = struct.pack(">IBBI", len(payload), kind, flags, stream)
    return head[1:] + payload


def literal(name: str, value: str) -> bytes:
    """A header that is neither indexed nor compressed: RFC 7541, 6.2.2."""
    return b"\0" + _string(name) + _string(value)


def call_headers(authority: str, path: str, metadata: Sequence[tuple[str, str]] = ()) -> bytes:
    """The header block of a gRPC call; `path` is `/package.Service/Method`."""
    fixed = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    return b"".join(literal(name, value) for name, value in (*fixed, *metadata))


def message(body: bytes) -> bytes:
    """A gRPC message as it is sent: uncompressed, after its length."""
    return struct.pack(">BI", 0, len(body)) + body


class RawConnection:
    """A connection on which any frame can be sent.

    `received` counts the frames that came, by kind. SETTINGS and PING are acknowledged, as the
    server closes the connection otherwise.
    """

    def __init__(
        self,
        address: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: Counter[str],
    ) -> None:
        self._authority = address
        self._reader = reader
        self._writer = writer
        self._next_stream = 1
        self._reading: asyncio.Task[None] | None = None
        self.received = received

    @property
    def closed(self) -> bool:
        return self._writer.is_closing() or self._reader.at_eof()

    async def send(self, *frames: bytes) -> None:
        """Writes frames, or anything else; does nothing once the server has closed.

        Blocks while the server does not read.
        """
        if self.closed:
            return
        with suppress(ConnectionError):
            self._writer.write(b"".join(frames))
            await self._writer.drain()

    def call(
        self, path: str, metadata: Sequence[tuple[str, str]] = (), *, end: bool = False
    ) -> tuple[int, bytes]:
        """Numbers a new stream; returns its number, and the frame of headers that opens it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        flags = END_HEADERS | (END_STREAM if end else 0)
        headers = call_headers(self._authority, path, metadata)
        return stream, frame(HEADERS, headers, flags, stream)

    def start_reading(self) -> None:
        """Reads what the server sends, in the background."""
        self._reading = asyncio.create_task(self._read())

    async def ended(self) -> None:
        """Waits until the server closes; it must be being read."""
        assert self._reading is not None
        await asyncio.shield(self._reading)

    async def leave(self) -> None:
        """Resets the connection, without a farewell."""
        if self._reading is not None:
            self._reading.cancel()
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(_HEADER_BYTES)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                self.received[_NAMES.get(kind, "other")] += 1
                if kind in (SETTINGS, PING) and not flags & ACK:
                    await self.send(frame(kind, payload if kind == PING else b"", ACK))


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to `host:port` or `unix:path`."""
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


@asynccontextmanager
async def raw_connection(
    address: str,
    *,
    window: int | None = None,
    reads: bool = True,
    preface: bool = True,
    received: Counter[str] | None = None,
) -> AsyncIterator[RawConnection]:
    """Connects to `host:port` or `unix:path`, and leaves without a farewell.

    Args:
        window: bytes that the server may send on each stream, and on the connection if that is
            more than the protocol's 65,535; None: these.
        reads: whether what the server sends is read, in the background.
        preface: whether the connection begins as HTTP/2 asks for.
        received: counts the frames that came; may be shared.
    """
    reader, writer = await dial(address)
    received = Counter() if received is None else received
    connection = RawConnection(address, reader, writer, received)
    if reads:
        connection.start_reading()
    try:
        if preface:
            await connection.send(PREFACE, *_window_frames(window))
        yield connection
    finally:
        await connection.leave()


def _window_frames(window: int | None) -> list[bytes]:
    if window is None:
        return [frame(SETTINGS)]
    frames = [frame(SETTINGS, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))]
    if window > FIRST_WINDOW:
        frames.append(frame(WINDOW_UPDATE, struct.pack(">I", window - FIRST_WINDOW)))
    return frames


def _string(text: str) -> bytes:
    """A string literal: RFC 7541, 5.2, its length in 7 bits and more bytes if need be."""
    data = text.encode()
    length = len(data)
    if length < 127:
        return bytes([length]) + data
    prefix, length = bytearray([127]), length - 127
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    return bytes([*prefix, length]) + data
