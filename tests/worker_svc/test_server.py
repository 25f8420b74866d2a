"""WorkerService over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc import aio

from shared.pb.worker_pb2 import GetInfoRequest, StepRequest
from tests.waiting import until
from tests.worker_svc.harness import Asked, Batch, i4, limits, sampling_features, worker_settings
from tests.worker_svc.serving import (
    INTERNAL,
    INVALID,
    NUM_BLOCKS,
    PRECONDITION,
    UNAVAILABLE,
    Device,
    Gate,
    Worker,
    end_of,
    fail_at,
    rejected,
    running,
    tokens,
)
from worker_svc import server as worker_server
from worker_svc.errors import CaptureError, StartError, SupersededError
from worker_svc.model_runner import ModelRunner
from worker_svc.step.arrays import DRAFTED


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(worker_server.os, "_exit", statuses.append)
    return statuses


async def test_steps_are_answered_in_order(worker: Worker, tiny_dir: Path) -> None:
    """All are sent before an answer is read. Log-probabilities come with the tokens."""
    scores: dict[str, Any] = {
        "features": {0: Asked(logprobs=2)},
        "targets": {1: [5]},
        "num_prompt_logprobs": 1,
    }

    def steps(make: Callable[..., Any]) -> list[Any]:
        prompts = make([(0, [1, 2, 3]), (1, [4, 5])], silent=[1], **scores)
        return [prompts, *(make([(0, [-1]), (1, [6])]) for _ in range(3))]

    call = await worker.execute(*steps((await worker.configure(5)).request))
    runner = ModelRunner(worker_settings(tiny_dir))
    runner.configure(1, NUM_BLOCKS)
    for number, step in enumerate(steps(Batch(limits(num_blocks=NUM_BLOCKS)).step), start=1):
        response, expected = await call.read(), runner.launch(step).wait()
        assert response.step_id == number
        assert response.step_time_s > 0
        assert tokens(response) == expected.token_ids.tolist()
        ids, values = response.logprob_ids, response.logprob_values
        assert np.frombuffer(ids, "<i4").tolist() == expected.logprob_ids.tolist()
        assert np.frombuffer(values, "<f4").tolist() == expected.logprob_values.tolist()
        assert bool(ids) == (number == 1)
    await call.done_writing()
    assert await call.read() is aio.EOF


async def test_drafted_tokens_are_in_the_answers(tiny_dir: Path, tmp_path: Path) -> None:
    """Those of a model that drafts for itself are the tokens that it samples."""
    async with running(tiny_dir, tmp_path, speculation=str(tiny_dir)) as worker:
        await worker.service.execution.load()
        assert (await worker.stub.GetInfo(GetInfoRequest())).drafts
        batch = await worker.configure(1)
        call = await worker.execute(
            batch.request([(0, [1, 2, 3])]),
            batch.request([(0, [-1]), (0, [DRAFTED]), (0, [DRAFTED])]),
        )
        assert (await call.read()).draft_ids == b""
        response = await call.read()
        assert np.frombuffer(response.draft_ids, "<i4").tolist() == tokens(response)[:2]
        call.cancel()


async def test_info_and_health_follow_the_load(tiny_dir: Path, tmp_path: Path) -> None:
    async with running(tiny_dir, tmp_path) as worker:
        assert not await worker.is_serving()
        await rejected(worker.stub.GetInfo(GetInfoRequest()), UNAVAILABLE)
        await worker.service.execution.load()
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


async def test_the_next_step_is_launched_before_this_one_is_done(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    batch = await worker.configure(1)
    call = await worker.execute(batch.request([(0, [1, 2])]), batch.request([(0, [-1])]))
    first, second = await device.next_step(), await device.next_step()
    assert not first.done.is_set()
    assert await worker.is_serving()

    second.finish()  # and yet the first is answered first
    first.finish()
    for step_id, step in ((1, first), (2, second)):
        response = await call.read()
        assert (response.step_id, response.step_time_s) == (step_id, 0.25)
        assert tokens(response) == step.token_ids.tolist()
    call.cancel()


@pytest.mark.parametrize("at_launch", [True, False])
async def test_a_step_that_fails_ends_the_epoch(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, at_launch: bool
) -> None:
    """Its cache may be half written."""
    error = RuntimeError("out of memory")
    batch = await worker.configure(1)
    first, second = batch.request([(0, [1])]), batch.request([(0, [1])])
    with monkeypatch.context() as patched:
        device = Device(patched)
        if at_launch:
            fail_at(patched, "launch", error)
        call = await worker.execute(first)
        if not at_launch:
            (await device.next_step()).finish(error)
        assert await rejected(end_of(call), INTERNAL) == "step 1 failed"
    assert "has ended" in await rejected(end_of(await worker.execute(second)), PRECONDITION)
    await worker.check_next_epoch(2)


async def test_a_capture_that_is_given_up_leaves_the_cache(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes nowhere, so a scheduler that comes back may keep what is cached."""
    batch = await worker.configure(1)
    cache_id = (await worker.stub.GetInfo(GetInfoRequest())).cache_id
    for error, kept in ((SupersededError(), cache_id), (RuntimeError("a fault"), "")):
        with monkeypatch.context() as patched:
            fail_at(patched, "launch", error)
            call = await worker.execute(batch.request([(0, [1])]))
            await rejected(end_of(call), INTERNAL)
        assert (await worker.stub.GetInfo(GetInfoRequest())).cache_id == kept
        batch = await worker.configure(batch.epoch + 1, keep_cache_id=kept)


async def test_the_time_of_a_launch_does_not_count_as_the_time_of_a_step(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU launches in milliseconds what it computes for seconds: a watch that mistook one for the
    other would end a healthy worker."""
    device = Device(monkeypatch)
    learned: list[int] = []
    watch = worker.service.execution._watch
    monkeypatch.setattr(watch, "record", lambda step, seconds: learned.append(step.step_id))
    batch = await worker.configure(1)
    call = await worker.execute(batch.request([(0, [1, 2])]))
    step = await device.next_step()
    assert learned == []
    step.finish()
    await call.read()
    await until(lambda: learned == [1], "the time of the step")


async def test_a_lost_device_ends_the_process(
    worker: Worker, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CUDA context is gone: every step after it would fail too."""
    device = Device(monkeypatch)
    batch = await worker.configure(1)
    call = await worker.execute(batch.request([(0, [1])]))
    lost = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    (await device.next_step()).finish(lost)
    await rejected(end_of(call), INTERNAL)
    assert exits == [worker_server.EXIT_DEVICE_LOST]

    error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    fail_at(monkeypatch, "configure", error)
    assert "epoch 2 cannot be configured" in await rejected(worker.configure(2), UNAVAILABLE)
    assert exits == [worker_server.EXIT_DEVICE_LOST] * 2


CAPTURE_ERROR = CaptureError(
    "CUDA graphs: a step of 8 decodes and 0 tokens of prompts cannot be captured"
)


async def test_a_failed_capture_ends_the_start(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends cleanly and with the reason, instead of serving slowly without graphs."""
    stopped: list[None] = []
    monkeypatch.setattr(worker.service, "_stop", lambda: stopped.append(None))
    worker.service.check()
    fail_at(monkeypatch, "configure", CAPTURE_ERROR)
    assert "epoch 1 cannot be configured" in await rejected(worker.configure(1), UNAVAILABLE)
    assert len(stopped) == 1
    with pytest.raises(
        StartError, match="a step of 8 decodes and 0 tokens of prompts cannot be captured"
    ):
        worker.service.check()


async def test_a_capture_that_fails_later_is_left_to_a_successor(
    worker: Worker, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may have taken the memory for a while."""
    batch = await worker.configure(1)
    with monkeypatch.context() as patched:
        fail_at(patched, "launch", CAPTURE_ERROR)
        await rejected(end_of(await worker.execute(batch.request([(0, [1])]))), INTERNAL)
    assert exits == [worker_server.EXIT_DEVICE_LOST]
    fail_at(monkeypatch, "configure", CAPTURE_ERROR)
    await rejected(worker.configure(2), UNAVAILABLE)
    assert exits == [worker_server.EXIT_DEVICE_LOST] * 2
    worker.service.check()


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"input_ids": i4([301])}, INVALID, "input_ids: 301"),
        ({"input_ids": b"abc"}, INVALID, "input_ids: 3 bytes"),
        ({"input_ids": i4([DRAFTED])}, INVALID, "input_ids: a drafted token, but there is no"),
        (
            {"features": sampling_features({0: Asked(top_p=1.5)}, 301)},
            INVALID,
            "features.top_p: 1.5 is not in (0, 1]",
        ),
        ({"graph": True}, INVALID, "graph: no graph holds 1 decodes and 0 prompts"),
        ({"epoch": 6}, PRECONDITION, "epoch: 6"),
        ({"epoch": 8}, PRECONDITION, "epoch: 8"),
        ({"step_id": 1}, PRECONDITION, "step_id: 1"),
        ({"step_id": 3}, PRECONDITION, "step_id: 3"),
    ],
)
async def test_a_step_that_is_not_the_next_ends_only_the_stream(
    worker: Worker, changes: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    batch = await worker.configure(7)
    good, bad = batch.request([(0, [1])]), batch.request([(0, [2])])
    bad.MergeFrom(StepRequest(**changes))
    call = await worker.execute(good, bad)
    assert (await call.read()).step_id == 1  # what came before is answered first
    assert (await rejected(end_of(call), code)).startswith(reason)
    await worker.check_next_epoch(8)


async def test_steps_before_configure(worker: Worker) -> None:
    call = await worker.execute(StepRequest(epoch=1, step_id=1))
    assert "none is configured" in await rejected(end_of(call), PRECONDITION)


async def test_a_new_epoch_drops_waiting_steps(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that comes back is served at once, not after what the lost one sent."""
    gate = Gate(monkeypatch)
    old = await worker.configure(1)
    lost = await worker.execute(*(old.request([(0, [1])]) for _ in range(4)))
    assert await asyncio.to_thread(gate.begun.wait, 30)

    configuring = asyncio.create_task(worker.configure(2))
    newest = ""
    while "above 2" not in newest:  # the request is in, and the old epoch over
        newest = await rejected(worker.configure(1), PRECONDITION)
    gate.open.set()
    new = await configuring
    call = await worker.execute(new.request([(0, [1])]))
    assert (await call.read()).step_id == 1
    assert gate.step_ids == [1, 1]  # only the running step of the old epoch
    assert "epoch" in await rejected(end_of(lost), PRECONDITION)
    call.cancel()


async def test_a_cancelled_stream_leaves_the_worker_usable(worker: Worker) -> None:
    for epoch in (1, 2, 3):
        batch = await worker.configure(epoch)
        call = await worker.execute(*(batch.request([(0, [1])]) for _ in range(3)))
        assert (await call.read()).step_id == 1
        call.cancel()


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"epoch": 3}, PRECONDITION, "epoch: 3"),
        ({"epoch": 2}, PRECONDITION, "epoch: 2"),
        ({"num_blocks": 0}, INVALID, "num_blocks: 0"),
        ({"num_blocks": 1 << 30}, INVALID, f"num_blocks: {1 << 30}"),
        # Slots of this many would fit their column, but their keys and values no memory.
        ({"num_blocks": (1 << 27) - 1}, INVALID, "num_blocks: 134217727"),
        (
            {"epoch": (1 << 64) - 1},
            INVALID,
            "epoch: 18446744073709551615; the limit is now 4294967299",
        ),
        ({"max_num_seqs": 9}, INVALID, "max_num_seqs: 9"),
        ({"max_num_batched_tokens": 129}, INVALID, "max_num_batched_tokens: 129"),
        ({"graph_tokens": 1}, PRECONDITION, "graph_tokens: 1 is not in 0..0"),
    ],
)
async def test_configure_rejects(
    worker: Worker, fields: dict[str, int], code: grpc.StatusCode, reason: str
) -> None:
    await worker.configure(3)
    details = await rejected(worker.configure(**{"epoch": 4, **fields}), code)
    assert details.startswith(reason)
    await worker.configure(4)


async def test_a_new_worker_joins_at_a_high_epoch_that_leaves_higher_ones(worker: Worker) -> None:
    await rejected(worker.configure((1 << 63) + 1), INVALID)
    await worker.configure(1 << 63)
    await worker.configure((1 << 63) + 1)


async def test_steps_far_ahead_stay_unread(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream thus has bounded memory, however fast they are sent. Other calls are answered."""
    gate = Gate(monkeypatch)
    batch = await worker.configure(1)
    call = await worker.execute()
    padding = b"\xfa\x3f\x80\x80\x40" + bytes(1 << 20)  # an unknown field

    async def write() -> None:
        for _ in range(30):
            step = batch.request([(0, [1])])
            await call.write(StepRequest.FromString(step.SerializeToString() + padding))

    writing = asyncio.create_task(write())
    assert await asyncio.to_thread(gate.begun.wait, 30)
    _, blocked = await asyncio.wait([writing], timeout=2)
    assert blocked
    assert await worker.is_serving()
    assert (await worker.stub.GetInfo(GetInfoRequest())).world_size == 1
    gate.open.set()
    assert [(await call.read()).step_id for _ in range(30)] == list(range(1, 31))
    await writing
    call.cancel()
