"""The stream to the scheduler: tokens, faults and resubmission."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from frontend.request import Request, Sampling
from frontend.scheduler_client import SchedulerClient
from frontend.token_stream import FinishReason, TokenStream
from shared.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
    UnavailableError,
)
from shared.pb import scheduler_pb2 as pb
from tests.frontend.fake_scheduler import FakeScheduler

PROMPT = [11, 12, 13]


def request(max_tokens: int = 5, deadline: float | None = None) -> Request:
    sampling = Sampling(
        temperature=0.5,
        seed=2**63 + 1,
        max_tokens=max_tokens,
        eos_token_ids=(7,),
        stop_token_ids=(8, 9),
        stop=("unseen by the scheduler",),
    )
    return Request("an-id", PROMPT, sampling, deadline, priority=-3, cache_salt="salt")


class Connected:
    """A client under test and what it said about being ready."""

    def __init__(self, address: str, resume_timeout_s: float) -> None:
        self.readiness: asyncio.Queue[bool] = asyncio.Queue()
        self.client = SchedulerClient(address, self.readiness.put, resume_timeout_s)
        self._task = asyncio.create_task(self.client.run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def connected(scheduler: FakeScheduler) -> AsyncIterator[Connected]:
    connected = Connected(scheduler.address, resume_timeout_s=30)
    assert await connected.readiness.get() is True
    yield connected
    await connected.close()


@pytest.fixture
def client(connected: Connected) -> SchedulerClient:
    return connected.client


async def rest(stream: TokenStream, seen: int = 0) -> list[int]:
    """Reads until the completion is complete."""
    tokens: list[int] = []
    while stream.finish is None or len(stream.tokens) > seen + len(tokens):
        tokens += await stream.read(seen + len(tokens))
    return tokens


async def test_a_request_is_submitted_whole(
    client: SchedulerClient, scheduler: FakeScheduler
) -> None:
    stream = client.submit(request(deadline=time.monotonic() + 60))
    submit = await scheduler.submits.get()
    assert submit.request == stream.handle
    assert submit.request_id == "an-id"
    assert np.frombuffer(submit.prompt_ids, "<i4").tolist() == PROMPT
    assert submit.generated_ids == b""
    assert (submit.priority, submit.cache_salt) == (-3, "salt")
    assert 0 < submit.timeout_s <= 60
    assert submit.sampling == pb.TokenSampling(
        temperature=0.5,
        seed=2**63 + 1,
        max_tokens=5,
        eos_token_ids=[7],
        stop_token_ids=[8, 9],
    )


async def test_no_deadline_is_sent_as_zero_and_a_passed_one_is_not(
    client: SchedulerClient, scheduler: FakeScheduler
) -> None:
    client.submit(request())
    assert (await scheduler.submits.get()).timeout_s == 0
    client.submit(request(deadline=time.monotonic() - 1))
    assert (await scheduler.submits.get()).timeout_s > 0


async def test_tokens_and_finish_arrive(client: SchedulerClient) -> None:
    streams = [client.submit(request(max_tokens=n)) for n in (5, 1, 3)]
    assert [await rest(s) for s in streams] == [[11, 12, 13, 11, 12], [11], [11, 12, 13]]
    for stream in streams:
        assert stream.finish is FinishReason.LENGTH
        assert stream.start.cached_prompt_tokens == 3
        assert stream.start.queue_s == 0.25


async def test_tokens_that_came_meanwhile_are_read_together(
    client: SchedulerClient, scheduler: FakeScheduler
) -> None:
    scheduler.automatic = False
    stream = client.submit(request(max_tokens=4))
    await scheduler.submits.get()
    scheduler.step()
    assert await stream.read(0) == [11]
    for _ in range(3):
        scheduler.step()
    await rest(stream)
    assert await stream.read(1) == [12, 13, 11]


async def test_a_repeated_token_is_dropped(
    client: SchedulerClient, scheduler: FakeScheduler
) -> None:
    scheduler.automatic = False
    stream = client.submit(request(max_tokens=3))
    await scheduler.submits.get()
    scheduler.step()
    scheduler.step()
    scheduler.send([(stream.handle, 0, 11), (stream.handle, 1, 12)])
    scheduler.step()
    assert await rest(stream) == [11, 12, 13]


async def test_a_missing_token_is_an_internal_error(
    client: SchedulerClient, scheduler: FakeScheduler
) -> None:
    scheduler.automatic = False
    stream = client.submit(request())
    await scheduler.submits.get()
    scheduler.send([(stream.handle, 1, 12)])
    with pytest.raises(InternalError, match=r"^internal error$"):
        await stream.read(0)
    assert await scheduler.aborts.get() == stream.handle


async def test_closing_aborts_what_has_not_ended(
    client: SchedulerClient, scheduler: FakeScheduler
) -> None:
    finished = client.submit(request())
    await rest(finished)
    scheduler.automatic = False
    stream = client.submit(request())
    client.close(finished)
    client.close(stream)
    client.close(stream)
    client.submit(request())
    for _ in range(3):
        await scheduler.submits.get()
    assert await scheduler.aborts.get() == stream.handle
    assert scheduler.aborts.empty()


@pytest.mark.parametrize(
    ("finished", "error"),
    [
        (
            pb.Finished(
                cause=pb.FINISH_CAUSE_QUEUE_FULL, message="32 are waiting", retry_after_s=1.5
            ),
            QueueFullError("32 are waiting", 1.5),
        ),
        (
            pb.Finished(cause=pb.FINISH_CAUSE_INVALID, message="does not fit the cache"),
            InvalidArgumentError("request", "does not fit the cache"),
        ),
        (pb.Finished(cause=pb.FINISH_CAUSE_DEADLINE), DeadlineError("the deadline passed")),
        (
            pb.Finished(cause=pb.FINISH_CAUSE_INTERNAL, message="a secret of the engine"),
            InternalError("internal error"),
        ),
    ],
)
async def test_a_cause_that_is_an_error_is_raised(
    client: SchedulerClient, scheduler: FakeScheduler, finished: pb.Finished, error: ServiceError
) -> None:
    scheduler.refusal = finished
    stream = client.submit(request())
    with pytest.raises(type(error), match=f"^{error}") as caught:
        await stream.read(0)
    assert list(caught.value.details()) == list(error.details())


async def test_streams_go_on_after_a_lost_connection(
    connected: Connected, scheduler: FakeScheduler
) -> None:
    client = connected.client
    scheduler.automatic = False
    begun = client.submit(request(max_tokens=5))
    first = await scheduler.submits.get()
    scheduler.step()
    assert await begun.read(0) == [11]
    unbegun = client.submit(request(max_tokens=2))
    await scheduler.submits.get()

    scheduler.drop_connection()
    assert await connected.readiness.get() is False
    with pytest.raises(UnavailableError):
        client.submit(request())
    with pytest.raises(UnavailableError):
        _ = client.engine_info

    assert await connected.readiness.get() is True
    again = [await scheduler.submits.get() for _ in range(2)]
    assert [submit.request for submit in again] == [begun.handle, unbegun.handle]
    assert np.frombuffer(again[0].generated_ids, "<i4").tolist() == [11]
    assert again[0].sampling == first.sampling
    assert again[1].generated_ids == b""
    assert not first.resubmitted
    assert all(submit.resubmitted for submit in again)
    for _ in range(4):
        scheduler.step()
    assert await rest(begun) == [11, 12, 13, 11, 12]
    assert await rest(unbegun) == [11, 12]


async def test_a_request_closed_while_disconnected_is_not_submitted_again(
    connected: Connected, scheduler: FakeScheduler
) -> None:
    scheduler.automatic = False
    closed, kept = (connected.client.submit(request()) for _ in range(2))
    for _ in range(2):
        await scheduler.submits.get()
    scheduler.drop_connection()
    assert await connected.readiness.get() is False
    connected.client.close(closed)
    assert await connected.readiness.get() is True
    assert (await scheduler.submits.get()).request == kept.handle
    assert scheduler.submits.empty()


async def test_a_scheduler_that_restarts_is_found_again(
    connected: Connected, scheduler: FakeScheduler
) -> None:
    await scheduler.stop()
    assert await connected.readiness.get() is False
    await scheduler.start()
    assert await connected.readiness.get() is True
    assert await rest(connected.client.submit(request(max_tokens=1))) == [11]


async def test_open_requests_end_when_no_connection_comes_in_time(
    scheduler: FakeScheduler,
) -> None:
    connected = Connected(scheduler.address, resume_timeout_s=0.01)
    assert await connected.readiness.get() is True
    scheduler.automatic = False
    stream = connected.client.submit(request())
    await scheduler.submits.get()
    await scheduler.stop()
    with pytest.raises(UnavailableError, match="did not come back"):
        await stream.read(0)
    await connected.close()


async def test_not_ready_before_the_engine_says_what_it_is(scheduler: FakeScheduler) -> None:
    scheduler.ready.clear()
    connected = Connected(scheduler.address, resume_timeout_s=30)
    with pytest.raises(UnavailableError):
        connected.client.submit(request())
    assert connected.readiness.empty()
    scheduler.ready.set()
    assert await connected.readiness.get() is True
    assert connected.client.engine_info == scheduler.info
    await connected.close()
