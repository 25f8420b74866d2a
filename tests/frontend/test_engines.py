"""Several engines behind one frontend: where requests go, and what moves when one is lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tempfile
import weakref
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.ports import free_port
from frontend.callers.tenants import Client
from frontend.engines import pool
from frontend.engines.engine import Engine
from frontend.engines.pool import Engines
from frontend.engines.prefix_index import PrefixIndex
from frontend.engines.token_stream import FinishReason, TokenStream
from frontend.request import Request, Sampling
from shared.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from shared.pb import scheduler_pb2 as pb
from tests.frontend.conftest import read
from tests.frontend.fake_scheduler import INFO, FakeScheduler
from tests.waiting import until

PROMPT = [11, 12, 13]
BLOCK = INFO.block_size
LONG_PROMPT = list(range(100, 100 + 4 * BLOCK + 1))


def request(prompt: Sequence[int] = PROMPT, engine: str = "", **fields: Any) -> Request:
    sampling = Sampling(seed=1, max_tokens=6, eos_token_ids=(), stop_token_ids=(), stop=())
    names = Sampling.__dataclass_fields__.keys() & fields.keys()
    sampling = replace(sampling, **{name: fields.pop(name) for name in names})
    return Request("an-id", array("I", prompt), sampling, None, engine=engine, **fields)


class Cluster:
    """A frontend's engines, whose schedulers are in a file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.file = directory / "engines"
        self.readiness: asyncio.Queue[bool] = asyncio.Queue()
        self.engines = Engines([f"file:{self.file}"], self.readiness.put)
        self.schedulers: dict[str, FakeScheduler] = {}
        self.numbers = itertools.count(1)
        self.taken: list[pb.BlockEvents] = []  # what the frontend knows of prefix caches
        self._task: asyncio.Task[None] | None = None

    async def add(self, name: str, model: str = "model", **info: Any) -> FakeScheduler:
        """Starts an engine that makes a token whenever it is told to."""
        facts = pb.EngineInfo(name=name, model_fingerprint=model)
        facts.MergeFrom(INFO)
        facts.MergeFrom(pb.EngineInfo(**info))
        scheduler = FakeScheduler(f"unix:{self._directory}/{name}.sock", facts)
        scheduler.automatic = False
        self.schedulers[name] = scheduler
        await scheduler.start()
        return scheduler

    async def list(self, *names: str) -> None:
        """Has the frontend know these engines, and waits until it is connected to all of them."""
        addresses = [f"unix:{self._directory}/{name}.sock" for name in names]
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(addresses), encoding="utf-8")
        new.rename(self.file)
        if self._task is None:
            self._task = asyncio.create_task(self.engines.run())
        await until(lambda: self.connected() == sorted(names), f"{names} to be connected")

    def connected(self) -> list[str]:
        try:
            return sorted(engine.name for engine in self.engines.connected())
        except UnavailableError:
            return []

    def submit(self, *args: Any, **kwargs: Any) -> TokenStream:
        return self.engines.submit(request(*args, **kwargs))[0]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for scheduler in self.schedulers.values():
            await scheduler.stop()


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    take = Engine._take

    async def take_and_note(self: Engine, message: pb.BlockEvents, index: PrefixIndex) -> None:
        await take(self, message, index)
        cluster.taken.append(message)

    monkeypatch.setattr(Engine, "_take", take_and_note)
    with tempfile.TemporaryDirectory(prefix="nano") as directory:  # short: sockets allow 107 bytes
        cluster = Cluster(Path(directory))
        yield cluster
        await cluster.close()


@pytest.fixture
async def two(cluster: Cluster) -> tuple[FakeScheduler, FakeScheduler]:
    """Engines a and b."""
    schedulers = await cluster.add("a"), await cluster.add("b")
    await cluster.list("a", "b")
    return schedulers


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


async def test_a_lost_engines_streams_go_on_at_another(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, b = two
    stream = cluster.submit(engine="a")
    await submitted(a)
    a.step()
    a.step()
    assert await tokens(stream, 2) == expected()[:2]
    await a.stop()
    moved = await submitted(b)
    assert np.frombuffer(moved.generated_ids, "<i4").tolist() == expected()[:2]
    assert moved.resubmitted  # a full queue takes it, and nobody is charged again
    assert await finish(b, stream) == expected()
    metrics = cluster.engines.metrics
    assert (metrics.moved, metrics.num_engines_serving) == (1, 1)
    assert cluster.readiness.get_nowait() is True
    assert cluster.readiness.empty()  # it has been ready all the time


async def test_when_the_last_engine_is_lost_streams_wait_for_any(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, b = two
    stream = cluster.submit(engine="a")
    await submitted(a)
    a.step()
    await tokens(stream, 1)
    await b.stop()
    await until(lambda: cluster.connected() == ["a"], "the frontend to know")
    await a.stop()
    await until(lambda: not cluster.connected(), "the frontend to know")
    with pytest.raises(UnavailableError):
        cluster.submit()
    await b.start()
    await submitted(b)
    assert await finish(b, stream) == expected()


@pytest.mark.parametrize("how", ["workers lost", "draining", "not listed"])
async def test_what_an_engine_cannot_go_on_with_moves(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler], how: str
) -> None:
    a, b = two
    stream = cluster.submit(engine="a")
    await submitted(a)
    a.step()
    await tokens(stream, 1)
    if how == "workers lost":
        a.tell(serving=False)
    elif how == "draining":
        a.tell(draining=True)
    else:
        await cluster.list("b")
    await submitted(b)
    new = cluster.submit()
    await submitted(b)
    assert await finish(b, stream) == await finish(b, new) == expected()
    if how == "workers lost":
        await asyncio.wait_for(a.aborts.get(), 60)
        a.tell(serving=True)
        await until(
            lambda: all(e.serving for e in cluster.engines._engines.values()),
            "the frontend to know",
        )
        cluster.submit(engine="a")
        await submitted(a)


async def test_an_engine_that_left_the_list_may_come_back(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, _ = two
    await cluster.list("b")
    with pytest.raises(InvalidArgumentError):
        cluster.submit(engine="a")
    await cluster.list("a", "b")
    cluster.submit(engine="a")
    await submitted(a)


async def test_streams_keep_to_their_model(cluster: Cluster) -> None:
    """A drained engine that is the last with its model keeps its streams."""
    a, b = await cluster.add("a", "old"), await cluster.add("b", "new")
    await cluster.list("a", "b")
    begun, waiting = cluster.submit(engine="a"), cluster.submit(engine="a")
    first = await submitted(a)
    await submitted(a)
    a.send([(first.request, 0, PROMPT[0])])
    a.connection.live[first.request].tokens.append(PROMPT[0])
    await tokens(begun, 1)
    a.ready.clear()
    a.tell(draining=True)
    assert (await submitted(b)).generated_ids == b""  # without a token, it may go anywhere
    assert await finish(b, waiting) == expected()
    assert await finish(a, begun) == expected()
    await until(lambda: cluster.connected() == ["b"], "the frontend to know")


async def test_the_only_engine_is_let_go_once_its_streams_have_ended(cluster: Cluster) -> None:
    a = await cluster.add("a")
    await cluster.list("a")
    stream = cluster.submit()
    await submitted(a)
    a.ready.clear()
    a.tell(draining=True)
    assert await finish(a, stream) == expected()
    await until(lambda: cluster.connected() == [], "the frontend to know")


async def test_streams_of_a_model_that_is_gone_fail(cluster: Cluster) -> None:
    a = await cluster.add("a", "old")
    await cluster.add("b", "new")
    await cluster.list("a", "b")
    stream = cluster.submit(engine="a")
    await submitted(a)
    a.step()
    await tokens(stream, 1)
    await a.stop()
    a.info.model_fingerprint = "new"
    await a.start()
    with pytest.raises(FailedPreconditionError, match="not served any more"):
        await tokens(stream, 2)
    assert a.submits.empty()


async def test_what_was_lost_twice_in_a_row_takes_no_third_engine_along(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = [await cluster.add(name) for name in "abc"]
    await cluster.list("a", "b", "c")
    deadly, other = cluster.submit(engine="a"), cluster.submit(engine="b")
    await submitted(a)
    await submitted(b)
    c.tell(serving=False)
    await until(lambda: len(cluster.engines._serving()) == 2, "the frontend to know")
    a.tell(serving=False)
    await submitted(b)
    c.tell(serving=True)
    await until(lambda: len(cluster.engines._serving()) == 2, "the frontend to know")
    b.tell(serving=False)
    moved = await submitted(c)
    assert moved.request == other.number  # which was there at one loss only
    assert await finish(c, other) == expected()
    assert c.submits.empty()
    b.tell(serving=True)  # where it has been all the time
    assert await finish(b, deadly) == expected()


async def test_what_was_lost_twice_moves_in_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_RETURN_S", 0.2)
    a, b, c = [await cluster.add(name) for name in "abc"]
    await cluster.list("a", "b", "c")
    stream = cluster.submit(engine="a")
    await submitted(a)
    c.tell(serving=False)
    await until(lambda: len(cluster.engines._serving()) == 2, "the frontend to know")
    a.tell(serving=False)
    await submitted(b)
    c.tell(serving=True)
    await until(lambda: len(cluster.engines._serving()) == 2, "the frontend to know")
    b.tell(serving=False)
    await submitted(c)
    assert await finish(c, stream) == expected()


async def test_a_suspect_moves_as_a_suspect(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was with two schedulers that died is named to the third before it is submitted."""
    monkeypatch.setattr(pool, "_PATIENCE_S", 0.2)
    a, b, c = [await cluster.add(name) for name in "abc"]
    await cluster.list("a", "b")
    stream = cluster.submit(engine="a")
    await submitted(a)
    await a.stop()
    await submitted(b)
    await b.stop()
    await cluster.list("c")
    suspects = await asyncio.wait_for(c.suspects.get(), 60)
    (suspect,) = suspects.suspects
    assert (suspect.request, suspect.losses) == (stream.number, 2)
    assert c.submits.empty()
    trial = pb.Trial(requests=[suspect.request])
    c.connection.outbox.put_nowait(pb.SchedulerMessage(trial=trial))
    await submitted(c)
    assert await finish(c, stream) == expected()


@pytest.mark.parametrize("kind", ["n", "beams"])
async def test_a_requests_completions_move_together(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler], kind: str
) -> None:
    a, b = two
    fields: dict[str, Any] = {"n": 3} if kind == "n" else {"beam_width": 3}
    streams = cluster.engines.submit(request(engine="a", **fields))
    await submitted(a)
    await a.stop()
    numbers = {(await submitted(b)).request}
    if kind == "n":
        numbers |= {(await submitted(b)).request for _ in range(2)}
        assert numbers == {stream.number for stream in streams}
    for _ in range(6):
        b.step()
    for stream in streams:
        await tokens(stream, 6)
    assert b.submits.empty()


async def test_overload_goes_to_others_before_it_is_refused(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, b = two
    full = pb.Finished(cause=pb.FINISH_CAUSE_QUEUE_FULL, message="full", retry_after_s=1.5)
    first, other = (a, b) if await taker(cluster) == "a" else (b, a)
    first.refusal = full
    streams = cluster.engines.submit(request(n=2))
    assert (await submitted(first)).n == 2
    assert (await submitted(other)).n == 2  # together, as they came
    for _ in range(6):
        other.step()
    for stream in streams:
        await tokens(stream, 6)
    other.refusal = full
    stream = cluster.submit()
    with pytest.raises(QueueFullError, match="full") as raised:
        await tokens(stream, 1)
    assert raised.value.retry_after_s == 1.5


async def test_what_has_ended_waits_for_no_collector(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    gc.disable()
    try:
        streams = cluster.engines.submit(request(n=3))
        gone = [weakref.ref(stream) for stream in streams]
        for stream in streams:
            stream.close()
        del streams, stream
        assert not any(ref() for ref in gone)
    finally:
        gc.enable()


async def test_a_named_engines_refusal_is_final(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, b = two
    a.refusal = pb.Finished(cause=pb.FINISH_CAUSE_QUEUE_FULL, message="full", retry_after_s=1.5)
    stream = cluster.submit(engine="a")
    with pytest.raises(QueueFullError):
        await tokens(stream, 1)
    assert b.submits.empty()


async def test_an_unknown_engine_is_refused_with_the_names_of_those_there_are(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"engine: unknown name; must be one of a, b"):
        cluster.submit(engine="c")


async def test_a_clients_budget_is_shared_among_engines(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, _ = two
    client = Client("x", input_tokens_per_minute=101)
    cluster.submit(engine="a", client=client)
    assert (await submitted(a)).client.input_tokens_per_minute == 51


async def test_limits_are_those_of_every_engine_and_capacity_is_of_all(cluster: Cluster) -> None:
    await cluster.add("a", max_model_len=100)
    await cluster.add("b", max_model_len=90)
    await cluster.list("a", "b")
    info = cluster.engines.engine_info
    assert (info.max_model_len, info.num_blocks) == (90, 2 * INFO.num_blocks)


def stored(prompt: Sequence[int], salt: str = "", name: bytes = b"") -> pb.BlockEvents:
    """The events of a prompt's full blocks, which the engine calls `name` and a number."""
    events, parent = [], b""
    for i in range(len(prompt) // BLOCK):
        block = pb.StoredBlock(
            name=name + bytes([i]),
            parent=parent,
            token_ids=np.array(prompt[i * BLOCK : (i + 1) * BLOCK], "<i4").tobytes(),
            cache_salt=salt,
        )
        events.append(pb.BlockEvent(stored=block))
        parent = block.name
    return pb.BlockEvents(events=events, load=pb.GetLoadResponse(blocks_free=1))


async def tell(cluster: Cluster, scheduler: FakeScheduler, *messages: pb.BlockEvents) -> None:
    """Has a frontend know what happens in the prefix cache: it does once it has taken a last
    message, which says nothing new."""
    last = pb.BlockEvents(load=messages[-1].load)
    last.load.steps = next(cluster.numbers)
    for message in (*messages, last):
        scheduler.block_events.put_nowait(message)
    await until(lambda: last in cluster.taken, "the frontend to know")


async def taker(cluster: Cluster, *args: Any, **kwargs: Any) -> str:
    """The engine that a request goes to."""
    stream = cluster.submit(*args, **kwargs)
    engines = cluster.engines._engines.values()
    (name,) = [engine.name for engine in engines if engine.has(stream)]
    await submitted(cluster.schedulers[name])
    stream.close()
    return name


@pytest.mark.parametrize("holder", ["a", "b"])
async def test_a_request_goes_to_the_engine_that_has_its_prefix(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler], holder: str
) -> None:
    scheduler = cluster.schedulers[holder]
    await tell(cluster, scheduler, stored(LONG_PROMPT, name=b"x"))
    assert await taker(cluster, LONG_PROMPT) == holder
    stream = cluster.submit(LONG_PROMPT)
    assert (await submitted(scheduler)).expected_cached_tokens == 4 * BLOCK
    stream.close()
    # Salts have prefixes of their own, and what is evicted is there no more.
    other = "b" if holder == "a" else "a"
    await tell(cluster, cluster.schedulers[other], stored(LONG_PROMPT, "salt", b"y"))
    assert await taker(cluster, LONG_PROMPT, cache_salt="salt") == other
    assert await taker(cluster, LONG_PROMPT) == holder
    removed = [pb.BlockEvent(removed=b"x" + bytes([i])) for i in range(3, 0, -1)]
    await tell(cluster, scheduler, pb.BlockEvents(events=removed))
    await tell(cluster, cluster.schedulers[other], stored(LONG_PROMPT, name=b"z"))
    assert await taker(cluster, LONG_PROMPT) == other


async def test_a_watch_that_fails_starts_anew(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = two
    await tell(cluster, a, stored(LONG_PROMPT, name=b"x"))
    (engine,) = (each for each in cluster.engines._engines.values() if each.name == "a")
    with monkeypatch.context() as patch:
        patch.setattr(PrefixIndex, "apply", lambda *_: 1 / 0)
        a.block_events.put_nowait(stored(LONG_PROMPT, name=b"y"))
        await until(lambda: engine.index is None, "the frontend to know")
    await until(lambda: engine.index is not None, "the frontend to know")
    assert not engine.index._names.get(engine.number)  # type: ignore[union-attr]
    await tell(cluster, a, stored(LONG_PROMPT, name=b"z"))
    assert await taker(cluster, LONG_PROMPT) == "a"


async def test_requests_that_come_together_share_what_one_of_them_computes(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    slow = pb.GetLoadResponse(prompt_token_s=0.01)
    for scheduler in two:
        await tell(cluster, scheduler, pb.BlockEvents(load=slow))
    first = await taker(cluster, LONG_PROMPT)
    streams = [cluster.submit(LONG_PROMPT) for _ in range(3)]
    engines = cluster.engines._engines.values()
    assert {e.name for e in engines for s in streams if e.has(s)} == {first}


async def test_a_prefix_is_not_worth_any_wait(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, b = two
    busy = stored(LONG_PROMPT)
    busy.load.CopyFrom(pb.GetLoadResponse(waiting_uncached_tokens=10_000, prompt_token_s=0.001))
    await tell(cluster, a, busy)
    await tell(cluster, b, pb.BlockEvents(load=pb.GetLoadResponse(prompt_token_s=0.001)))
    assert await taker(cluster, LONG_PROMPT) == "b"


async def test_names_are_resolved(tmp_path: Path) -> None:
    port = free_port()
    scheduler = FakeScheduler(f"127.0.0.1:{port}")
    await scheduler.start()
    ready: asyncio.Queue[bool] = asyncio.Queue()
    engines = Engines([f"dns:localhost:{port}"], ready.put)
    task = asyncio.create_task(engines.run())
    assert await asyncio.wait_for(ready.get(), 60)
    engines.submit(request())
    await submitted(scheduler)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scheduler.stop()


async def test_what_an_engine_holds_is_asked_again_after_an_orderly_end(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    """The stream of requests ends first; its channel is closed with the other calls on it."""
    a, _ = two
    await tell(cluster, a, stored(LONG_PROMPT))
    a.drop_connection()
    await until(lambda: cluster.connected() == ["b"], "the frontend to know")
    await until(lambda: cluster.connected() == ["a", "b"], "the frontend to know")
    await tell(cluster, a, stored(LONG_PROMPT))
    assert await taker(cluster, LONG_PROMPT) == "a"


async def test_what_has_no_token_waits_for_any_engine(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    """Its own is gone for good while the other is away for a moment."""
    a, b = two
    stream = cluster.submit(engine="a")
    await submitted(a)
    await b.stop()
    await until(lambda: cluster.connected() == ["a"], "the frontend to know")
    listing = asyncio.create_task(cluster.list("b"))
    await until(
        lambda: any(not e.listed for e in cluster.engines._engines.values()), "the frontend to know"
    )
    await a.stop()
    await until(lambda: not cluster.connected(), "the frontend to know")
    await b.start()
    await submitted(b)
    assert await finish(b, stream) == expected()
    await listing


async def test_streams_outlive_the_replacement_of_the_only_engine(cluster: Cluster) -> None:
    """Its successor, which has another address, is listed only once it is ready."""
    a, b = await cluster.add("a"), await cluster.add("b")
    await cluster.list("a")
    begun, waiting = cluster.submit(), cluster.submit()
    first = await submitted(a)
    await submitted(a)
    a.send([(first.request, 0, PROMPT[0])])
    await tokens(begun, 1)
    await a.stop()
    await cluster.list()
    await until(
        lambda: not any(e.listed for e in cluster.engines._engines.values()), "the frontend to know"
    )
    await cluster.list("b")
    assert {len((await submitted(b)).generated_ids) for _ in range(2)} == {0, 4}
    assert await finish(b, begun) == await finish(b, waiting) == expected()


async def test_a_requests_completions_are_of_one_model(
    cluster: Cluster, two: tuple[FakeScheduler, FakeScheduler]
) -> None:
    a, b = two
    first, second = cluster.engines.submit(request(engine="a", n=2))
    await submitted(a)
    a.send([(second.number, 0, PROMPT[0])])
    await tokens(second, 1)
    await b.stop()
    b.info.model_fingerprint = "new"
    await b.start()
    await until(lambda: cluster.connected() == ["a", "b"], "the frontend to know")
    await a.stop()
    a.info.model_fingerprint = "new"
    await a.start()
    with pytest.raises(FailedPreconditionError):
        await tokens(first, 1)
    assert a.submits.empty()
    assert b.submits.empty()


async def test_a_suspect_is_not_tried_with_another_model(cluster: Cluster) -> None:
    a = await cluster.add("a")
    await cluster.add("b", "other")
    await cluster.list("a", "b")
    stream = cluster.submit(engine="a")
    await submitted(a)
    a.step()
    await tokens(stream, 1)
    await a.stop()
    await a.start()
    await submitted(a)
    await a.stop()
    a.info.model_fingerprint = "new"
    await a.start()
    with pytest.raises(FailedPreconditionError):
        await tokens(stream, 2)
    cluster.submit(engine="a")
    await submitted(a)  # behind whatever was sent before
    assert a.suspects.empty()
