"""Attacks below the level of messages, equal for every service: methods, metadata, compression, and
bytes that are not HTTP/2. `tests/abuse/attacks` has clients that stall."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress

import grpc
from grpc import aio

from tests import http2
from tests.fuzz.corpus import Case
from tests.fuzz.harness import Interface
from tests.fuzz.tally import DEADLINE_S, Tally, send
from tests.http2 import PREFACE, connect, frame

_SIZES = (0, 1 << 10, 1 << 18, 1 << 24, 1 << 26)
_REFLECTION = (b"", b"\xff\xff", b"\x1a\x03a.b", b"\x22\x04\x0a\x00\x10\x05", b"\x3a\x00")
_PATIENCE_S = 0.2  # for a server to answer garbage or to close, neither of which it must do


def transport(
    address: str,
    service: str,
    method: str,
    honest: Callable[[], Awaitable[object]],
    rest: Callable[[Tally], Awaitable[None]],
) -> Interface:
    """The layers below a service's messages; equal for every service.

    Args:
        method: a unary method of `service`, to which an empty message is harmless.
    """
    name = f"/{service}/{method}"

    def draw(_: int, seed: int) -> list[Case]:
        rng = random.Random(seed)
        cases = [Case(f"call {path}", (b"\xff" * 9,)) for path in _paths(service, method)]
        cases += [Case(kind, (b"",)) for kind in ("metadata", "cancel", "two messages")]
        cases += [Case(kind, (bytes(size),)) for kind in ("gzip", "deflate") for size in _SIZES]
        cases += [Case("reflection", (message,)) for message in _REFLECTION]
        return [*cases, *(Case("garbage", (garbage,)) for garbage in _garbage(rng))]

    async def send_case(case: Case, tally: Tally) -> None:
        kind, _, path = case.method.partition(" ")
        (message,) = case.messages
        packed = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}.get(kind)
        options = [("grpc.max_send_message_length", -1)]
        if kind == "garbage":
            await _throw(address, message)
            tally.counts["garbage"] += 1
            return
        async with aio.insecure_channel(address, options, compression=packed) as channel:
            shown = f"{case.method[:80]}, {len(message)} bytes"
            if kind == "call":
                await send(channel, path, message, tally, shown)
            elif kind == "metadata":
                for metadata in _metadata(random.Random(len(name))):
                    await send(channel, name, b"", tally, str(metadata)[:80], metadata=metadata)
            elif kind == "cancel":
                await _cancel_at_once(channel, name)
            elif kind == "two":
                with tally.call(shown):
                    await channel.stream_unary(name)(_twice(b""), timeout=DEADLINE_S)
            elif kind == "reflection":
                await _reflect(channel, message, tally)
            else:
                await send(channel, name, message, tally, shown)

    return Interface("transport", draw, send_case, honest, rest)


def _paths(service: str, method: str) -> list[str]:
    paths = [f"/{service}/Nothing", f"/{service}/", f"/{service.lower()}/{method}", "/", "//"]
    paths += [f"/{service}/{method}/{method}", f"/{service}/" + "x" * 5000, f"{service}/{method}"]
    return [*paths, "/a/b", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watched"]


async def _reflect(channel: aio.Channel, message: bytes, tally: Tally) -> None:
    call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with tally.call(message):
        async for answer in call(_twice(message), timeout=DEADLINE_S):
            tally.text(answer.decode(errors="replace").replace(".py", ""), message)


async def _twice(message: bytes) -> AsyncIterator[bytes]:
    yield message
    yield message


def _metadata(rng: random.Random) -> Iterator[tuple[tuple[str, str | bytes], ...]]:
    yield tuple((f"key-{i}", "value") for i in range(20))
    yield tuple((f"key-{i}", "value" * 10) for i in range(2000))
    for size in (1_000, 7_000, 60_000, 1_000_000):
        yield (("large", "x" * size),)
        yield (("large-bin", rng.randbytes(size)),)
    yield (("traceparent", "00-zz-zz-zz"), ("authorization", "Bearer \x7e"), ("x-bin", b"\0\xff"))
    yield (("grpc-status-details-bin", rng.randbytes(50)), ("te", "nothing"))
    yield tuple(("same", "value") for _ in range(100))


async def _cancel_at_once(channel: aio.Channel, name: str) -> None:
    calls = [channel.unary_unary(name)(b"", timeout=DEADLINE_S) for _ in range(200)]
    for call in calls:
        call.cancel()
    await asyncio.gather(*(call.code() for call in calls))


def _garbage(rng: random.Random) -> Iterator[bytes]:
    settings = frame(http2.SETTINGS, b"")
    yield b""
    yield rng.randbytes(10_000)
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield bytes.fromhex("16030100a5010000a10303") + rng.randbytes(160)  # TLS's first bytes
    yield PREFACE + rng.randbytes(5_000)
    yield PREFACE[:10]
    yield PREFACE + settings + frame(http2.HEADERS, rng.randbytes(200), flags=4, stream=1)
    yield PREFACE + settings + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"  # longer than allowed
    yield PREFACE + settings + frame(http2.DATA, b"x" * 100, stream=5)  # a stream never opened
    yield PREFACE + settings * 5_000
    yield PREFACE + settings + frame(http2.PING, bytes(8)) * 5_000
    yield PREFACE + settings + frame(http2.RST_STREAM, bytes(4), stream=1) * 1_000
    yield PREFACE + settings + frame(http2.WINDOW_UPDATE, b"\x7f\xff\xff\xff") * 3
    headers = frame(http2.HEADERS, b"\x00\x01a\x01b" * 100, stream=1)
    yield (
        PREFACE
        + settings
        + headers
        + frame(http2.CONTINUATION, b"\x00\x01a\x01b" * 100, stream=1) * 500
    )
    for _ in range(20):
        kind, flags = rng.randrange(256), rng.randrange(256)
        yield PREFACE + settings + frame(kind, rng.randbytes(rng.randrange(64)), flags, stream=1)


async def _throw(address: str, garbage: bytes) -> None:
    async with connect(address, preface=False) as connection:
        await connection.send(garbage)
        with suppress(TimeoutError):
            await connection.wait_until(lambda: connection.closed, _PATIENCE_S)
