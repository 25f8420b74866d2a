"""The address at which a frontend serves its stack's gateway."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from deploy.ports import free_port
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.frontend.conftest import Service, rejection

ACME, OTHER = "acme-token-0123456789", "other-token-0123456789"


@pytest.fixture
def settings(
    settings: FrontendSettings, request: pytest.FixtureRequest, tmp_path: Path
) -> FrontendSettings:
    """`request.param`: the text of the tokens file; empty if there is none."""
    more: dict[str, Any] = {"gateway_addresses": (f"127.0.0.1:{free_port()}",)}
    if request.param:
        (tmp_path / "tokens").write_text(request.param)
        more["auth_tokens_file"] = str(tmp_path / "tokens")
    return settings.model_copy(update=more)


@pytest.mark.parametrize(
    "settings", [f"{ACME} name=acme\n{OTHER} name=http max_requests=1\n"], indirect=True
)
async def test_the_gateway_is_the_client_http_without_a_token(
    service: Service, engine: Any
) -> None:
    service.scheduler.automatic = False
    first = engine.Generate(vllm.GenerateRequest(text="a", stream=True))
    submit = await service.scheduler.submits.get()
    assert submit.client.name == "http"
    _, details = await rejection(engine.Generate(vllm.GenerateRequest(text="a")).read())
    assert "max_requests" in details
    code, _ = await rejection(service.stub.Generate(pb.GenerateRequest(text="a")))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    first.cancel()


@pytest.mark.parametrize("settings", ["", f"{ACME} name=acme\n"], indirect=True)
async def test_a_process_of_another_user_is_rejected(
    engine: Any, settings: FrontendSettings
) -> None:
    """Not even with a client's token, and before its message is read."""
    if os.geteuid():
        pytest.skip("only root can start another user's process")
    program = """if True:
        import os, sys
        import grpc
        from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
        from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
        os.setuid(65534)
        with grpc.insecure_channel(sys.argv[1]) as channel:
            try:
                for _ in VllmEngineStub(channel).Generate(
                    vllm.GenerateRequest(), metadata=(("authorization", f"Bearer {sys.argv[2]}"),)
                ):
                    pass
            except grpc.RpcError as error:
                print(error.code().name, error.details())
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, settings.gateway_address, ACME),
        stdout=subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert told.decode() == (
        "PERMISSION_DENIED only processes of the stack's user may call this address\n"
    )
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
