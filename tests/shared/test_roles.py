"""Services may call each other only with the right role in a certificate, over real mutual TLS, and
only with the same contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nano_vllm_grpc.channels import open_channel
from nano_vllm_grpc.tls import ClientTls
from scheduler_svc.settings import SchedulerSettings
from shared.channels import CONTRACT, Dialer
from shared.config import load_settings
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)
from shared.rpc.roles import Callers
from shared.rpc.server import Server
from tests.certificates import Authority

TIMEOUT_S = 60
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name
ROLE = "URI:urn:nano-vllm-grpc:role:"


class Stub(SchedulerServiceServicer):
    """Says who is connected."""

    async def Connect(  # type: ignore[override]
        self, requests: object, context: object
    ) -> AsyncIterator[pb.SchedulerMessage]:
        yield pb.SchedulerMessage(engine_info=pb.EngineInfo(vocab_size=7))

    async def GetLoad(self, request: object, context: object) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(waiting=7)


@asynccontextmanager
async def serving(authority: Authority, directory: Path, roles: str) -> AsyncIterator[str]:
    files = authority.issue("server", "DNS:localhost", f"{ROLE}scheduler")
    flags = [f"--internal-tls-cert={files.cert}", f"--internal-tls-key={files.key}"]
    flags += [f"--internal-tls-ca={authority.ca}", f"--internal-tls-roles={roles}"]
    settings = load_settings(SchedulerSettings, flags)
    server = Server(settings, SERVICE_NAME, callers=Callers("frontend", reads=("GetLoad",)))
    add_SchedulerServiceServicer_to_server(Stub(), server.grpc)
    address = f"unix:{directory}/s.sock"
    await server.start(address)
    try:
        yield address
    finally:
        await server.grpc.stop(None)


async def answers(authority: Authority, address: str, *names: str) -> list[str]:
    """What the holder of a certificate with these names gets: from Connect, GetLoad and health."""
    files = authority.issue("client", *names)
    tls = ClientTls(authority.ca, files.cert, files.key)
    async with open_channel(address, tls) as channel:
        stub = SchedulerServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        calls = (
            # In one piece: a refusal that overtakes a message is INTERNAL to grpc.aio.
            channel.unary_stream(f"/{SERVICE_NAME}/Connect")(b"", timeout=TIMEOUT_S).read(),
            stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S),
            health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S),
        )
        found = []
        for call in calls:
            try:
                await call
                found.append("OK")
            except aio.AioRpcError as error:
                denied = error.code() is grpc.StatusCode.PERMISSION_DENIED
                found.append(str(error.details()) if denied else repr(error))
        return found


WRONG = "the certificate is for worker; only a frontend may call this"
NONE = "the certificate names no role, and this service requires one: .*:role:frontend"


async def test_a_role_opens_what_it_is_for(authority: Authority, tmp_path: Path) -> None:
    async with serving(authority, tmp_path, "optional") as address:

        async def get(*names: str) -> list[str]:
            return await answers(authority, address, *names)

        assert await get("DNS:a", f"{ROLE}frontend") == ["OK", "OK", "OK"]
        assert await get("DNS:a", f"{ROLE}worker") == [WRONG, "OK", "OK"]
        assert await get(f"{ROLE}worker", f"{ROLE}frontend") == ["OK", "OK", "OK"]
        assert await get("DNS:a") == ["OK", "OK", "OK"]
        # Only a URI is a role, and only a whole one.
        assert await get("DNS:urn:nano-vllm-grpc:role:worker") == ["OK", "OK", "OK"]
        denied = "the certificate is for frontends; only a frontend may call this"
        assert await get("DNS:a", f"{ROLE}frontends") == [denied, "OK", "OK"]


async def test_a_role_can_be_required(authority: Authority, tmp_path: Path) -> None:
    async with serving(authority, tmp_path, "required") as address:
        assert await answers(authority, address, "DNS:a", f"{ROLE}frontend") == ["OK", "OK", "OK"]
        connect, load, health = await answers(authority, address, "DNS:a")
        assert connect == load == NONE.replace(".*", "urn:nano-vllm-grpc")
        assert health == "OK"


async def test_a_client_without_a_certificate_of_the_authority_is_rejected(
    authority: Authority, certificates: Path, tmp_path: Path
) -> None:
    files = Authority(certificates, "stranger").issue("client", f"{ROLE}frontend")
    async with serving(authority, tmp_path, "optional") as address:
        for tls in (None, ClientTls(authority.ca), ClientTls(authority.ca, files.cert, files.key)):
            async with open_channel(address, tls) as channel:
                call = SchedulerServiceStub(channel).GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
                assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_services_of_another_contract_are_rejected(tmp_path: Path) -> None:
    server = Server(load_settings(SchedulerSettings, []), SERVICE_NAME, callers=Callers("frontend"))
    add_SchedulerServiceServicer_to_server(Stub(), server.grpc)
    address = f"unix:{tmp_path}/s.sock"
    await server.start(address)
    async with Dialer().open(address) as channel:
        await SchedulerServiceStub(channel).GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
    agent = CONTRACT + "0123456789abcdef"
    async with open_channel(address, None, [("grpc.primary_user_agent", agent)]) as channel:
        with pytest.raises(aio.AioRpcError, match="another version") as rejected:
            await SchedulerServiceStub(channel).GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
        assert rejected.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    await server.grpc.stop(None)
