"""Several engines behind one frontend, with fake schedulers."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from frontend.engines.engine import EngineClient
from frontend.engines.pool import Engines
from frontend.engines.token_stream import FinishReason, TokenStream
from frontend.request import GenerationRequest, Sampling
from shared.pb import scheduler_pb2 as pb
from tests.frontend.fake_scheduler import INFO, FakeScheduler
from tests.waiting import until

PROMPT = [11, 12, 13]


def request(
    prompt: Sequence[int] = PROMPT,
    engine: str = "",
    deadline: float | None = None,
    **fields: Any,
) -> GenerationRequest:
    sampling = Sampling(seed=1, max_tokens=6, eos_token_ids=(), stop_token_ids=(), stop=())
    names = Sampling.__dataclass_fields__.keys() & fields.keys()
    sampling = replace(sampling, **{name: fields.pop(name) for name in names})
    return GenerationRequest(
        "an-id", array("I", prompt), sampling, deadline, engine=engine, **fields
    )


Two = tuple[FakeScheduler, FakeScheduler]


class Cluster:
    """A frontend's engines, whose schedulers are listed in a file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.file = directory / "engines"
        self.readiness: asyncio.Queue[bool] = asyncio.Queue()
        self.engines = Engines([f"file:{self.file}"], self.readiness.put)
        self.schedulers: dict[str, FakeScheduler] = {}
        self.numbers = itertools.count(1)
        self.taken: list[pb.BlockEvents] = []  # the messages of caches that the frontend has read
        self._task: asyncio.Task[None] | None = None

    async def add(self, name: str, model: str = "model", **info: Any) -> FakeScheduler:
        """Starts an engine that makes a token at each `step`."""
        facts = pb.EngineInfo(name=name, model_fingerprint=model)
        facts.MergeFrom(INFO)
        facts.MergeFrom(pb.EngineInfo(**info))
        scheduler = FakeScheduler(f"unix:{self._directory}/{name}.sock", facts)
        scheduler.automatic = False
        self.schedulers[name] = scheduler
        await scheduler.start()
        return scheduler

    async def list(self, *names: str) -> None:
        """Lists these engines, and waits until the frontend is connected to all of them."""
        addresses = [f"unix:{self._directory}/{name}.sock" for name in names]
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(addresses), encoding="utf-8")
        new.rename(self.file)
        if self._task is None:
            self._task = asyncio.create_task(self.engines.run())
        await self.until_connected(*sorted(names))

    def connected(self) -> list[str]:
        engines = self.engines._engines.values()
        return sorted(engine.name for engine in engines if engine.connected)

    async def until_connected(self, *names: str) -> None:
        """Waits until the frontend is connected to exactly these engines."""
        await until(lambda: self.connected() == [*names], f"connections to {names}")

    async def reconnect(self, scheduler: FakeScheduler) -> None:
        """Has the only engine lose its connection and make another."""
        scheduler.drop_connection()
        await self.until_connected()
        await self.until_connected(scheduler.info.name)

    async def until_serving(self, count: int) -> None:
        await until(lambda: len(self.engines._serving()) == count, f"{count} engines to serve")

    def engine(self, name: str) -> EngineClient:
        (engine,) = (each for each in self.engines._engines.values() if each.name == name)
        return engine

    def engine_of(self, stream: TokenStream) -> str:
        """The name of the engine that has a completion."""
        engines = self.engines._engines.values()
        (name,) = (engine.name for engine in engines if engine.has(stream))
        return name

    def submit(self, *args: Any, **kwargs: Any) -> TokenStream:
        return self.engines.submit(request(*args, **kwargs))[0]

    async def sent(self, scheduler: FakeScheduler, *args: Any, **kwargs: Any) -> TokenStream:
        """A completion that has been submitted to this engine."""
        stream = self.submit(*args, **kwargs)
        await submitted(scheduler)
        return stream

    async def begin(self, scheduler: FakeScheduler, count: int = 1) -> TokenStream:
        """A completion that has `count` tokens of this engine, where it is the only one."""
        stream = await self.sent(scheduler, engine=scheduler.info.name)
        for _ in range(count):
            scheduler.step()
        await tokens(stream, count)
        return stream

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for scheduler in self.schedulers.values():
            await scheduler.stop()


async def tokens(stream: TokenStream, count: int) -> list[int]:
    """Waits until a completion has so many tokens."""
    while len(stream.tokens) < count:
        await read(stream, len(stream.tokens))
    return stream.tokens[:]


async def submitted(scheduler: FakeScheduler) -> pb.Submit:
    return await asyncio.wait_for(scheduler.submits.get(), 60)


async def finish(scheduler: FakeScheduler, stream: TokenStream) -> list[int]:
    while stream.finish is None:
        scheduler.step()
        await read(stream, len(stream.tokens))
    assert stream.finish is FinishReason.LENGTH
    return stream.tokens[:]


def expected(prompt: Sequence[int] = PROMPT, count: int = 6) -> list[int]:
    return [prompt[i % len(prompt)] for i in range(count)]


async def read(stream: TokenStream, seen: int) -> Sequence[int]:
    """Waits for tokens after the first `seen`, or the completion's end, and returns them."""
    await stream.waiter.wait(stream.ended or len(stream.tokens) > seen)
    stream.check()
    return stream.tokens[seen:]
