"""An HTTP/2 client of frames by hand (RFC 9113), for what no well-behaved client sends: windows
that stay shut, streams that stay half open, floods of control frames."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
_NAMES = {DATA: "DATA", HEADERS: "HEADERS", RST_STREAM: "RST_STREAM", SETTINGS: "SETTINGS"}
_NAMES |= {PING: "PING", GOAWAY: "GOAWAY", WINDOW_UPDATE: "WINDOW_UPDATE"}
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4  # a setting
FIRST_WINDOW = (1 << 16) - 1
MAX_FRAME = 1 << 14  # bytes of payload, unless the peer allows more
CANCEL = struct.pack(">I", 8)  # the payload of a reset
_HEADER_BYTES = 9


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Encodes a frame: RFC 9113, 4.1."""
    head = struct.pack(">IBBI", len(payload), kind, flags, stream)
    return head[1:] + payload


def literal(name: str, value: str) -> bytes:
    """A header that is neither indexed nor compressed: RFC 7541, 6.2.2."""
    return b"\0" + _string(name) + _string(value)


def call_headers(path: str, metadata: Sequence[tuple[str, str]] = ()) -> bytes:
    """The header block of a gRPC call; `path` is `/package.Service/Method`."""
    fixed = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    return b"".join(literal(name, value) for name, value in (*fixed, *metadata))


def message(body: bytes) -> bytes:
    """A gRPC message as it is sent: uncompressed, after its length."""
    return struct.pack(">BI", 0, len(body)) + body


def call_frames(stream: int, path: str, body: bytes) -> bytes:
    """A whole call with a short message."""
    opening = frame(HEADERS, call_headers(path), END_HEADERS, stream)
    return opening + frame(DATA, message(body), END_STREAM, stream)


class RawConnection:
    """Sends any frame and keeps what comes back, if it is read. Answers SETTINGS and PING, as the
    server closes the connection otherwise, and nothing else."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        reads: bool = True,
        counts: Counter[str] | None = None,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._next_stream = 1
        self.window = FIRST_WINDOW  # bytes that the server lets us send on this connection
        self.stream_window = FIRST_WINDOW  # and at the start on each stream
        self.windows: dict[int, int] = {}  # what it has added by stream
        self.received: dict[int, bytes] = {}  # by stream
        self.ended: set[int] = set()  # streams
        self.counts = Counter() if counts is None else counts  # of the frames that came, by kind
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read()) if reads else None

    @property
    def closed(self) -> bool:
        return self._writer.is_closing() or self._reader.at_eof()

    def write(self, *frames: bytes) -> None:
        """Has frames, or anything else, sent as soon as the server reads."""
        self._writer.write(b"".join(frames))

    async def send(self, *frames: bytes) -> None:
        """Sends frames, or anything else, and blocks while the server does not read; does nothing
        once it has closed."""
        if self.closed:
            return
        with suppress(ConnectionError):
            self.write(*frames)
            await self._writer.drain()

    def call(
        self, path: str, metadata: Sequence[tuple[str, str]] = (), *, end: bool = False
    ) -> tuple[int, bytes]:
        """Numbers a new stream; returns its number, and the frame of headers that opens it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        flags = END_HEADERS | (END_STREAM if end else 0)
        return stream, frame(HEADERS, call_headers(path, metadata), flags, stream)

    def open_call(self, stream: int, path: str) -> None:
        """Sends a call's headers and no message."""
        self.write(frame(HEADERS, call_headers(path), END_HEADERS, stream))

    def send_message(self, stream: int, body: bytes) -> None:
        """Sends a short message and that no other follows."""
        self.write(frame(DATA, message(body), END_STREAM, stream))

    def reset(self, stream: int) -> None:
        """Cancels a call."""
        self.write(frame(RST_STREAM, CANCEL, stream=stream))

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
            flags = END_STREAM * (sent == len(data))
            self.write(frame(DATA, data[sent - size : sent], flags, stream))

    def _room(self, stream: int, sent: int) -> int:
        return max(min(self.window, self.stream_window + self.windows.get(stream, 0) - sent), 0)

    async def wait_until(self, seen: Callable[[], object], timeout_s: float = 20) -> None:
        """Waits until `seen()`, which frames, or the server's end of the connection, may make true.

        Raises:
            TimeoutError: they have not.
        """
        async with asyncio.timeout(timeout_s):
            while not seen():
                self._news.clear()
                await self._news.wait()

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(_HEADER_BYTES)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._on_frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                self._news.set()
        self._news.set()

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.counts[_NAMES.get(kind, "other")] += 1
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    self.stream_window = value
            self.write(frame(SETTINGS, flags=ACK))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, payload, ACK))
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
        """Resets the connection, without GOAWAY."""
        if self._reading is not None:
            self._reading.cancel()
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to `host:port` or `unix:path`."""
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


@asynccontextmanager
async def connect(
    address: str,
    *,
    window: int | None = None,
    reads: bool = True,
    preface: bool = True,
    counts: Counter[str] | None = None,
) -> AsyncIterator[RawConnection]:
    """Connects to `host:port` or `unix:path`, and closes without GOAWAY.

    Args:
        window: bytes that the server may send on each stream, and on the connection if that is
            more than the protocol's 65,535; None: these.
        reads: whether what the server sends is read, in the background.
        preface: whether the connection begins as HTTP/2 asks for.
        counts: counts the frames that came; may be shared.
    """
    connection = RawConnection(*await dial(address), reads=reads, counts=counts)
    try:
        if preface:
            await connection.send(PREFACE, *_window_frames(window))
        yield connection
    finally:
        await connection.close()


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
