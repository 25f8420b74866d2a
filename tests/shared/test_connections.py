"""Limits on connections and calls, and how a server treats clients that exceed them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shared.rpc.open_calls
import shared.rpc.server
from frontend.settings import FrontendSettings
from shared.rpc.server import Server
from tests.frontend.conftest import detail, failure
from tests.http2 import (
    ACK,
    CANCEL,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    RawConnection,
    call_frames,
    connect,
    dial,
    frame,
)

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
TIMEOUT_S = 60


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[str]:
    server = Server(FrontendSettings(), "some.Service")
    address = f"unix:{tmp_path}/s"
    await server.start(address)
    try:
        yield address
    finally:
        await server.grpc.stop(None)


async def read_to_the_end(address: str, sent: bytes) -> None:
    """Sends some bytes and waits until the server closes the connection."""
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    try:
        with suppress(ConnectionError):
            writer.write(sent)
            while await reader.read(1 << 16):
                pass
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def check(address: str) -> None:
    """Gets an answer; connecting may take several tries."""
    async with aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)


async def watching(stack: AsyncExitStack, address: str) -> RawConnection:
    """A connection that watches the health, unless it was closed before it could."""
    connection = await stack.enter_async_context(connect(address))
    connection.open_call(1, WATCH)
    connection.send_message(1, b"")
    await connection.wait_until(lambda: connection.received.get(1) or connection.closed)
    return connection


@pytest.mark.parametrize("sent", [b"", PREFACE[:10], PREFACE])
async def test_silent_connections_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(shared.rpc.server, "HANDSHAKE_S", 0.1)
    async with serving(tmp_path) as address, asyncio.timeout(TIMEOUT_S):
        await read_to_the_end(address, sent)
        await check(address)


async def test_connections_without_calls_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.rpc.server, "_IDLE_S", 0.1)
    async with serving(tmp_path) as address, AsyncExitStack() as stack, asyncio.timeout(TIMEOUT_S):
        while (watcher := await watching(stack, address)).closed:
            pass  # until one has been in time
        async with connect(address) as idle:
            await idle.wait_until(lambda: idle.closed)
        assert not watcher.closed


async def test_connections_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.rpc.server, "MAX_CONNECTIONS", 4)
    async with serving(tmp_path) as address, AsyncExitStack() as stack, asyncio.timeout(TIMEOUT_S):
        for _ in range(3):
            assert not (await watching(stack, address)).closed
        async with connect(address) as fourth:
            fourth.write(frame(SETTINGS))
            await read_to_the_end(address, PREFACE + bytes(3) + b"\x04" + bytes(5))
            assert not fourth.closed
        await check(address)  # its place is free again


async def test_calls_have_a_limit_and_health_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that have not sent their message count, too."""
    monkeypatch.setattr(shared.rpc.open_calls, "MAX_CALLS", 3)
    async with serving(tmp_path) as address, connect(address) as client, asyncio.timeout(TIMEOUT_S):
        for stream in (1, 3, 5, 7):
            client.open_call(stream, REFLECTION)
        await client.wait_until(lambda: client.ended == {7})
        for stream in (9, 11, 13):  # health calls neither count nor are refused
            client.open_call(stream, WATCH)
        await check(address)
        async with aio.insecure_channel(address) as channel:
            error = await failure(channel.unary_unary(REFLECTION)(b""))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "calls: 3 are open; the limit of this process is 3"
            assert detail(error, error_details_pb2.RetryInfo)
            client.reset(3)
            while True:
                with suppress(aio.AioRpcError):
                    await channel.unary_unary(REFLECTION)(b"")
                    break


async def test_no_call_is_lost_when_many_arrive_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of one client arrive while the event loop is busy."""
    count = 3000
    monkeypatch.setattr(shared.rpc.server, "_CALLS_PER_CONNECTION", count)
    async with serving(tmp_path) as address:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address.removeprefix("unix:"))
            # Blocks the loop until gRPC, on threads of its own, has seen most of them.
            client.sendall(PREFACE + frame(SETTINGS))
            for stream in range(1, 2 * count, 2):
                client.sendall(call_frames(stream, CHECK, b""))
            reader, writer = await asyncio.open_unix_connection(sock=client)
            answers = RawConnection(reader, writer)
            try:
                await answers.wait_until(lambda: len(answers.ended) == count, TIMEOUT_S)
            finally:
                await answers.close()
        assert len(answers.received) == count


async def test_most_calls_that_are_reset_at_once_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC refuses them on its own threads, though the event loop is busy (CVE-2023-44487)."""
    limit, count = 10, 300
    monkeypatch.setattr(shared.rpc.server, "_CALLS_PER_CONNECTION", limit)
    async with serving(tmp_path) as address:
        with socket.socket(socket.AF_UNIX) as client, client.makefile("rb") as answers:
            client.settimeout(TIMEOUT_S)
            client.connect(address.removeprefix("unix:"))

            def read_until(kind: int) -> None:
                while (head := answers.read(9))[3] != kind:
                    answers.read(int.from_bytes(head[:3], "big"))
                answers.read(int.from_bytes(head[:3], "big"))

            client.sendall(PREFACE + frame(SETTINGS))
            read_until(SETTINGS)
            client.sendall(frame(SETTINGS, flags=ACK) + frame(PING, bytes(8)))
            read_until(PING)  # now the limit holds
            for stream in range(1, 2 * count, 2):
                reset = frame(RST_STREAM, CANCEL, stream=stream)
                client.sendall(call_frames(stream, CHECK, b"") + reset)
            for _ in range(count - 2 * limit):
                read_until(RST_STREAM)
        await check(address)


async def test_a_connection_is_told_how_many_calls_it_may_have(tmp_path: Path) -> None:
    max_concurrent_streams = 3  # a setting: RFC 9113, 6.5.2
    async with serving(tmp_path) as address, asyncio.timeout(20):
        reader, writer = await dial(address)
        writer.write(PREFACE + frame(SETTINGS))
        head = await reader.readexactly(9)
        assert head[3] == SETTINGS
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        assert dict(struct.iter_unpack(">HI", payload))[max_concurrent_streams] == 1024
        writer.close()
        await writer.wait_closed()
