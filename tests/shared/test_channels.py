"""Keepalive: a silent stream lives on, either end notices if its peer vanishes, and pings are no
flood."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import aio

from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from shared.channels import Dialer
from tests.echo_server import echo_server
from tests.http2 import PING, connect, frame
from tests.waiting import wait_for

KEEPALIVE_S = 2.0  # a ping answered late, on a busy machine, must not look unanswered
TIMEOUT_S = 60


class Network:
    """Passes bytes on in both directions until it is cut; then it swallows them, while connections
    stay open."""

    def __init__(self) -> None:
        self.is_cut = False
        self.sent = asyncio.Semaphore(0)  # one for each piece from the client

    async def connect(
        self,
        address: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        host, _, port = address.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(
                self._carry(reader, far_writer, self.sent.release),
                self._carry(far_reader, writer, lambda: None),
            )
        except (asyncio.CancelledError, ConnectionError):
            return
        finally:
            far_writer.close()
            writer.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passed: Callable[[], None],
    ) -> None:
        while data := await reader.read(1 << 16):
            passed()
            if not self.is_cut:
                writer.write(data)


@asynccontextmanager
async def network_to(address: str) -> AsyncIterator[tuple[str, Network]]:
    """A network, and an address that leads through it to `address`."""
    network, tasks = Network(), set[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(network.connect(address, reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", network
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


@pytest.fixture(autouse=True)
def keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_vllm_grpc.channels.KEEPALIVE_S", KEEPALIVE_S)


async def test_a_silent_stream_outlives_many_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    # The pings pass through this process, and each may take longer than a second.
    monkeypatch.setattr("nano_vllm_grpc.channels._ANSWER_SHARE", 30)
    async with echo_server() as (address, echo), network_to(address) as (through, network):
        # Pings sooner than the server, which otherwise would always ping first.
        monkeypatch.setattr("nano_vllm_grpc.channels.KEEPALIVE_S", 0.75 * KEEPALIVE_S)
        async with Dialer().open(through) as channel:
            stream = InferenceServiceStub(channel).GenerateStream(pb.GenerateRequest())
            assert (await stream.read()).text == "open"
            while not network.sent.locked():
                await network.sent.acquire()
            # From now on the client has nothing to say, so these are pings: more than the two that
            # gRPC sends by default.
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(4):
                    await network.sent.acquire()
            assert not echo.abandoned.is_set()
            echo.finish.set()
            assert (await stream.read()).text == "done"


async def test_any_number_of_pings_is_answered() -> None:
    async with echo_server() as (address, _), connect(address) as connection:
        for _ in range(100):
            await connection.send(*[frame(PING, bytes(8))] * 500)
        await asyncio.to_thread(
            wait_for, lambda: connection.counts["PING"] == 50_000 or connection.closed, "answers"
        )
        assert connection.counts["PING"] == 50_000
        assert connection.counts["GOAWAY"] == 0


async def test_both_ends_notice_that_the_other_is_gone() -> None:
    async with (
        echo_server() as (address, echo),
        network_to(address) as (through, network),
        Dialer().open(through) as channel,
    ):
        stream = InferenceServiceStub(channel).GenerateStream(pb.GenerateRequest())
        assert (await stream.read()).text == "open"
        network.is_cut = True
        with pytest.raises(aio.AioRpcError) as raised:
            await asyncio.wait_for(stream.read(), TIMEOUT_S)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(echo.abandoned.wait(), TIMEOUT_S)
