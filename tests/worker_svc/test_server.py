"""WorkerService over real gRPC."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from shared.pb.worker_pb2 import ConfigureRequest, GetInfoRequest, StepRequest, StepResponse
from shared.pb.worker_pb2_grpc import WorkerServiceStub, add_WorkerServiceServicer_to_server
from shared.rpc.server import Server
from tests.worker_svc.harness import Asked, Batch, limits, worker_settings
from worker_svc import server as worker_server
from worker_svc.errors import CaptureError, StartError
from worker_svc.model_runner import ModelRunner
from worker_svc.server import WorkerService
from worker_svc.step.decode import Step
from worker_svc.step.wire import Int32s
from worker_svc.step_result import PendingStep

NUM_BLOCKS = 64


@dataclass
class Worker:
    """A worker in this process and a client of it."""

    stub: WorkerServiceStub
    health: health_pb2_grpc.HealthStub
    server: Server
    service: WorkerService

    async def configure(self, epoch: int, **overrides: int) -> Batch:
        values = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 8, "max_num_batched_tokens": 128}
        await self.stub.Configure(ConfigureRequest(epoch=epoch, **{**values, **overrides}))
        return Batch(limits(num_blocks=NUM_BLOCKS), epoch=epoch)

    async def is_serving(self) -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def execute(self) -> Any:
        return self.stub.Execute()


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
    service.close()


@pytest.fixture
async def worker(tiny_dir: Path, tmp_path: Path) -> AsyncIterator[Worker]:
    async with running(tiny_dir, tmp_path) as started:
        await started.service.load()
        await started.server.set_serving(True)
        yield started


class Gate:
    """Replaces `ModelRunner.launch`: holds steps until `open` and tells when the first has
    begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.step_ids: list[int] = []
        launch = ModelRunner.launch

        def held(runner: ModelRunner, step: Step) -> PendingStep:
            self.step_ids.append(step.step_id)
            self.begun.set()
            assert self.open.wait(30)
            return launch(runner, step)

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


class Device:
    """Replaces `ModelRunner.launch` with one that returns at once, as on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: queue.Queue[DeviceArrays] = queue.Queue()
        launch = ModelRunner.launch

        def launched(runner: ModelRunner, step: Step) -> PendingStep:
            pending = launch(runner, step)
            arrays = DeviceArrays(pending.wait().token_ids)
            self.steps.put(arrays)
            return PendingStep(pending.samples, [], arrays)

        monkeypatch.setattr(ModelRunner, "launch", launched)

    async def next_step(self) -> DeviceArrays:
        return await asyncio.to_thread(self.steps.get, timeout=30)


def tokens(response: StepResponse) -> list[int]:
    return list(np.frombuffer(response.token_ids, "<i4").tolist())


async def refused(call: Any, code: grpc.StatusCode) -> str:
    """The details of the status that ends `call`, which must have this code."""

    async def read_to_end() -> None:
        while await call.read() is not aio.EOF:
            pass

    with pytest.raises(aio.AioRpcError) as error:
        await read_to_end()
    assert error.value.code() == code
    return str(error.value.details())


async def test_steps_are_answered_in_order(worker: Worker, tiny_dir: Path) -> None:
    batch = await worker.configure(5)
    requests = [batch.request([(0, [1, 2, 3]), (1, [4])], silent=[1])]
    requests += [batch.request([(0, [-1]), (1, [5])]) for _ in range(3)]

    call = worker.execute()
    for request in requests:  # all are sent before an answer is read
        await call.write(request)
    responses = [await call.read() for _ in requests]

    runner = ModelRunner(worker_settings(tiny_dir))
    runner.configure(1, NUM_BLOCKS)
    alone = Batch(limits(num_blocks=NUM_BLOCKS))
    expected = [runner.run(alone.step([(0, [1, 2, 3]), (1, [4])], silent=[1])).tolist()]
    expected += [runner.run(alone.step([(0, [-1]), (1, [5])])).tolist() for _ in range(3)]
    assert [r.step_id for r in responses] == [1, 2, 3, 4]
    assert [tokens(r) for r in responses] == expected
    assert all(r.step_time_s > 0 for r in responses)
    await call.done_writing()
    assert await call.read() is aio.EOF


async def test_log_probabilities_come_with_the_tokens(worker: Worker, tiny_dir: Path) -> None:
    chunks = [(0, [1, 2, 3]), (1, [4, 5])]
    asked: dict[str, Any] = {
        "features": {0: Asked(logprobs=2)},
        "targets": {1: [5]},
        "num_prompt_logprobs": 1,
    }
    batch = await worker.configure(1)
    call = worker.execute()
    await call.write(batch.request(chunks, **asked))
    response = await call.read()

    runner = ModelRunner(worker_settings(tiny_dir))
    runner.configure(1, NUM_BLOCKS)
    expected = runner.launch(Batch(limits(num_blocks=NUM_BLOCKS)).step(chunks, **asked)).wait()
    ids = np.frombuffer(response.logprob_ids, "<i4")
    assert ids[0] == ids[1] == tokens(response)[0]  # greedy: the sampled one is the likeliest
    assert ids[3] == 5
    assert ids.tolist() == expected.logprob_ids.tolist()
    values = np.frombuffer(response.logprob_values, "<f4")
    assert values.tolist() == expected.logprob_values.tolist()
    call.cancel()


async def test_a_malformed_feature_is_named(worker: Worker) -> None:
    batch = await worker.configure(1)
    call = worker.execute()
    await call.write(batch.request([(0, [1])], features={0: Asked(top_p=1.5)}))
    details = await refused(call, grpc.StatusCode.INVALID_ARGUMENT)
    assert details == "features.top_p: 1.5 is not in (0, 1]"


async def test_info_and_health_follow_the_load(tiny_dir: Path, tmp_path: Path) -> None:
    async with running(tiny_dir, tmp_path) as worker:
        assert not await worker.is_serving()
        with pytest.raises(aio.AioRpcError) as error:
            await worker.stub.GetInfo(GetInfoRequest())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        await worker.service.load()
        info = await worker.stub.GetInfo(GetInfoRequest())
        await worker.configure(7)
        assert (await worker.stub.GetInfo(GetInfoRequest())).epoch == 7
    assert (info.rank, info.world_size, info.device, info.dtype) == (0, 1, "cpu", "float32")
    assert (info.max_model_len, info.vocab_size, info.block_size) == (512, 301, 16)
    assert info.num_blocks == 8 * 512 // 16
    assert info.attention_backend == "torch"
    assert info.model_fingerprint
    assert info.incarnation
    assert info.epoch == 0


async def test_answers_while_a_step_runs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    batch = await worker.configure(1)
    call = worker.execute()
    await call.write(batch.request([(0, [1, 2])]))
    assert await asyncio.to_thread(gate.begun.wait, 30)

    assert await worker.is_serving()
    assert (await worker.stub.GetInfo(GetInfoRequest())).world_size == 1
    assert not gate.open.is_set()

    gate.open.set()
    assert (await call.read()).step_id == 1
    call.cancel()


async def test_the_next_step_is_launched_before_this_one_is_done(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    batch = await worker.configure(1)
    call = worker.execute()
    await call.write(batch.request([(0, [1, 2])]))
    await call.write(batch.request([(0, [-1])]))
    first, second = await device.next_step(), await device.next_step()
    assert not first.done.is_set()
    assert await worker.is_serving()

    second.done.set()  # and yet the first is answered first
    first.done.set()
    for step_id, step in ((1, first), (2, second)):
        response = await call.read()
        assert (response.step_id, response.step_time_s) == (step_id, 0.25)
        assert tokens(response) == step.token_ids.tolist()
    call.cancel()


async def test_a_device_that_fails_ends_the_epoch(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    batch = await worker.configure(1)
    call = worker.execute()
    await call.write(batch.request([(0, [1])]))
    step = await device.next_step()
    step.error = RuntimeError("out of memory")
    step.done.set()
    assert await refused(call, grpc.StatusCode.INTERNAL) == "step 1 failed"
    call = worker.execute()
    await call.write(batch.request([(0, [1])]))
    assert "has ended" in await refused(call, grpc.StatusCode.FAILED_PRECONDITION)


async def test_what_a_launch_takes_says_nothing_of_a_step(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU launches in milliseconds what it computes for seconds: a watch that mistook one for the
    other would end a healthy worker."""
    device = Device(monkeypatch)
    learned: list[int] = []
    record = worker.service._execution._watch.record
    monkeypatch.setattr(
        worker.service._execution._watch,
        "record",
        lambda step, seconds: (learned.append(step.step_id), record(step, seconds)),
    )
    batch = await worker.configure(1)
    call = worker.execute()
    await call.write(batch.request([(0, [1, 2])]))
    step = await device.next_step()
    assert learned == []
    step.done.set()
    await call.read()
    assert learned == [1]


async def test_a_lost_device_ends_the_process(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CUDA context is gone: every step after it would fail too."""
    exits: list[int] = []
    monkeypatch.setattr(worker_server.os, "_exit", exits.append)
    device = Device(monkeypatch)
    batch = await worker.configure(1)
    call = worker.execute()
    await call.write(batch.request([(0, [1])]))
    step = await device.next_step()
    step.error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    step.done.set()
    await refused(call, grpc.StatusCode.INTERNAL)
    assert exits == [worker_server.EXIT_DEVICE_LOST]

    def configure(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(ModelRunner, "configure", configure)
    with pytest.raises(aio.AioRpcError, match="epoch 2 cannot be configured"):
        await worker.configure(2)
    assert exits == [worker_server.EXIT_DEVICE_LOST] * 2


async def test_a_failed_capture_ends_the_start(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends cleanly and with the reason, instead of serving slowly without graphs."""
    stopped: list[None] = []
    monkeypatch.setattr(worker.service, "_stop", lambda: stopped.append(None))

    def configure(*_: Any) -> None:
        raise CaptureError("CUDA graphs: a step of 8 sequences cannot be captured")

    worker.service.check()
    monkeypatch.setattr(ModelRunner, "configure", configure)
    with pytest.raises(aio.AioRpcError, match="epoch 1 cannot be configured"):
        await worker.configure(1)
    assert len(stopped) == 1
    with pytest.raises(StartError, match="a step of 8 sequences cannot be captured"):
        worker.service.check()


async def test_a_capture_that_fails_later_is_left_to_a_successor(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may have taken the memory for a while."""
    exits: list[int] = []
    monkeypatch.setattr(worker_server.os, "_exit", exits.append)
    await worker.configure(1)

    def configure(*_: Any) -> None:
        raise CaptureError("CUDA graphs: a step of 8 sequences cannot be captured")

    monkeypatch.setattr(ModelRunner, "configure", configure)
    with pytest.raises(aio.AioRpcError):
        await worker.configure(2)
    assert exits == [worker_server.EXIT_DEVICE_LOST]
    worker.service.check()


async def test_a_malformed_step_ends_the_stream_only(worker: Worker) -> None:
    batch = await worker.configure(1)
    good = batch.request([(0, [1, 2])])
    bad = batch.request([(0, [301])])
    call = worker.execute()
    await call.write(good)
    await call.write(bad)
    assert (await call.read()).step_id == 1  # what came before is answered first
    details = await refused(call, grpc.StatusCode.INVALID_ARGUMENT)
    assert details.startswith("input_ids: 301")

    batch = await worker.configure(2)
    call = worker.execute()
    await call.write(batch.request([(0, [1, 2])]))
    assert (await call.read()).step_id == 1
    call.cancel()


@pytest.mark.parametrize(
    ("epoch", "step_id", "reason"),
    [(6, 1, "epoch: 6"), (8, 1, "epoch: 8"), (7, 2, "step_id: 2"), (7, 0, "step_id: 0")],
)
async def test_stale_steps(worker: Worker, epoch: int, step_id: int, reason: str) -> None:
    batch = await worker.configure(7)
    request = batch.request([(0, [1])])
    request.epoch, request.step_id = epoch, step_id
    call = worker.execute()
    await call.write(request)
    details = await refused(call, grpc.StatusCode.FAILED_PRECONDITION)
    assert details.startswith(reason)


async def test_steps_before_configure(worker: Worker) -> None:
    call = worker.execute()
    await call.write(StepRequest(epoch=1, step_id=1))
    assert "none is configured" in await refused(call, grpc.StatusCode.FAILED_PRECONDITION)


async def test_bytes_that_are_no_step(worker: Worker) -> None:
    await worker.configure(1)
    call = worker.stub.Execute()
    await call.write(StepRequest(epoch=1, step_id=1, input_ids=b"abc"))
    details = await refused(call, grpc.StatusCode.INVALID_ARGUMENT)
    assert details.startswith("input_ids: 3 bytes")


async def test_a_new_epoch_drops_waiting_steps(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that comes back is served at once, not after what the lost one sent."""
    gate = Gate(monkeypatch)
    old = await worker.configure(1)
    lost = worker.execute()
    for _ in range(4):
        await lost.write(old.request([(0, [1])]))
    assert await asyncio.to_thread(gate.begun.wait, 30)

    configuring = asyncio.create_task(worker.configure(2))
    newest = ""
    while "above 2" not in newest:  # the request is in, and the old epoch over
        with pytest.raises(aio.AioRpcError) as error:
            await worker.configure(1)
        newest = str(error.value.details())
    gate.open.set()
    new = await configuring
    call = worker.execute()
    await call.write(new.request([(0, [1])]))
    assert (await call.read()).step_id == 1
    assert gate.step_ids == [1, 1]  # only the running step of the old epoch
    assert "epoch" in await refused(lost, grpc.StatusCode.FAILED_PRECONDITION)
    call.cancel()


async def test_a_cancelled_stream_leaves_the_worker_usable(worker: Worker) -> None:
    for epoch in (1, 2, 3):
        batch = await worker.configure(epoch)
        call = worker.execute()
        for _ in range(3):
            await call.write(batch.request([(0, [1])]))
        assert (await call.read()).step_id == 1
        call.cancel()


async def test_a_step_that_fails_is_internal(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: ModelRunner, step: Step) -> PendingStep:
        raise ZeroDivisionError("of the device")

    batch = await worker.configure(1)
    first, second = batch.request([(0, [1])]), batch.request([(0, [1])])
    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "launch", fail)
        call = worker.execute()
        await call.write(first)
        details = await refused(call, grpc.StatusCode.INTERNAL)
    assert details == "step 1 failed"
    # The epoch is over: its cache may be half written.
    call = worker.execute()
    await call.write(second)
    assert "has ended" in await refused(call, grpc.StatusCode.FAILED_PRECONDITION)

    batch = await worker.configure(2)
    call = worker.execute()
    await call.write(batch.request([(0, [1])]))
    assert (await call.read()).step_id == 1
    call.cancel()


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"epoch": 3}, grpc.StatusCode.FAILED_PRECONDITION, "epoch: 3"),
        ({"epoch": 2}, grpc.StatusCode.FAILED_PRECONDITION, "epoch: 2"),
        ({"num_blocks": 0}, grpc.StatusCode.INVALID_ARGUMENT, "num_blocks: 0"),
        ({"num_blocks": 1 << 30}, grpc.StatusCode.INVALID_ARGUMENT, f"num_blocks: {1 << 30}"),
        # Slots of this many would fit their column, but their keys and values no memory.
        ({"num_blocks": (1 << 27) - 1}, grpc.StatusCode.INVALID_ARGUMENT, "num_blocks: 134217727"),
        (
            {"epoch": (1 << 64) - 1},
            grpc.StatusCode.INVALID_ARGUMENT,
            "epoch: 18446744073709551615; the limit is now 4294967299",
        ),
        ({"max_num_seqs": 9}, grpc.StatusCode.INVALID_ARGUMENT, "max_num_seqs: 9"),
        (
            {"max_num_batched_tokens": 129},
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_num_batched_tokens: 129",
        ),
    ],
)
async def test_configure_refuses(
    worker: Worker, fields: dict[str, int], code: grpc.StatusCode, reason: str
) -> None:
    await worker.configure(3)
    with pytest.raises(aio.AioRpcError) as error:
        await worker.configure(**{"epoch": 4, **fields})
    assert error.value.code() == code
    assert str(error.value.details()).startswith(reason)
    await worker.configure(4)


async def test_a_new_worker_joins_at_a_high_epoch_that_leaves_higher_ones(worker: Worker) -> None:
    with pytest.raises(aio.AioRpcError) as error:
        await worker.configure((1 << 63) + 1)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await worker.configure(1 << 63)
    await worker.configure((1 << 63) + 1)


async def test_steps_far_ahead_stay_unread(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream thus has bounded memory, however fast they are sent."""
    gate = Gate(monkeypatch)
    batch = await worker.configure(1)
    call = worker.execute()
    padding = b"\xfa\x3f\x80\x80\x40" + bytes(1 << 20)  # an unknown field

    async def write() -> None:
        for _ in range(30):
            step = batch.request([(0, [1])])
            await call.write(StepRequest.FromString(step.SerializeToString() + padding))

    writing = asyncio.create_task(write())
    assert await asyncio.to_thread(gate.begun.wait, 30)
    _, blocked = await asyncio.wait([writing], timeout=2)
    assert blocked
    gate.open.set()
    assert [(await call.read()).step_id for _ in range(30)] == list(range(1, 31))
    await writing
    call.cancel()
