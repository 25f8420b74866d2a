"""Records a profile of the workers of a running stack."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

from grpc import aio

from deploy.errors import LaunchError
from deploy.stack import Process, Stack, make_directory, open_file
from nano_vllm_grpc.channels import open_channel
from shared.channels import internal_options
from shared.pb.worker_pb2 import ProfileRequest
from shared.pb.worker_pb2_grpc import WorkerServiceStub


def profile(directory: Path, steps: int) -> int:
    """Records the next steps of this host's workers, and writes and names a trace of each.

    Raises:
        LaunchError: no stack with a worker was started in `directory`, or a worker cannot be
            profiled.
    """
    stack = Stack.load(directory)
    workers = [each for each in stack.processes() if each.service == "worker"]
    if not workers:
        raise LaunchError("this host has no worker of the stack")
    folder = directory / "profiles"
    make_directory(folder)
    print(f"recording {steps} steps; send requests meanwhile", flush=True)
    traces = asyncio.run(_record_all(stack, workers, steps))
    for process, trace in zip(workers, traces, strict=True):
        path = folder / f"{process.name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.json.gz"
        with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(trace)
        print(path)
    return 0


async def _record_all(stack: Stack, workers: list[Process], steps: int) -> list[bytes]:
    return await asyncio.gather(*(_record(stack, worker, steps) for worker in workers))


async def _record(stack: Stack, worker: Process, steps: int) -> bytes:
    async with open_channel(worker.address, stack.internal_tls, internal_options()) as channel:
        call = WorkerServiceStub(channel).Profile(ProfileRequest(num_steps=steps))
        try:
            return b"".join([piece.trace async for piece in call])
        except aio.AioRpcError as error:
            raise LaunchError(f"{worker.name}: {error.details()}") from error
