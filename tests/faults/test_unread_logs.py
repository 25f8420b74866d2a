"""A frontend whose log is not read, and later cannot be."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from deploy.ports import free_port
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.frontend.fake_scheduler import FakeScheduler

DEMO = Path(__file__).parents[2] / "models" / "demo"


async def test_serving_goes_on_without_a_reader_of_the_log(tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"unix:{tmp_path}/s")
    await scheduler.start()
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)  # a line per request fills it
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend", "--model", str(DEMO), "--port", str(port)),
        *("--scheduler-address", scheduler.address),
        stderr=writing,
    )
    os.close(writing)
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await generate(channel, count=100)
            assert os.read(reading, 1)
            os.close(reading)
            await generate(channel, count=100)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await scheduler.stop()


async def generate(channel: aio.Channel, count: int) -> None:
    """Sends one request after another, once the frontend accepts them."""
    stub = InferenceServiceStub(channel)
    while not await is_ready(stub):
        pass
    for _ in range(count):
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=1))
        assert (await stub.Generate(request)).completions


async def is_ready(stub: Any) -> bool:
    """Whether the frontend is connected to the scheduler."""
    call = stub.GetModel(pb.GetModelRequest(), wait_for_ready=True)
    return await call.code() is grpc.StatusCode.OK
