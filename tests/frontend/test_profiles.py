"""StartProfile and StopProfile of vLLM's engine protocol, as far as the frontend."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc import aio
from smg_grpc_proto.generated import common_pb2 as common

from deploy.ports import free_port
from frontend.api.vllm_engine.servicer import SERVICE_NAME
from frontend.settings import FrontendSettings
from shared.pb import scheduler_pb2
from tests.frontend.conftest import Service, bearer, rejection

TOKEN = "an-operators-token"
OPERATOR = bearer(TOKEN)
START, STOP = common.StartProfileRequest, common.StopProfileRequest


@pytest.fixture
def settings(settings: FrontendSettings, tmp_path: Path) -> FrontendSettings:
    tokens = tmp_path / "operators"
    tokens.write_text(f"{TOKEN}\n")
    address = f"127.0.0.1:{free_port()}"
    return settings.model_copy(
        update={"gateway_addresses": (address,), "operator_tokens_file": str(tokens)}
    )


async def test_an_operator_gets_the_paths_of_the_traces(service: Service, engine: Any) -> None:
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


async def test_others_are_rejected_before_a_message_is_sent(
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


@pytest.mark.parametrize("metadata", [(), bearer("a-clients-own-token")])
async def test_others_may_not_profile(service: Service, engine: Any, metadata: Any) -> None:
    for call in (
        engine.StartProfile(START(), metadata=metadata),
        engine.StopProfile(STOP(), metadata=metadata),
    ):
        code, _ = await rejection(call)
        assert code is grpc.StatusCode.PERMISSION_DENIED
    assert not service.scheduler.profiles


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (START(output_dir="/etc"), "output_dir: not supported: it is a setting of the workers"),
        (START(start_step=0), "start_step: not supported: profiles start immediately"),
        (START(profile_by_stage=True), "profile_by_stage: not supported: a step can have both"),
    ],
)
async def test_unsupported_fields_are_rejected_by_name(
    service: Service, engine: Any, request_: Any, reason: str
) -> None:
    code, details = await rejection(engine.StartProfile(request_, metadata=OPERATOR))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(reason)
    assert not service.scheduler.profiles


async def test_errors_of_the_scheduler_have_their_status(service: Service, engine: Any) -> None:
    assert await rejection(engine.StopProfile(STOP(), metadata=OPERATOR)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "no profile is in progress",
    )
    await service.scheduler.stop()
    await service.wait_for_health(False)
    code, _ = await rejection(engine.StartProfile(START(), metadata=OPERATOR))
    assert code is grpc.StatusCode.UNAVAILABLE
