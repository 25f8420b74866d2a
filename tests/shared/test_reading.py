"""`MessageReader` in a server: when it reads a message, and when the message is gone."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from shared.config import load_settings
from shared.errors import UnauthenticatedError
from shared.rpc.callers import CALLER, Caller
from shared.rpc.interceptors import Context, SpanInterceptor
from shared.rpc.message_memory import MessageMemory
from shared.rpc.reading import MessageReader, release_message
from shared.rpc.server import Server
from tests.http2 import connect
from tests.shared.test_wire_scan import FLOODS
from tests.turns import counting_turns
from tests.waiting import until

SERVICE = "nanovllm.v1.InferenceService"


class Gate(SpanInterceptor):
    """Accepts calls, as Alice's, once it is open."""

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
        CALLER.set(Caller("alice", 1 << 20))
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
        release_message()
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

    monkeypatch.setattr(MessageMemory, "receive", fail)
    async with serving(tmp_path) as rig:
        rig.gate.refuses = True
        rig.gate.open.set()
        with pytest.raises(aio.AioRpcError) as raised:
            await rig.stub.Tokenize(pb.TokenizeRequest(text="x" * 1000))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


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
        assert memory_of(rig.server).used == 0
        assert traced < 8 * 4_000_000 / 2
        rig.service.leave.set()
        for call in calls:
            assert await call.code() is grpc.StatusCode.OK


class Parse:
    """Stands in for a message type, and for its `FromString`."""

    DESCRIPTOR = pb.TokenizeRequest.DESCRIPTOR

    def __init__(self, parse: Callable[[bytes], object]) -> None:
        self.__self__, self._parse = self, parse

    def __call__(self, data: bytes) -> object:
        return self._parse(data)


def sender(data: bytes) -> Any:
    return Mock(peer=lambda: "ipv4:1.2.3.4:5", read=AsyncMock(return_value=data))


LARGE = pb.TokenizeRequest(text="x" * 100_000).SerializeToString()


async def test_large_messages_are_parsed_one_per_turn_of_the_loop() -> None:
    reader = MessageReader(1 << 20, MessageMemory(1 << 20, 256 << 20))
    with counting_turns() as turns:
        parse = Parse(lambda data: turns.done(len(data)))
        await asyncio.gather(*(reader._read(sender(LARGE), parse) for _ in range(16)))
    assert turns.total == 16 * len(LARGE)
    assert turns.max == len(LARGE)


async def test_after_a_large_message_other_messages_get_as_much_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = MessageReader(1 << 20, MessageMemory(1 << 20, 256 << 20))
    loop, later_s, parsed = asyncio.get_running_loop(), 0.0, list[int]()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + later_s)

    def parse_for_long(data: bytes) -> None:
        nonlocal later_s
        later_s += 1000
        parsed.append(len(data))

    calls = [
        asyncio.create_task(reader._read(sender(data), Parse(parse_for_long)))
        for data in (LARGE, LARGE, b"")
    ]
    await asyncio.wait(calls[:2], return_when=asyncio.FIRST_COMPLETED)
    await calls[2]
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(parsed) == [0, len(LARGE)]
    for each in calls:
        each.cancel()


async def test_a_message_counts_until_its_call_ends_or_releases_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig:
        rig.gate.open.set()
        message = pb.TokenizeRequest(text="x" * 1000)
        calls = [rig.stub.Tokenize(message) for _ in range(3)]
        memory = memory_of(rig.server)
        await until(lambda: memory.used == 3 * message.ByteSize(), "three")
        calls.pop().cancel()
        await until(lambda: memory.used == 2 * message.ByteSize(), "two")
        rig.service.leave.set()
        for call in calls:
            assert (await call).token_ids == [1000]
        await until(lambda: memory.used == 0, "none")


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of_fields_never_keeps_the_loop(tmp_path: Path, flood: str) -> None:
    """Counts the event loop's iterations while a message is scanned; none may be long."""
    async with serving(tmp_path) as rig:
        rig.gate.open.set()
        iterations, walking = 0, True

        async def count() -> None:
            nonlocal iterations
            while walking:
                iterations += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        with pytest.raises(aio.AioRpcError) as raised:
            await rig.channel.unary_unary(f"/{SERVICE}/Generate")(FLOODS[flood])
        walking = False
        await counter
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "more than 65536 fields" in (raised.value.details() or "")
        assert iterations > 60


async def test_a_call_without_a_message_is_an_invalid_argument(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig:
        rig.gate.open.set()

        async def nothing() -> AsyncIterator[bytes]:
            return
            yield b""

        call = rig.channel.stream_unary(f"/{SERVICE}/Tokenize")(nothing())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "message: missing; send one"
        assert memory_of(rig.server).used == 0


def memory_of(server: Server) -> MessageMemory:
    return server.messages


async def test_public_streams_are_read_within_the_limits(tmp_path: Path) -> None:
    server = Server(load_settings(FrontendSettings, []), SERVICE)
    await server.start(address := f"unix:{tmp_path}/s")
    async with aio.insecure_channel(address) as channel:
        stub: Any = ServerReflectionStub(channel)
        calls = [stub.ServerReflectionInfo(_nothing_yet()) for _ in range(100)]
        await until(lambda: server.messages.used > 0, "it")
        for call in calls:
            call.cancel()
        await until(lambda: server.messages.used == 0, "none")
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [each async for each in stub.ServerReflectionInfo(iter([request, request]))]
        assert len(answers) == 2
        assert SERVICE in [each.name for each in answers[0].list_services_response.service]
        assert server.messages.used == 0
    await server.grpc.stop(None)


async def _nothing_yet() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield None


async def test_two_calls_begin_per_turn_of_the_loop() -> None:
    reader = MessageReader(1 << 20, MessageMemory(1 << 20, 256 << 20))
    with counting_turns() as turns:

        async def read() -> bytes:
            turns.done(1)
            return b""

        context: Any = Mock(peer=lambda: "ipv4:1.2.3.4:5", read=read)
        await asyncio.gather(*(reader._read(context, Parse(len)) for _ in range(16)))
    assert (turns.total, turns.max) == (16, 2)
