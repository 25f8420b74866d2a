"""Frontends as processes on a scheduler that obeys the test: SIGTERM with open streams, and a log
that is not read."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.ports import free_port
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.frontend.fake_scheduler import FakeScheduler

DEMO = Path(__file__).parents[2] / "models" / "demo"
TOKENS = list(range(10, 20))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def started(
    port: int, scheduler: FakeScheduler, drain_timeout_s: float, stderr: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a frontend."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend", "--model", str(DEMO), "--port", str(port)),
        *("--scheduler-address", scheduler.address),
        *("--drain-timeout-s", str(drain_timeout_s)),
        stderr=stderr,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def frontend(
    port: int, scheduler: FakeScheduler, drain_timeout_s: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a frontend that is connected to `scheduler`."""
    pipe = asyncio.subprocess.PIPE
    async with started(port, scheduler, drain_timeout_s, pipe) as process:
        assert process.stderr is not None
        async for line in process.stderr:
            if json.loads(line)["event"] == "connected to the scheduler":
                break
        yield process


@asynccontextmanager
async def running_scheduler(
    directory: Path, *, automatic: bool = True
) -> AsyncIterator[FakeScheduler]:
    """Unless it is automatic, it samples a token only when the test says so."""
    scheduler = FakeScheduler(f"unix:{directory}/s")
    scheduler.automatic = automatic
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop()


def start_stream(channel: aio.Channel) -> Any:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=TOKENS))
    request.sampling.max_tokens, request.sampling.ignore_eos = len(TOKENS), True
    return InferenceServiceStub(channel).GenerateStream(request)


async def tokenize(channel: aio.Channel) -> None:
    """Retries until a frontend answers. A draining one may refuse calls sent before the client knew
    that it drains: gRPC itself then answers CANCELLED."""
    refusals = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    call = InferenceServiceStub(channel).Tokenize(pb.TokenizeRequest(text="a"))
    while (code := await call.code()) in refusals:
        call = InferenceServiceStub(channel).Tokenize(pb.TokenizeRequest(text="a"))
    assert code is grpc.StatusCode.OK


async def test_a_draining_frontend_finishes_its_streams_while_new_ones_go_elsewhere(
    tmp_path: Path,
) -> None:
    port = free_port()
    async with (
        running_scheduler(tmp_path, automatic=False) as scheduler,
        aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        frontend(port, scheduler, drain_timeout_s=1000) as first,
    ):
        stream, connection = start_stream(channel), scheduler.connection
        await scheduler.submits.get()
        scheduler.step()
        tokens = list((await stream.read()).token_ids)
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == SERVING

        async with frontend(port, scheduler, drain_timeout_s=0) as second:
            first.send_signal(signal.SIGTERM)
            assert (await health.read()).status == NOT_SERVING
            for _ in range(20):
                await tokenize(channel)

            assert first.returncode is None
            for _ in TOKENS[1:]:
                scheduler._step(connection)
            while (chunk := await stream.read()) is not aio.EOF:
                tokens += chunk.token_ids
            assert tokens == TOKENS
            assert await stream.code() is grpc.StatusCode.OK
            assert await first.wait() == 0
            # A health watch does not hold it up.
            assert await health.code() is grpc.StatusCode.UNAVAILABLE

            await tokenize(channel)
            second.send_signal(signal.SIGTERM)
            assert await second.wait() == 0


async def test_after_the_grace_period_streams_end_as_unavailable(tmp_path: Path) -> None:
    port = free_port()
    async with (
        running_scheduler(tmp_path, automatic=False) as scheduler,
        aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        frontend(port, scheduler, drain_timeout_s=0.1) as process,
    ):
        streams = [start_stream(channel) for _ in range(20)]
        for _ in streams:
            await scheduler.submits.get()
        scheduler.step()
        for stream in streams:
            assert (await stream.read()).token_ids == TOKENS[:1]
        process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert await process.wait() == 0


async def test_serving_goes_on_without_a_reader_of_the_log(tmp_path: Path) -> None:
    port, (reading, writing) = free_port(), os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)  # a line per request fills it
    async with (
        running_scheduler(tmp_path) as scheduler,
        aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        started(port, scheduler, 0, stderr=writing) as process,
    ):
        os.close(writing)
        model = pb.GetModelRequest()
        stub = InferenceServiceStub(channel)
        while await stub.GetModel(model, wait_for_ready=True).code() is not grpc.StatusCode.OK:
            pass  # it is not yet connected to the scheduler
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=1))
        for number in range(200):
            assert (await stub.Generate(request)).completions
            if number == 100:
                assert os.read(reading, 1)
                os.close(reading)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
