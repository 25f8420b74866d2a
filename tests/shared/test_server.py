"""`Server`, the interceptor and the errors, over real gRPC."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2
from nano_vllm_grpc.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shared.config import load_settings
from shared.errors import InvalidArgumentError, QueueFullError, ServiceError
from shared.rpc.server import Server
from tests.frontend.conftest import detail, failure
from tests.waiting import until

SERVICE = "nanovllm.v1.InferenceService"
LIMIT = 1000


class Service(InferenceServiceServicer):
    """Raises what it is told to; Detokenize answers with the number of ids."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.waits: asyncio.Event | None = None  # if set, streams wait for it

    async def Detokenize(
        self, request: frontend_pb2.DetokenizeRequest, context: object
    ) -> frontend_pb2.DetokenizeResponse:
        if self.error:
            raise self.error
        return frontend_pb2.DetokenizeResponse(text=str(len(request.token_ids)))

    async def GenerateStream(
        self, request: frontend_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[frontend_pb2.GenerateStreamResponse]:
        yield frontend_pb2.GenerateStreamResponse(text=request.text)
        if self.waits:
            await self.waits.wait()
        if self.error:
            raise self.error

    async def Generate(self, request: object, context: object) -> object: ...
    async def Tokenize(self, request: object, context: object) -> object: ...
    async def GetModel(self, request: object, context: object) -> object: ...


async def test_a_server_that_needs_tokens_needs_an_interceptor(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    settings = load_settings(FrontendSettings, ["--auth-tokens-file", str(tokens)])
    with pytest.raises(ValueError, match="auth_tokens_file: no interceptor checks tokens"):
        Server(settings, SERVICE)


@asynccontextmanager
async def serving(
    tmp_path: Path, service: Service, *flags: str
) -> AsyncIterator[tuple[aio.Channel, Server]]:
    settings = load_settings(FrontendSettings, ["--max-message-bytes", str(LIMIT), *flags])
    server = Server(settings, SERVICE)
    add_InferenceServiceServicer_to_server(service, server.grpc)
    address = f"unix:{tmp_path}/s.sock"
    await server.start(address)
    async with aio.insecure_channel(address) as channel:
        yield channel, server
    await server.grpc.stop(None)


async def detokenize(channel: aio.Channel, data: bytes) -> bytes:
    return await channel.unary_unary(f"/{SERVICE}/Detokenize")(data)


async def stream(channel: aio.Channel, data: bytes) -> list[bytes]:
    return [m async for m in channel.unary_stream(f"/{SERVICE}/GenerateStream")(data)]


async def test_an_argument_error_names_the_field(tmp_path: Path) -> None:
    service = Service()
    service.error = InvalidArgumentError("sampling.top_p", "2.0 is not in (0, 1]")
    async with serving(tmp_path, service) as (channel, _):
        error = await failure(detokenize(channel, b""))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "sampling.top_p: 2.0 is not in (0, 1]"
        bad_request = detail(error, error_details_pb2.BadRequest)
        assert [v.field for v in bad_request.field_violations] == ["sampling.top_p"]


async def test_a_rejected_request_is_gone_without_a_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large:
        pass

    held: list[weakref.ref[Large]] = []

    async def reject(_: object, __: object, ___: object) -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise InvalidArgumentError("text", "not good")

    monkeypatch.setattr(Service, "Detokenize", reject)
    gc.disable()
    try:
        async with serving(tmp_path, Service()) as (channel, _):
            await failure(detokenize(channel, b""))
            await until(lambda: held[0]() is None, "it to be gone")
    finally:
        gc.enable()


async def test_a_full_queue_error_says_when_to_retry(tmp_path: Path) -> None:
    service = Service()
    service.error = QueueFullError("full", retry_after_s=1.25)
    async with serving(tmp_path, service) as (channel, _):
        error = await failure(stream(channel, b""))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1250


@pytest.mark.parametrize("error", [KeyError("secret"), ServiceError("internal error")])
async def test_other_exceptions_become_internal_errors_without_details(
    tmp_path: Path, error: Exception
) -> None:
    service = Service()
    service.error = error
    async with serving(tmp_path, service) as (channel, _):
        for call in (detokenize(channel, b""), stream(channel, b"")):
            raised = await failure(call)
            assert raised.code() is grpc.StatusCode.INTERNAL
            assert raised.details() == "internal error"


async def test_calls_that_outlast_the_grace_end_as_unavailable(tmp_path: Path) -> None:
    """A stream from a generator that waits for ever, and a health watch that would, too."""
    service = Service()
    service.waits = asyncio.Event()
    async with serving(tmp_path, service, "--drain-timeout-s", "0") as (channel, server):
        stub = health_pb2_grpc.HealthStub(channel)
        calls: list[Any] = [
            stub.Watch(health_pb2.HealthCheckRequest()),
            channel.unary_stream(f"/{SERVICE}/GenerateStream")(b""),
        ]
        for call in calls:
            await call.read()
        server.stop()
        await server.wait()
        assert [await call.code() for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 2


async def test_an_address_in_use_is_an_os_error() -> None:
    settings = load_settings(FrontendSettings, [])
    first, second = Server(settings, SERVICE), Server(settings, SERVICE)
    port = first.grpc.add_insecure_port("127.0.0.1:0")
    await first.grpc.start()
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
        await second.start(f"127.0.0.1:{port}")
    await first.grpc.stop(None)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_message_is_measured_after_decompression(
    tmp_path: Path, compression: grpc.Compression
) -> None:
    async with serving(tmp_path, Service()) as (channel, _):
        call = channel.unary_unary(f"/{SERVICE}/Detokenize")
        error = await failure(call(bytes(LIMIT + 1), compression=compression))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"larger than max ({LIMIT + 1} vs. {LIMIT})" in (error.details() or "")
        assert not error.trailing_metadata()  # no time to retry: waiting does not help
        assert await detokenize(channel, b"")  # the service goes on
