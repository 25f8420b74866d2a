"""Several engines behind one frontend: what moves when an engine is lost or drained."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from deploy.ports import free_port
from frontend.callers.tenants import Tenant
from frontend.engines import pool
from frontend.engines.deaths import MIN_DEATHS_BEFORE_ALONE
from frontend.engines.pool import Engines
from shared.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    QueueFullError,
)
from shared.pb import scheduler_pb2 as pb
from tests.frontend.cluster import (
    PROMPT,
    Cluster,
    Two,
    expected,
    finish,
    request,
    submitted,
    tokens,
)
from tests.frontend.fake_scheduler import INFO, FakeScheduler
from tests.waiting import until


async def test_streams_of_a_lost_engine_continue_on_another(cluster: Cluster, two: Two) -> None:
    a, b = two
    stream = await cluster.begin(a, 2)
    assert stream.tokens == expected()[:2]
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
    cluster: Cluster, two: Two
) -> None:
    a, b = two
    stream = await cluster.begin(a)
    await b.stop()
    await cluster.until_connected("a")
    await a.stop()
    await cluster.until_connected()
    new = cluster.submit()
    await b.start()
    assert {(await submitted(b)).resubmitted for _ in range(2)} == {True, False}
    assert await finish(b, stream) == await finish(b, new) == expected()


@pytest.mark.parametrize("how", ["workers lost", "draining", "not listed"])
async def test_streams_move_from_an_engine_that_cannot_continue_them(
    cluster: Cluster, two: Two, how: str
) -> None:
    a, b = two
    stream = await cluster.begin(a)
    if how == "workers lost":
        a.send_state(serving=False)
    elif how == "draining":
        a.send_state(draining=True)
    else:
        await cluster.list("b")
    await submitted(b)
    new = await cluster.sent(b)
    assert await finish(b, stream) == await finish(b, new) == expected()
    if how == "workers lost":
        await asyncio.wait_for(a.aborts.get(), 60)
        a.send_state(serving=True)
        await until(
            lambda: all(e.serving for e in cluster.engines._engines.values()),
            "the frontend to know",
        )
        await cluster.sent(a, engine="a")


async def test_an_engine_that_left_the_list_may_return(cluster: Cluster, two: Two) -> None:
    a, _ = two
    await cluster.list("b")
    with pytest.raises(InvalidArgumentError):
        cluster.submit(engine="a")
    await cluster.list("a", "b")
    await cluster.sent(a, engine="a")


async def test_streams_stay_with_their_model(cluster: Cluster) -> None:
    """A drained engine that is the last with its model keeps its streams."""
    a, b = await cluster.add("a", "old"), await cluster.add("b", "new")
    await cluster.list("a", "b")
    begun, waiting = await cluster.begin(a), await cluster.sent(a, engine="a")
    a.ready.clear()
    a.send_state(draining=True)
    assert (await submitted(b)).generated_ids == b""  # without a token, it may go anywhere
    assert await finish(b, waiting) == expected()
    assert await finish(a, begun) == expected()
    await cluster.until_connected("b")


async def test_the_only_engine_is_disconnected_once_its_streams_have_ended(
    cluster: Cluster, a: FakeScheduler
) -> None:
    stream = await cluster.sent(a)
    a.ready.clear()
    a.send_state(draining=True)
    assert await finish(a, stream) == expected()
    await cluster.until_connected()


async def test_a_scheduler_that_dies_while_it_stops_counts_against_no_stream(
    cluster: Cluster, a: FakeScheduler
) -> None:
    """It may be killed because its stop takes too long."""
    stream = cluster.submit()
    (engine,) = cluster.engines._engines.values()
    for _ in range(MIN_DEATHS_BEFORE_ALONE):
        await submitted(a)
        a.send_state(draining=True)
        await until(lambda: engine.draining, "the frontend to know that it stops")
        await a.stop()
        await a.start()
    await submitted(a)
    assert not a.alone
    assert await finish(a, stream) == expected()


@pytest.mark.parametrize("moves", [False, True])
async def test_a_stream_that_was_lost_twice_in_a_row_moves_only_in_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    if moves:
        monkeypatch.setattr(pool, "_RETURN_S", 0.2)
    a, b, c = [await cluster.add(name) for name in "abc"]
    await cluster.list("a", "b", "c")
    deadly, other = await cluster.sent(a, engine="a"), await cluster.sent(b, engine="b")
    c.send_state(serving=False)
    await cluster.until_serving(2)
    a.send_state(serving=False)
    await submitted(b)
    c.send_state(serving=True)
    await cluster.until_serving(2)
    b.send_state(serving=False)
    assert (await submitted(c)).request == other.number  # which was there at one loss only
    assert await finish(c, other) == expected()
    if moves:
        assert (await submitted(c)).request == deadly.number
        assert await finish(c, deadly) == expected()
    else:
        assert c.submits.empty()
        b.send_state(serving=True)  # where it has been all the time
        assert await finish(b, deadly) == expected()


async def test_a_suspect_moves_as_a_suspect(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completions that two schedulers died with are submitted to the third one at a time."""
    monkeypatch.setattr(pool, "_PATIENCE_S", 0.2)
    a, b, c = [await cluster.add(name) for name in "abc"]
    await cluster.list("a", "b")
    streams = [cluster.submit(engine="a") for _ in range(2)]
    for scheduler in (a, b):
        for _ in streams:
            await submitted(scheduler)
        await scheduler.stop()
    await cluster.list("c")
    assert (await submitted(c)).request == streams[0].number
    await until(lambda: cluster.engine_of(streams[1]) == "c", "both to move")
    new = cluster.submit()
    assert (await submitted(c)).request == new.number
    assert await finish(c, streams[0]) == expected()
    assert (await submitted(c)).request == streams[1].number
    assert await finish(c, streams[1]) == expected()


@pytest.mark.parametrize("kind", ["n", "beams"])
async def test_a_requests_completions_move_together(cluster: Cluster, two: Two, kind: str) -> None:
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


async def test_a_request_is_rejected_only_if_all_engines_are_full(
    cluster: Cluster, two: Two
) -> None:
    a, b = two
    full = pb.Finished(cause=pb.FINISH_CAUSE_QUEUE_FULL, message="full", retry_after_s=1.5)
    a.rejection = b.rejection = full
    streams = cluster.engines.submit(request(n=2))
    first, other = (a, b) if cluster.engine_of(streams[0]) == "a" else (b, a)
    other.rejection = None
    assert (await submitted(first)).n == 2
    assert (await submitted(other)).n == 2  # together, as they came
    for _ in range(6):
        other.step()
    for stream in streams:
        await tokens(stream, 6)
    other.rejection = full
    stream = cluster.submit()
    with pytest.raises(QueueFullError, match="full") as raised:
        await tokens(stream, 1)
    assert raised.value.retry_after_s == 1.5


async def test_ended_streams_are_freed_without_the_garbage_collector(
    cluster: Cluster, two: Two
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


async def test_a_rejection_by_a_named_engine_is_final(cluster: Cluster, two: Two) -> None:
    a, b = two
    a.rejection = pb.Finished(cause=pb.FINISH_CAUSE_QUEUE_FULL, message="full", retry_after_s=1.5)
    stream = cluster.submit(engine="a")
    with pytest.raises(QueueFullError):
        await tokens(stream, 1)
    assert b.submits.empty()


async def test_the_rejection_of_an_unknown_engine_lists_the_known_names(
    cluster: Cluster, two: Two
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"engine: unknown name; must be one of a, b"):
        cluster.submit(engine="c")


async def test_a_clients_budget_is_divided_among_engines(cluster: Cluster, two: Two) -> None:
    a, _ = two
    client = Tenant("x", input_tokens_per_minute=101)
    cluster.submit(engine="a", client=client)
    assert (await submitted(a)).client.input_tokens_per_minute == 51


async def test_limits_are_the_smallest_and_capacity_is_the_sum(cluster: Cluster) -> None:
    await cluster.add("a", max_model_len=100)
    await cluster.add("b", max_model_len=90)
    await cluster.list("a", "b")
    info = cluster.engines.engine_info
    assert (info.max_model_len, info.num_blocks) == (90, 2 * INFO.num_blocks)


async def test_dns_names_are_resolved() -> None:
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


async def test_streams_survive_the_replacement_of_the_only_engine(cluster: Cluster) -> None:
    """Its successor, which has another address, is listed only once it is ready."""
    a, b = await cluster.add("a"), await cluster.add("b")
    await cluster.list("a")
    begun, waiting = await cluster.begin(a), await cluster.sent(a)
    await a.stop()
    await cluster.list()
    await until(
        lambda: not any(e.listed for e in cluster.engines._engines.values()), "the frontend to know"
    )
    await cluster.list("b")
    assert {len((await submitted(b)).generated_ids) for _ in range(2)} == {0, 4}
    assert await finish(b, begun) == await finish(b, waiting) == expected()


async def test_completions_of_a_request_stay_with_one_model(cluster: Cluster, two: Two) -> None:
    a, b = two
    first, second = cluster.engines.submit(request(engine="a", n=2))
    await submitted(a)
    a.send([(second.number, 0, PROMPT[0])])
    await tokens(second, 1)
    await b.stop()
    b.info.model_fingerprint = "new"
    await b.start()
    await cluster.until_connected("a", "b")
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
    stream = await cluster.begin(a)
    await a.stop()
    await a.start()
    await submitted(a)
    await a.stop()
    a.info.model_fingerprint = "new"
    await a.start()
    with pytest.raises(FailedPreconditionError):
        await tokens(stream, 2)
    await cluster.sent(a, engine="a")  # behind whatever was sent before
    assert a.submits.empty()
