"""`HealthServicer`: watchers that do not read delay nobody, and their number is limited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

import shared.rpc.health
from frontend.settings import FrontendSettings
from shared.rpc.server import Server
from tests.frontend.conftest import detail, failure
from tests.http2 import connect

SERVICE = "some.Service"
WATCH = "/grpc.health.v1.Health/Watch"
TIMEOUT_S = 60  # for what takes milliseconds
SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[Server, str, Any]]:
    server = Server(FrontendSettings(), SERVICE)
    address = f"unix:{tmp_path}/s"
    await server.start(address)
    try:
        async with aio.insecure_channel(address) as channel:
            yield server, address, health_pb2_grpc.HealthStub(channel)
    finally:
        await server.grpc.stop(None)


def request(service: str = "") -> pb.HealthCheckRequest:
    return pb.HealthCheckRequest(service=service)


async def test_watchers_that_do_not_read_delay_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, address, stub), connect(address, window=0) as stuck:
        for stream in (1, 3, 5):
            stuck.open_call(stream, WATCH)
            stuck.send_message(stream, b"")
        reader = stub.Watch(request())
        assert (await reader.read()).status == NOT_SERVING
        for serving_now in (True, False) * 20:
            async with asyncio.timeout(TIMEOUT_S):
                await server.set_serving(serving_now)
                expected = SERVING if serving_now else NOT_SERVING
                assert (await reader.read()).status == expected
                assert (await stub.Check(request())).status == expected
        assert not stuck.received


class Stuck:
    """The context of a call whose client has no room for another byte."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    def peer(self) -> str:
        return "unix:"

    async def write(self, _: object) -> None:
        self.writing.set()
        await asyncio.Event().wait()


async def test_a_write_that_never_ends_delays_nobody(tmp_path: Path) -> None:
    """gRPC's buffer takes the first few statuses; this is what comes after."""
    async with serving(tmp_path) as (server, _, stub):
        context = Stuck()
        watch = asyncio.create_task(server._health.Watch(request(), context))  # type: ignore[arg-type]
        await context.writing.wait()
        async with asyncio.timeout(TIMEOUT_S):
            await server.set_serving(True)
            assert (await stub.Check(request())).status == SERVING
        watch.cancel()


async def test_a_watcher_that_falls_behind_reads_the_newest_status(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, _, stub):
        watch = stub.Watch(request(SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        for serving_now in (True, False, True, False, True):
            await server.set_serving(serving_now)  # the watcher has no turn in between
        assert (await watch.read()).status == SERVING


@pytest.mark.parametrize("limit", ["MAX_WATCHERS", "MAX_WATCHERS_PER_HOST"])
async def test_watchers_are_limited_and_checks_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(shared.rpc.health, limit, 4)
    async with serving(tmp_path) as (_, _, stub):
        watches = [stub.Watch(request()) for _ in range(4)]
        for watch in watches:
            await watch.read()
        with pytest.raises(aio.AioRpcError, match="4 watches are open already") as raised:
            [_ async for _ in stub.Watch(request())]
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(raised.value, error_details_pb2.RetryInfo)
        assert (await stub.Check(request())).status == NOT_SERVING
        watches.pop().cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while await (again := stub.Watch(request())).read() is aio.EOF:
                assert await again.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_unknown_service_is_unknown(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, _, stub):
        await server.set_serving(True)
        assert (await failure(stub.Check(request("nobody")))).code() is grpc.StatusCode.NOT_FOUND
        answer = await stub.Watch(request("nobody")).read()
        assert answer.status == pb.HealthCheckResponse.SERVICE_UNKNOWN
        statuses = (await stub.List(pb.HealthListRequest())).statuses
        assert {name: each.status for name, each in statuses.items()} == {
            "": SERVING,
            SERVICE: SERVING,
        }
