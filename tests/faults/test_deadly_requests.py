"""A request that kills the scheduler whenever it is submitted ends alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from math import ceil, log2
from pathlib import Path

import psutil
import pytest

from frontend.request import Request, Sampling
from frontend.scheduler_client import SchedulerClient
from frontend.suspects import MIN_LOSSES
from frontend.token_stream import TokenStream
from shared.errors import InternalError
from tests.fake_worker import FakeWorker, completion, start_worker
from tests.faults.faulty_scheduler.sitecustomize import FAILURE, READ, STEP, TOKEN
from tests.stack import ROOT

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0


class Engine:
    """A scheduler in a process of its own, with a worker that computes nothing, and the scheduler
    clients of frontends."""

    def __init__(self, pid: int, worker: FakeWorker, deaths: Path, address: str) -> None:
        self.worker = worker
        self.address = address
        self.clients: list[SchedulerClient] = []
        self._keeper = psutil.Process(pid)
        self._deaths = deaths

    @property
    def num_deaths(self) -> int:
        """The schedulers that died of a request."""
        return self._deaths.stat().st_size

    def kill(self) -> None:
        for fork in self._keeper.children():
            with suppress(psutil.NoSuchProcess):
                fork.send_signal(signal.SIGKILL)


@asynccontextmanager
async def engine_of(
    directory: Path, frontends: int = 1, worker: FakeWorker | None = None
) -> AsyncIterator[Engine]:
    worker = worker or FakeWorker(num_blocks=256)
    server, worker_address = await start_worker(worker)
    address, deaths = f"unix:{directory}/s", directory / "deaths"
    deaths.touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_svc", f"--scheduler-address={address}"),
        *(f"--worker-addresses={worker_address}", "--max-num-seqs=8"),
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'tests/faults/faulty_scheduler'}:{ROOT}",
            "SCHEDULER_FAULT": str(deaths),
        },
    )
    engine = Engine(process.pid, worker, deaths, address)
    tasks = []
    try:
        for _ in range(frontends):
            ready = asyncio.Event()

            async def on_ready(serving: bool, ready: asyncio.Event = ready) -> None:
                if serving:
                    ready.set()

            engine.clients.append(SchedulerClient(address, on_ready))
            tasks.append(asyncio.create_task(engine.clients[-1].run()))
            await asyncio.wait_for(ready.wait(), WAIT_S)
        yield engine
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        process.terminate()
        await process.wait()
        await server.stop(None)
    assert not worker.violations


def submit(client: SchedulerClient, prompt: Sequence[int], max_tokens: int = 60) -> TokenStream:
    sampling = Sampling(
        seed=0, max_tokens=max_tokens, eos_token_ids=(), stop_token_ids=(), stop=(), temperature=0
    )
    (stream,) = client.submit(Request(f"begins with {prompt[0]}", prompt, sampling, None))
    return stream


async def ends(stream: TokenStream, client: SchedulerClient) -> Exception | None:
    """Waits for the end, and returns the error that it came with; closes the stream as a call
    does."""
    while not stream.ended:
        await stream.waiter.wait(False)
    client.close(stream)
    return stream.error


async def assert_found(engine: Engine, deadly: Sequence[int], num_innocents: int) -> None:
    """Submits these requests among others, by all frontends in turn: they end with INTERNAL, and
    the others get all of their tokens."""
    prompts = [[7, number] for number in range(num_innocents)]
    for place, kind in enumerate(deadly, start=1):
        prompts.insert(place * len(prompts) // (len(deadly) + 1), [kind, place])
    streams = []
    for number, prompt in enumerate(prompts):
        client = engine.clients[number % len(engine.clients)]
        streams.append((submit(client, prompt), client))
    async with asyncio.timeout(WAIT_S):
        errors = await asyncio.gather(*(ends(*each) for each in streams))
    for prompt, (stream, _), error in zip(prompts, streams, errors, strict=True):
        if prompt[0] in deadly:
            assert isinstance(error, InternalError), prompt
            assert str(error) == "internal error"
        else:
            assert error is None, prompt
            assert list(stream.tokens) == completion(prompt, 60)


@pytest.mark.parametrize("frontends", [1, 2])
@pytest.mark.parametrize("kind", [READ, STEP, TOKEN, FAILURE])
async def test_a_deadly_request_is_found(tmp_path: Path, kind: int, frontends: int) -> None:
    async with engine_of(tmp_path, frontends) as engine:
        await assert_found(engine, [kind], num_innocents=11)
        # After a death that it had got tokens before, it has to die as often as any other.
        progress = 2 if kind == TOKEN else 0
        assert engine.num_deaths <= MIN_LOSSES + ceil(log2(12)) + progress
        await assert_found(engine, [], num_innocents=3)
