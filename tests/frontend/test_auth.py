"""Tokens, and the limits on one client, over real gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from frontend.api.servicer import SERVICE_NAME
from frontend.callers.tenants import Tokens
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.tls import FileError
from tests.echo_server import echo_server
from tests.frontend.conftest import bearer, detail

FIRST, SECOND, THIRD = "first-token-0123456789", "second-token-0123456789", "third-token-0123456789"
TIMEOUT_S = 60


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# of the web site\n{FIRST}\n\n  {SECOND}  \n")
    return path


async def status(address: str, metadata: Any = (), method: str = "Detokenize") -> Any:
    """The status of a unary call."""
    async with aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE_NAME}/{method}")(
            b"", metadata=metadata, timeout=TIMEOUT_S
        )
        return await call.code()


async def reflects(address: str, metadata: Any = ()) -> Any:
    """The status of a reflection call.

    The request goes in one piece, as for a method without streamed requests: grpc.aio reports a
    rejection that overtakes a message being written as INTERNAL.
    """
    service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
    async with aio.insecure_channel(address) as channel:
        call = channel.unary_stream(f"/{service}/ServerReflectionInfo")(
            reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString(),
            metadata=metadata,
            timeout=TIMEOUT_S,
        )
        try:
            answers = [answer async for answer in call]
            return SERVICE_NAME.encode() in b"".join(answers) and await call.code()
        except aio.AioRpcError as error:
            return error.code()


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong-token-0123456789"),
        bearer(FIRST[:-1]),
        bearer(FIRST + "x"),
        bearer(""),
        (("authorization", FIRST),),
        (("authorization", f"Basic {FIRST}"),),
        bearer(FIRST) + bearer("wrong-token-0123456789"),  # two tokens identify nobody
        bearer("# of the web site"),
    ],
)
async def test_a_call_without_a_valid_token_is_rejected(tokens_file: Path, metadata: Any) -> None:
    async with echo_server(auth_tokens_file=tokens_file) as (address, _):
        async with aio.insecure_channel(address) as channel:
            stub = InferenceServiceStub(channel)
            for call in (
                stub.Detokenize(pb.DetokenizeRequest(), metadata=metadata),
                stub.GenerateStream(pb.GenerateRequest(), metadata=metadata),
                channel.stream_unary(f"/{SERVICE_NAME}/Generate")(metadata=metadata),  # no message
            ):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                message = await call.details()
                assert "authorization: Bearer" in message
                assert FIRST not in message
        # Nor does the caller learn which methods exist.
        assert await status(address, metadata, "NoSuch") is grpc.StatusCode.UNAUTHENTICATED


async def test_each_token_admits_a_call(tokens_file: Path) -> None:
    async with echo_server(auth_tokens_file=tokens_file) as (address, _):
        for token in (FIRST, SECOND):
            assert await status(address, bearer(token)) is grpc.StatusCode.OK
        assert await status(address, (("authorization", f"bearer {FIRST}"),)) is grpc.StatusCode.OK


async def test_tokens_change_without_a_restart(tokens_file: Path) -> None:
    def write(text: str | None) -> None:
        tokens_file.unlink() if text is None else tokens_file.write_text(text)

    async with echo_server(auth_tokens_file=tokens_file) as (address, _):
        write(f"{SECOND}\n{THIRD}\n")
        assert await status(address, bearer(FIRST)) is grpc.StatusCode.UNAUTHENTICATED
        assert await status(address, bearer(THIRD)) is grpc.StatusCode.OK
        write("short\n")  # not a valid token: the old ones stay
        assert await status(address, bearer(THIRD)) is grpc.StatusCode.OK
        write(None)
        assert await status(address, bearer(THIRD)) is grpc.StatusCode.OK
        write("")  # now nobody is let in
        assert await status(address, bearer(THIRD)) is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token(tokens_file: Path) -> None:
    async with (
        echo_server(auth_tokens_file=tokens_file) as (address, _),
        aio.insecure_channel(address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_is_off_with_tokens_unless_enabled(tokens_file: Path) -> None:
    async with echo_server() as (address, _):
        assert await reflects(address) is grpc.StatusCode.OK
    async with echo_server(reflection="off") as (address, _):
        assert await reflects(address) is grpc.StatusCode.UNIMPLEMENTED
    async with echo_server(auth_tokens_file=tokens_file) as (address, _):
        assert await reflects(address, bearer(FIRST)) is grpc.StatusCode.UNIMPLEMENTED
    async with echo_server(auth_tokens_file=tokens_file, reflection="on") as (address, _):
        assert await reflects(address, bearer(FIRST)) is grpc.StatusCode.OK
        assert await reflects(address) is grpc.StatusCode.UNAUTHENTICATED


def test_a_file_without_tokens_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="auth_tokens_file: cannot read"):
        Tokens(str(tmp_path / "nowhere"))
    (tmp_path / "empty").write_text("# nothing yet\n")
    with pytest.raises(FileError, match=r"auth_tokens_file: .* contains no token"):
        Tokens(str(tmp_path / "empty"))


async def test_a_client_over_its_limit_learns_when_to_retry(tokens_file: Path) -> None:
    limits = {"auth_tokens_file": tokens_file, "max_requests_per_client": 2}
    async with (
        echo_server(**limits) as (address, echo),
        aio.insecure_channel(address) as channel,
    ):
        stub = InferenceServiceStub(channel)

        async def start(token: str) -> Any:
            call = stub.GenerateStream(pb.GenerateRequest(), metadata=bearer(token))
            assert (await call.read()).text == "open"
            return call

        calls = [await start(FIRST) for _ in range(2)]
        with pytest.raises(aio.AioRpcError, match="max_requests_per_client: 2 ") as rejected:
            await start(FIRST)
        assert rejected.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(rejected.value, error_details_pb2.RetryInfo)
        other = await start(SECOND)  # another client has its own places

        calls[0].cancel()
        await asyncio.wait_for(echo.abandoned.wait(), TIMEOUT_S)
        calls[0] = await start(FIRST)  # a place is free again
        echo.finish.set()
        for call in (*calls, other):
            assert (await call.read()).text == "done"


async def test_without_tokens_a_host_is_a_client() -> None:
    async with (
        echo_server(max_requests_per_client=1) as (address, _),
        aio.insecure_channel(address) as channel,
    ):
        call = InferenceServiceStub(channel).GenerateStream(pb.GenerateRequest())
        assert (await call.read()).text == "open"
        # On a connection of its own, and so from another port.
        assert await status(address) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_metadata_has_a_limit() -> None:
    async with echo_server() as (address, _):
        assert await status(address, (("x", "a" * 8000),)) is grpc.StatusCode.OK
        code = await status(address, (("x", "a" * 20_000),))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status(address) is grpc.StatusCode.OK
