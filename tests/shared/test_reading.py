"""`MessageReader` in a server: when it reads a message, and when the message is gone."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio

from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from shared.config import load_settings
from shared.errors import UnauthenticatedError
from shared.rpc import reading
from shared.rpc.interceptors import Context, SpanInterceptor
from shared.rpc.server import Server
from tests.frontend.conftest import detail, failure
from tests.http2 import connect
from tests.turns import counting_turns
from tests.waiting import until

SERVICE = "nanovllm.v1.InferenceService"


class Gate(SpanInterceptor):
    """Accepts calls once it is open."""

    def __init__(self) -> None:
        self.arrived = 0
        self.open = asyncio.Event()
        self.refuses = False

    @asynccontextmanager
    async def span(self, method: str, context: Context) -> AsyncIterator[None]:
        self.arrived += 1
        await self.open.wait()
        if self.refuses:
            raise UnauthenticatedError("no")
        yield


class Service(InferenceServiceServicer):
    """Streams say that they have read their message, and stay open."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()

    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        size = len(request.text)
        del request
        await context.write(pb.GenerateStreamResponse(text=str(size)))
        await self.leave.wait()

    async def Tokenize(self, request: pb.TokenizeRequest, _: object) -> pb.TokenizeResponse:
        await self.leave.wait()
        return pb.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(self, request: object, context: object) -> object: ...
    async def Detokenize(self, request: object, context: object) -> object: ...
    async def GetModel(self, request: object, context: object) -> object: ...


class Rig:
    def __init__(self, address: str, gate: Gate, service: Service, server: Server) -> None:
        self.address, self.gate, self.service, self.server = address, gate, service, server
        self.channel = aio.insecure_channel(address)
        self.stub: Any = InferenceServiceStub(self.channel)


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[Rig]:
    gate, service = Gate(), Service()
    server = Server(load_settings(FrontendSettings, []), SERVICE, interceptors=[gate])
    add_InferenceServiceServicer_to_server(service, server.grpc)
    await server.start(address := f"unix:{tmp_path}/s")
    rig = Rig(address, gate, service, server)
    try:
        yield rig
    finally:
        await rig.channel.close()
        await server.grpc.stop(None)


async def test_nothing_is_read_before_a_call_is_accepted(tmp_path: Path) -> None:
    """A connection may have sent one window of bytes, whatever number of calls it has open."""
    async with serving(tmp_path) as rig, connect(rig.address) as client:
        calls = range(1, 41, 2)
        for stream in calls:
            client.open_call(stream, f"/{SERVICE}/GenerateStream")
        await until(lambda: rig.gate.arrived == len(calls), "calls")
        message = pb.GenerateRequest(text="x" * (1 << 20)).SerializeToString()
        await client.wait_until(lambda: client.stream_window == 64 << 10)
        assert client.window == 64 << 10
        assert not client.windows
        # Its message gets more room as soon as a call is accepted.
        rig.gate.open.set()
        await client.send_long_message(1, message)
        await client.wait_until(lambda: b"1048576" in client.received.get(1, b""))


async def test_a_rejected_call_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(reading.MessageReader, "_read_one", fail)
    async with serving(tmp_path) as rig:
        rig.gate.refuses = True
        rig.gate.open.set()
        error = await failure(rig.stub.Tokenize(pb.TokenizeRequest(text="x" * 1000)))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_message_must_arrive_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_READ_S", 0.01)
    async with serving(tmp_path) as rig:
        rig.gate.open.set()
        call = rig.channel.stream_unary(f"/{SERVICE}/Tokenize")(_nothing_yet())
        error = await failure(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "message: it did not arrive within 0.01 s"
        assert detail(error, error_details_pb2.RetryInfo)


async def test_an_iteration_of_the_loop_parses_one_large_message(tmp_path: Path) -> None:
    data = pb.TokenizeRequest(text="x" * (1 << 20)).SerializeToString()
    context: Any = Mock(read=AsyncMock(return_value=data))
    reader = reading.MessageReader()
    with counting_turns() as turns:
        parse = lambda message: turns.done(len(message))  # noqa: E731
        await asyncio.gather(*(reader._read_one(context, parse) for _ in range(16)))
    assert (turns.total, turns.max) == (16 * len(data), len(data))


async def test_a_message_is_gone_while_its_call_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig:
        rig.gate.open.set()
        calls = []
        tracemalloc.start()
        try:
            for _ in range(8):
                call = rig.stub.GenerateStream(pb.GenerateRequest(text="x" * (4_000_000)))
                assert (await call.read()).text == "4000000"
                calls.append(call)
            gc.collect()
            traced, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert traced < 8 * 4_000_000 / 2
        rig.service.leave.set()
        for call in calls:
            assert await call.code() is grpc.StatusCode.OK


async def test_a_call_without_a_message_is_an_invalid_argument(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig:
        rig.gate.open.set()

        async def nothing() -> AsyncIterator[bytes]:
            return
            yield b""

        call = rig.channel.stream_unary(f"/{SERVICE}/Tokenize")(nothing())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "message: missing; send one"


async def _nothing_yet() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""
