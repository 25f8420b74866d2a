"""A client that dies while being written to causes no error in the server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from grpc import aio

from frontend.service import Frontend
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shared.config import load_settings
from tests.waiting import WAIT_S, until

CALLS = 10
# Reads only one message of each stream, so that the server's writes block.
CLIENT = f"""
import asyncio, sys
from grpc import aio
from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub

async def main():
    async with aio.insecure_channel(sys.argv[1]) as channel:
        stub = InferenceServiceStub(channel)
        calls = [stub.GenerateStream(GenerateRequest()) for _ in range({CALLS})]
        for call in calls:
            await call.read()
        print("READ", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Service(InferenceServiceServicer):
    """Streams responses for ever."""

    def __init__(self) -> None:
        self.open = 0
        self.writes = 0
        self.closed = asyncio.Event()

    async def GenerateStream(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        self.open += 1
        try:
            while True:
                await context.write(pb.GenerateStreamResponse(text=20_000 * "x"))
                self.writes += 1
        finally:
            self.open -= 1
            if not self.open:
                self.closed.set()


async def test_nothing_is_logged_or_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    server, service = Frontend(load_settings(FrontendSettings, [])).server, Service()
    add_InferenceServiceServicer_to_server(service, server.grpc)
    address = f"unix:{tmp_path}/s.sock"
    await server.start(address)
    with structlog.testing.capture_logs() as lines:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, address, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"READ\n"
        seen: list[int] = []

        def all_block() -> bool:
            seen.append(service.writes)
            return len(seen) > 10 and seen[-10] == seen[-1]

        await until(all_block, "writes to block")
        client.kill()
        await client.wait()
        await asyncio.wait_for(service.closed.wait(), WAIT_S)
        await server.grpc.stop(None)
    assert service.open == 0
    # The audit trail has it, of course.
    assert [line for line in lines if line["event"] != "requests ended"] == []
    # gRPC may have news for event loops of earlier tests, too.
    logged = map(caplog.handler.format, caplog.records)
    assert [each for each in logged if "Event loop is closed" not in each] == []
    assert capfd.readouterr().err == ""
