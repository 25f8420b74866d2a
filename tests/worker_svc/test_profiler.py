"""Profile of a worker, over real gRPC."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from shared.pb.worker_pb2 import ProfileRequest
from tests.waiting import until
from tests.worker_svc.harness import Batch
from tests.worker_svc.serving import INVALID, PRECONDITION, Worker, rejected, tokens
from worker_svc.profiling import profiler
from worker_svc.profiling.profiler import PIECE_STEPS


class Steps:
    """Decodes of one sequence, one after another, in a new epoch."""

    def __init__(self, batch: Batch, call: Any) -> None:
        self._batch = batch
        self._call = call

    @classmethod
    async def begin(cls, worker: Worker, epoch: int = 1) -> Steps:
        return cls(await worker.configure(epoch), await worker.execute())

    async def run(self, count: int) -> list[list[int]]:
        """The tokens of the next steps."""
        found = []
        for _ in range(count):
            chunk = [-1] if self._batch.contexts else [5, 6, 7]
            await self._call.write(self._batch.request([(0, chunk)]))
            found.append(tokens(await self._call.read()))
        return found


async def begin(worker: Worker, num_steps: int) -> asyncio.Task[bytes]:
    """Starts a profile -> a task that returns its trace."""
    started = asyncio.Event()
    start = worker.service.execution._profiler.start

    def observed(*args: Any) -> None:
        start(*args)
        loop.call_soon_threadsafe(started.set)

    loop, worker.service.execution._profiler.start = asyncio.get_running_loop(), observed  # type: ignore[method-assign]

    async def read() -> bytes:
        call = worker.stub.Profile(ProfileRequest(num_steps=num_steps))
        try:
            return b"".join([piece.trace async for piece in call])
        finally:
            call.cancel()  # gRPC does not before the first piece

    task = asyncio.create_task(read())
    await asyncio.wait_for(started.wait(), 60)
    worker.service.execution._profiler.start = start  # type: ignore[method-assign]
    return task


def steps_of(trace: bytes) -> int:
    """The number of steps in a trace, each of which must hold the model's operations."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace))["traceEvents"]
    names = [event["name"] for event in events]
    steps = sum(name.startswith("step ") for name in names)
    assert names.count("aten::copy_") >= steps
    return steps


async def rejection(worker: Worker, num_steps: int, code: Any) -> str:
    return await rejected(worker.stub.Profile(ProfileRequest(num_steps=num_steps)).read(), code)


@pytest.mark.parametrize("num_steps", [2, 2 * PIECE_STEPS, 2 * PIECE_STEPS + 3])
async def test_a_profile_has_the_next_steps_and_changes_no_token(
    worker: Worker, num_steps: int
) -> None:
    steps = await Steps.begin(worker)
    found = await steps.run(3)
    for _ in range(2):
        profile = await begin(worker, num_steps)
        found += await steps.run(num_steps + 3)
        assert steps_of(await profile) == num_steps
    unprofiled = await Steps.begin(worker, 2)
    assert await unprofiled.run(len(found)) == found


async def test_one_profile_is_recorded_at_a_time_until_its_call_ends(worker: Worker) -> None:
    steps = await Steps.begin(worker)
    first = await begin(worker, 100)
    assert await rejection(worker, 5, PRECONDITION) == "a profile is in progress"
    await steps.run(PIECE_STEPS + 1)
    first.cancel()
    await asyncio.wait([first])
    await until(lambda: worker.service.execution._profiler._profile is None, "its end")
    second = await begin(worker, 2)
    await steps.run(2)
    assert steps_of(await second) == 2


@pytest.mark.parametrize("num_steps", [0, 1001])
async def test_an_impossible_profile_is_rejected(worker: Worker, num_steps: int) -> None:
    reason = f"num_steps: {num_steps} is not in 1..1000"
    assert await rejection(worker, num_steps, INVALID) == reason


async def test_a_trace_that_cannot_be_written_is_reported(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler, "TemporaryDirectory", full)
    steps = await Steps.begin(worker)
    profile = await begin(worker, PIECE_STEPS + 5)
    await steps.run(PIECE_STEPS)
    with pytest.raises(Exception, match="the trace was cut short"):
        await profile
    assert await steps.run(1)
