"""StartProfile and StopProfile of vLLM's engine protocol, as far as the frontend."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc import aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from deploy.ports import free_port
from frontend.api.vllm_engine.servicer import SERVICE_NAME
from frontend.settings import FrontendSettings
from shared.pb import scheduler_pb2
from tests.frontend.conftest import Service

TOKEN = "an-operators-token"
OPERATOR = (("authorization", f"Bearer {TOKEN}"),)
START, STOP = common.StartProfileRequest, common.StopProfileRequest


@pytest.fixture
def settings(settings: FrontendSettings, tmp_path: Path) -> FrontendSettings:
    tokens = tmp_path / "operators"
    tokens.write_text(f"{TOKEN}\n")
    address = f"127.0.0.1:{free_port()}"
    return settings.model_copy(
        update={"gateway_addresses": (address,), "operator_tokens_file": str(tokens)}
    )


@pytest.fixture
async def engine(service: Service, settings: FrontendSettings) -> AsyncIterator[Any]:
    async with aio.insecure_channel(settings.gateway_address) as channel:
        await channel.channel_ready()
        yield VllmEngineStub(channel)  # type: ignore[no-untyped-call]


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_an_operator_hears_where_the_traces_are(service: Service, engine: Any) -> None:
    given = {"num_steps": 7, "activities": ["MEM"], "with_stack": True, "record_shapes": True}
    started = await engine.StartProfile(START(**given), metadata=OPERATOR)
    assert (started.success, started.message) == (True, "recording /traces/rank-0, /traces/rank-1")
    stopped = await engine.StopProfile(STOP(), metadata=OPERATOR)
    assert (stopped.success, stopped.message) == (True, "wrote /traces/rank-1")
    await engine.StartProfile(START(), metadata=OPERATOR)
    assert service.scheduler.profiles == [
        scheduler_pb2.StartProfileRequest(**given),
        scheduler_pb2.StartProfileRequest(),
    ]


async def test_who_may_not_is_refused_before_a_message_is_sent(
    engine: Any, settings: FrontendSettings
) -> None:
    async with aio.insecure_channel(settings.gateway_address) as channel:
        call: Any = channel.stream_unary(f"/{SERVICE_NAME}/StartProfile")()
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_audit_trail_names_the_operator(engine: Any) -> None:
    with structlog.testing.capture_logs() as lines:
        await engine.StartProfile(START(), metadata=OPERATOR)
    name = hashlib.sha256(TOKEN.encode()).hexdigest()[:8]
    clients = [line["client"] for line in lines if line.get("method") == "StartProfile"]
    assert clients == [f"operator:{name}"]


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer a-clients-own-token"),)])
async def test_others_may_not_profile(service: Service, engine: Any, metadata: Any) -> None:
    for call in (
        engine.StartProfile(START(), metadata=metadata),
        engine.StopProfile(STOP(), metadata=metadata),
    ):
        assert (await refusal(call))[0] is grpc.StatusCode.PERMISSION_DENIED
    assert not service.scheduler.profiles


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (START(output_dir="/etc"), "output_dir: not supported: the workers' settings say where"),
        (START(start_step=0), "start_step: not supported: profiles start at once"),
        (START(profile_by_stage=True), "profile_by_stage: not supported: a step may have both"),
    ],
)
async def test_what_is_not_done_is_refused_by_name(
    service: Service, engine: Any, request_: Any, reason: str
) -> None:
    code, details = await refusal(engine.StartProfile(request_, metadata=OPERATOR))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(reason)
    assert not service.scheduler.profiles


async def test_refusals_and_losses_have_their_status(service: Service, engine: Any) -> None:
    assert await refusal(engine.StopProfile(STOP(), metadata=OPERATOR)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "no profile is in progress",
    )
    await service.scheduler.stop()
    await service.wait_for_health(False)
    code, _ = await refusal(engine.StartProfile(START(), metadata=OPERATOR))
    assert code is grpc.StatusCode.UNAVAILABLE
