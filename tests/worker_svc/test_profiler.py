"""StartProfile and StopProfile of a worker, over real gRPC."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.pb.worker_pb2 import StartProfileRequest, StopProfileRequest
from tests.waiting import wait_for
from tests.worker_svc.device import DEVICE
from tests.worker_svc.harness import Batch
from tests.worker_svc.test_server import INVALID, PRECONDITION, Worker, rejected, running, tokens
from worker_svc.profiling.profiler import PIECE_STEPS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "not yet" / "profiles"


@pytest.fixture
async def worker(tiny_dir: Path, tmp_path: Path, directory: Path) -> AsyncIterator[Worker]:
    async with running(tiny_dir, tmp_path, profile_directory=str(directory)) as started:
        await started.service.load()
        yield started


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


def trace_events(trace: str | Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def steps_of(trace: str | Path) -> int:
    """The number of steps in a trace, each of which must hold the model's operations."""
    names = [event["name"] for event in trace_events(trace)]
    steps = sum(name.startswith("step ") for name in names)
    assert names.count("aten::copy_") >= steps
    return steps


async def test_a_profile_has_the_steps_between_its_start_and_its_stop(
    worker: Worker, directory: Path
) -> None:
    steps = await Steps.begin(worker)
    before = await steps.run(3)
    started = await worker.stub.StartProfile(StartProfileRequest())
    details = await rejected(worker.stub.StartProfile(StartProfileRequest()), PRECONDITION)
    assert details == "a profile is in progress: StopProfile ends it"
    during = await steps.run(4)
    stopped = await worker.stub.StopProfile(StopProfileRequest())
    after = await steps.run(3)
    assert stopped.trace == started.trace
    assert os.listdir(directory) == [os.path.basename(stopped.trace)]
    assert steps_of(stopped.trace) == 4
    details = await rejected(worker.stub.StopProfile(StopProfileRequest()), PRECONDITION)
    assert details == "no profile is in progress"
    unprofiled = await Steps.begin(worker, 2)
    assert await unprofiled.run(10) == before + during + after


@pytest.mark.parametrize("num_steps", [2, 2 * PIECE_STEPS + 3])
async def test_a_profile_ends_by_itself_after_its_steps(
    worker: Worker, directory: Path, num_steps: int
) -> None:
    steps = await Steps.begin(worker)
    for stops in (True, False, True):  # one that has ended need not be stopped
        started = await worker.stub.StartProfile(StartProfileRequest(num_steps=num_steps))
        await steps.run(num_steps + 3)
        if stops:
            stopped = await worker.stub.StopProfile(StopProfileRequest())
            assert stopped.trace == started.trace
        else:
            wait_for(Path(started.trace).exists, "the trace")
        assert steps_of(started.trace) == num_steps
    assert len(os.listdir(directory)) == 3


async def test_what_a_profile_records(worker: Worker) -> None:
    steps = await Steps.begin(worker)
    everything = StartProfileRequest(activities=["CPU", "MEM"], with_stack=True, record_shapes=True)
    await worker.stub.StartProfile(everything)
    await steps.run(2)
    stopped = await worker.stub.StopProfile(StopProfileRequest())
    events = trace_events(stopped.trace)
    names = {event["name"] for event in events}
    assert "[memory]" in names
    assert any("worker_svc/model_runner.py" in name for name in names)
    assert any("Input Dims" in event.get("args", {}) for event in events)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (StartProfileRequest(num_steps=0), "num_steps: 0 is not in 1..1000"),
        (StartProfileRequest(num_steps=1001), "num_steps: 1001 is not in 1..1000"),
        (StartProfileRequest(activities=["CPU", "TPU"]), "activities: TPU; known: CPU, GPU, MEM"),
        pytest.param(
            StartProfileRequest(activities=["GPU"]),
            "activities: GPU, but the workers run on a CPU",
            marks=pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU"),
        ),
    ],
)
async def test_an_impossible_profile_is_rejected(
    worker: Worker, request_: StartProfileRequest, reason: str
) -> None:
    assert await rejected(worker.stub.StartProfile(request_), INVALID) == reason


async def test_a_trace_that_cannot_be_written_is_reported(worker: Worker, directory: Path) -> None:
    steps = await Steps.begin(worker)
    await worker.stub.StartProfile(StartProfileRequest())
    shutil.rmtree(directory)
    await steps.run(2)
    details = await rejected(worker.stub.StopProfile(StopProfileRequest()), PRECONDITION)
    assert details.startswith("profile_directory: ")
    assert await steps.run(1)


async def test_without_a_directory_profiling_is_off(tiny_dir: Path, tmp_path: Path) -> None:
    async with running(tiny_dir, tmp_path) as worker:
        await worker.service.load()
        details = await rejected(worker.stub.StartProfile(StartProfileRequest()), PRECONDITION)
        assert details == "profiling is off: profile_directory is unset"
