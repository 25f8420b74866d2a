"""A request that kills the scheduler whenever it is submitted ends alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import ceil, log2
from pathlib import Path

import numpy as np
import psutil
import pytest

from frontend.engines.engine import Engine as FrontendEngine
from frontend.engines.token_stream import TokenStream
from frontend.request import Request, Sampling
from shared.errors import InternalError
from shared.suspects import MIN_LOSSES
from tests.fake_worker import FakeWorker, completion, start_worker
from tests.faults.faulty import deadly_environment
from tests.faults.faulty_scheduler.sitecustomize import FAILURE, READ, STEP, TOKEN
from tests.stack import ROOT
from tests.waiting import WAIT_S

WORKERS = 905
POISON = np.array([WORKERS, 2], "<i4").tobytes()  # workers cannot compute these two


class Engine:
    """A scheduler in a process of its own, with a worker that computes nothing, and the scheduler
    clients of frontends."""

    def __init__(self, parent: psutil.Process, worker: FakeWorker, deaths: Path) -> None:
        self.worker = worker
        self.clients: list[FrontendEngine] = []
        self._parent = parent
        self._deaths = deaths
        self._ready: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_deaths(self) -> int:
        """The schedulers that died of a request."""
        return self._deaths.stat().st_size

    async def connect(self, address: str) -> None:
        """Starts another client, and waits until it is ready."""
        ready = asyncio.Event()

        async def note(_: object, is_ready: bool) -> None:
            if is_ready:
                ready.set()
            else:
                ready.clear()

        client = FrontendEngine(address, note)
        self.clients.append(client)
        self._ready.append(ready)
        self._tasks.append(asyncio.create_task(client.connection.run()))
        await self.all_connected()

    async def all_connected(self) -> None:
        """Waits until all clients are ready: some may not know of the last scheduler yet."""
        async with asyncio.timeout(WAIT_S):
            for ready in self._ready:
                await ready.wait()

    async def kill_at_a_step(self) -> None:
        """Kills the scheduler once it has sent a step."""
        await asyncio.wait_for(self.worker.step_arrived.wait(), WAIT_S)
        self.worker.step_arrived.clear()
        for fork in self._parent.children():
            fork.kill()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def engine_of(directory: Path, frontends: int) -> AsyncIterator[Engine]:
    worker = FakeWorker(num_blocks=256)
    server, worker_address = await start_worker(worker)
    address, deaths = f"unix:{directory}/s", directory / "deaths"
    deaths.touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_svc", f"--scheduler-address={address}"),
        *(f"--worker-addresses={worker_address}", "--max-num-seqs=8"),
        cwd=ROOT,
        env={**os.environ, **deadly_environment(deaths)},
    )
    engine = Engine(psutil.Process(process.pid), worker, deaths)
    try:
        for _ in range(frontends):
            await engine.connect(address)
        yield engine
    finally:
        await engine.close()
        process.terminate()
        await process.wait()
        await server.stop(None)
    assert not worker.violations


def submit(client: FrontendEngine, prompt: Sequence[int], max_tokens: int = 60) -> TokenStream:
    sampling = Sampling(
        seed=0, max_tokens=max_tokens, eos_token_ids=(), stop_token_ids=(), stop=(), temperature=0
    )
    streams = client.streams.open(Request(f"begins with {prompt[0]}", prompt, sampling, None))
    client.submit(streams)
    return streams[0]


async def ends(stream: TokenStream, client: FrontendEngine) -> Exception | None:
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
    await engine.all_connected()
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
async def test_a_deadly_request_is_found(tmp_path: Path, frontends: int) -> None:
    async with engine_of(tmp_path, frontends) as engine:
        for kind in (READ, STEP, TOKEN, FAILURE):
            before = engine.num_deaths
            await assert_found(engine, [kind], num_innocents=11)
            assert engine.num_deaths - before <= MIN_LOSSES + ceil(log2(12)), kind
        await assert_found(engine, [], num_innocents=3)


async def test_several_are_found_and_one_that_kills_workers(tmp_path: Path) -> None:
    async with engine_of(tmp_path, frontends=2) as engine:
        engine.worker.fails = lambda step: POISON in step.input_ids
        await assert_found(engine, [READ, WORKERS, TOKEN], num_innocents=9)
        assert engine.num_deaths <= 2 * (MIN_LOSSES + ceil(log2(12)))


async def test_schedulers_killed_in_a_row_convict_nobody(tmp_path: Path) -> None:
    """Not even while nothing makes progress, so that everything is a suspect."""
    async with engine_of(tmp_path, frontends=2) as engine:
        engine.worker.gate.clear()
        prompts = [[7, number] for number in range(16)]
        streams = [(submit(engine.clients[i % 2], each), each) for i, each in enumerate(prompts)]
        for _ in range(5):
            await engine.kill_at_a_step()
        engine.worker.gate.set()
        for number, (stream, prompt) in enumerate(streams):
            async with asyncio.timeout(WAIT_S):
                assert await ends(stream, engine.clients[number % 2]) is None
            assert list(stream.tokens) == completion(prompt, 60)
        assert not engine.num_deaths
