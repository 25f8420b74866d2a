"""A worker that serves over real gRPC in this process, and a client of it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from shared.pb.worker_pb2 import ConfigureRequest, StepRequest, StepResponse
from shared.pb.worker_pb2_grpc import WorkerServiceStub, add_WorkerServiceServicer_to_server
from shared.rpc.server import Server
from tests.worker_svc.harness import Batch, limits, worker_settings
from worker_svc.model_runner import ModelRunner
from worker_svc.server import WorkerService
from worker_svc.step.arrays import StepArrays
from worker_svc.step.wire import Int32s
from worker_svc.step_result import PendingStep

NUM_BLOCKS = 64
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INTERNAL, UNAVAILABLE = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE


@dataclass
class Worker:
    """A worker in this process and a client of it."""

    stub: WorkerServiceStub
    health: health_pb2_grpc.HealthStub
    server: Server
    service: WorkerService

    async def configure(self, epoch: int, **overrides: int | str) -> Batch:
        values = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 8, "max_num_batched_tokens": 128}
        await self.stub.Configure(ConfigureRequest(epoch=epoch, **{**values, **overrides}))
        return Batch(limits(num_blocks=NUM_BLOCKS), epoch=epoch)

    async def execute(self, *requests: StepRequest) -> Any:
        """A stream on which these steps have been sent."""
        call = self.stub.Execute()
        for request in requests:
            await call.write(request)
        return call

    async def check_next_epoch(self, epoch: int) -> None:
        """Checks that a step of a new epoch is answered."""
        batch = await self.configure(epoch)
        call = await self.execute(batch.request([(0, [1])]))
        assert (await call.read()).step_id == 1
        call.cancel()

    async def is_serving(self) -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def running(model: Path, tmp_path: Path, **overrides: Any) -> AsyncIterator[Worker]:
    settings = worker_settings(model, max_num_seqs=8, max_num_batched_tokens=128, **overrides)
    server = Server(settings, "nanovllm.worker.v1.WorkerService")
    service = WorkerService(settings)
    add_WorkerServiceServicer_to_server(service, server.grpc)
    address = f"unix:{tmp_path}/w.sock"
    await server.start(address)
    async with aio.insecure_channel(address) as channel:
        yield Worker(
            WorkerServiceStub(channel), health_pb2_grpc.HealthStub(channel), server, service
        )
    await server.grpc.stop(0)
    service.execution.close()


class Gate:
    """Replaces `ModelRunner.launch`: holds steps until `open` and tells when the first has
    begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.step_ids: list[int] = []
        launch = ModelRunner.launch

        def held(runner: ModelRunner, step: StepArrays, *args: Any) -> PendingStep:
            self.step_ids.append(step.step_id)
            self.begun.set()
            assert self.open.wait(30)
            return launch(runner, step, *args)

        monkeypatch.setattr(ModelRunner, "launch", held)


@dataclass
class DeviceArrays:
    """The results of a step on a device that works until it is told to be done."""

    token_ids: Int32s
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def ready(self) -> bool:
        return self.done.is_set()

    def wait(self) -> tuple[list[NDArray[Any]], float]:
        assert self.done.wait(30)
        if self.error:
            raise self.error
        return [self.token_ids], 0.25

    def finish(self, error: Exception | None = None) -> None:
        self.error = error
        self.done.set()


class Device:
    """Replaces `ModelRunner.launch` with one that returns at once, as on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: queue.Queue[DeviceArrays] = queue.Queue()
        launch = ModelRunner.launch

        def launched(runner: ModelRunner, *args: Any) -> PendingStep:
            pending = launch(runner, *args)
            arrays = DeviceArrays(pending.wait().token_ids)
            self.steps.put(arrays)
            return PendingStep(pending.samples, [], arrays)

        monkeypatch.setattr(ModelRunner, "launch", launched)

    async def next_step(self) -> DeviceArrays:
        return await asyncio.to_thread(self.steps.get, timeout=30)


def fail_at(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    """Has a method of `ModelRunner` fail."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ModelRunner, method, fail)


def tokens(response: StepResponse) -> list[int]:
    return list(np.frombuffer(response.token_ids, "<i4").tolist())


async def rejected(call: Awaitable[Any], code: grpc.StatusCode) -> str:
    """The details of the status that ends `call`, which must have this code."""
    with pytest.raises(aio.AioRpcError) as error:
        await call
    assert error.value.code() == code
    return str(error.value.details())


async def end_of(call: Any) -> None:
    """Reads a stream to its end."""
    while await call.read() is not aio.EOF:
        pass
