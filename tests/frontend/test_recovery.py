"""New requests that arrive while an engine recovers wait for it, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from frontend.engines import engine as engine_module
from shared.errors import InvalidArgumentError, QueueFullError, UnavailableError
from shared.pb import scheduler_pb2
from tests.frontend.cluster import Cluster, Two, expected, finish, request, submitted, tokens
from tests.frontend.fake_scheduler import QUEUE_S, FakeScheduler
from tests.waiting import until


async def lose(cluster: Cluster, *schedulers: FakeScheduler) -> None:
    """Ends schedulers, and waits until the frontend knows."""
    for each in schedulers:
        await each.stop()
    left = len(cluster.schedulers) - len(schedulers)
    await until(lambda: len(cluster.connected()) == left, "the loss to be noticed")


@pytest.fixture
async def pass_30_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the time pass in which engines recover that have been lost by then."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    due: list[Callable[[], object]] = []

    def note(delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        if delay_s == 30:
            due.append(partial(callback, *args))
        return call_later(delay_s, callback, *args)

    def pass_all() -> None:
        monkeypatch.setattr(engine_module, "_RECOVERY_S", 0.0)
        assert due
        for callback in due:
            callback()

    monkeypatch.setattr(loop, "call_later", note)
    return pass_all


async def test_new_requests_wait_behind_the_old_ones_in_order(
    cluster: Cluster, a: FakeScheduler
) -> None:
    old = await cluster.begin(a)
    await lose(cluster, a)
    first, second = cluster.engines.submit(request(n=2)), cluster.submit(priority=-1)
    left = cluster.submit()
    left.close()
    assert not cluster.engines.serving
    await a.start()
    again = [await submitted(a) for _ in range(3)]
    assert [each.request for each in again] == [old.number, first[0].number, second.number]
    # Only the old one may enter a full queue, and is not charged again.
    assert [(each.resubmitted, each.n) for each in again] == [(True, 0), (False, 2), (False, 0)]
    for stream in (old, *first, second):
        assert await finish(a, stream) == expected()
    assert a.submits.empty()
    assert cluster.engines.metrics.moved == 0


async def test_without_workers_a_request_waits_at_the_scheduler(
    cluster: Cluster, a: FakeScheduler, pass_30_s: Callable[[], None]
) -> None:
    old = await cluster.sent(a)
    a.send_state(serving=False)
    await cluster.until_serving(0)
    new = cluster.submit()
    assert not (await submitted(a)).resubmitted
    pass_30_s()
    with pytest.raises(UnavailableError, match="no engine is ready"):
        await tokens(new, 1)
    assert await asyncio.wait_for(a.aborts.get(), 60) == new.number
    with pytest.raises(UnavailableError, match="no engine is ready"):
        cluster.submit()
    assert await finish(a, old) == expected()


async def test_a_scheduler_that_returns_without_workers_does_not_prolong_the_wait(
    cluster: Cluster, a: FakeScheduler, pass_30_s: Callable[[], None]
) -> None:
    await lose(cluster, a)
    new = cluster.submit()
    await a.start()
    await submitted(a)
    a.send_state(serving=False)
    await cluster.until_serving(0)
    pass_30_s()
    with pytest.raises(UnavailableError, match="no engine is ready"):
        await tokens(new, 1)


async def test_no_request_waits_for_an_engine_that_left_the_list(
    cluster: Cluster, a: FakeScheduler
) -> None:
    old = await cluster.sent(a)
    await lose(cluster, a)
    await cluster.list()
    await until(lambda: not next(iter(cluster.engines._engines.values())).listed, "it to leave")
    with pytest.raises(UnavailableError, match="no engine is ready"):
        cluster.submit()
    old.close()


async def test_after_too_long_a_wait_new_requests_fail_and_old_ones_wait_on(
    cluster: Cluster, a: FakeScheduler, pass_30_s: Callable[[], None]
) -> None:
    old = await cluster.sent(a)
    await lose(cluster, a)
    new = cluster.submit()
    pass_30_s()
    with pytest.raises(UnavailableError, match="no engine is ready") as raised:
        await tokens(new, 1)
    assert raised.value.retry_after_s
    with pytest.raises(UnavailableError, match="no engine is ready"):
        cluster.submit()
    await a.start()
    assert (await submitted(a)).request == old.number
    assert await finish(a, old) == expected()
    await cluster.until_serving(1)
    await cluster.sent(a)


async def test_a_waiting_request_goes_to_the_first_engine_that_is_ready(
    cluster: Cluster, two: Two
) -> None:
    await lose(cluster, *two)
    streams = cluster.engines.submit(request(n=2))
    back = two[1] if cluster.engine_of(streams[0]) == "a" else two[0]
    await back.start()
    message = await submitted(back)
    assert (message.resubmitted, message.n) == (False, 2)
    for stream in streams:
        assert await finish(back, stream) == expected()
        assert stream.start is not None
        assert stream.start.queue_s > QUEUE_S
    assert cluster.engines.metrics.moved == 0


async def test_a_request_waits_for_the_engine_that_it_names(cluster: Cluster, two: Two) -> None:
    a, b = two
    await lose(cluster, a)
    stream = cluster.submit(engine="a")
    other = cluster.submit()
    assert (await submitted(b)).request == other.number  # at once
    b.send_state(serving=False)
    await cluster.until_serving(0)
    b.send_state(serving=True)
    await cluster.until_serving(1)
    await a.start()
    assert (await submitted(a)).request == stream.number
    assert b.submits.empty()
    assert await finish(a, stream) == expected()


async def test_as_many_requests_wait_as_have_room_in_the_queue(cluster: Cluster) -> None:
    a = await cluster.add("a", max_waiting=3)
    await cluster.list("a")
    begun, old = await cluster.begin(a), await cluster.sent(a)
    await lose(cluster, a)
    waiting = [cluster.engines.submit(request(n=3)) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(QueueFullError, match="3 requests are waiting; the limit is 3") as full:
            cluster.submit()
        assert full.value.retry_after_s
    for stream in waiting[0]:
        stream.close()
    last = cluster.submit()
    await a.start()
    numbers = [(await submitted(a)).request for _ in range(4)]
    assert numbers == [begun.number, old.number, waiting[1][0].number, last.number]


async def test_a_request_waits_for_any_engine_whose_queue_has_room(cluster: Cluster) -> None:
    a, b = await cluster.add("a", max_waiting=1), await cluster.add("b", max_waiting=3)
    await cluster.list("a", "b")
    await lose(cluster, a, b)
    for name in "abb":
        cluster.submit(engine=name)
    assert cluster.engine_of(cluster.submit()) == "b"  # although it has more requests
    with pytest.raises(QueueFullError):
        cluster.submit()


async def test_a_request_is_checked_again_by_an_engine_that_returns_with_other_limits(
    cluster: Cluster, a: FakeScheduler
) -> None:
    await lose(cluster, a)
    stream = cluster.submit()
    a.rejection = scheduler_pb2.Finished(
        cause=scheduler_pb2.FINISH_CAUSE_INVALID, message="prompt: 3 tokens; the limit is 2"
    )
    await a.start()
    with pytest.raises(InvalidArgumentError, match="prompt: 3 tokens; the limit is 2"):
        await tokens(stream, 1)
