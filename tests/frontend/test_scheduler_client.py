"""The stream to the scheduler: tokens, faults and resubmission."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog

from deploy.ports import free_port
from frontend.engines import connection
from frontend.engines.engine import Engine
from frontend.engines.token_stream import FinishReason, TokenStream
from frontend.logprobs import LogprobRow
from frontend.request import Grammar, GrammarKind, Request, Sampling
from shared.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
    UnavailableError,
)
from shared.pb import scheduler_pb2 as pb
from tests.frontend.cluster import read
from tests.frontend.fake_scheduler import FakeScheduler, logprob_row, logprob_rows
from tests.names import name_server
from tests.waiting import until

PROMPT = [11, 12, 13]


def request(
    max_tokens: int = 5,
    deadline: float | None = None,
    resume: Sequence[int] = (),
    **sampling_fields: Any,
) -> Request:
    sampling = Sampling(
        temperature=0.5,
        seed=2**63 + 1,
        max_tokens=max_tokens,
        eos_token_ids=(7,),
        stop_token_ids=(8, 9),
        stop=("unseen by the scheduler",),
    )
    return Request(
        "an-id",
        PROMPT,
        replace(sampling, **sampling_fields),
        deadline,
        priority=-3,
        cache_salt="salt",
        resume_token_ids=resume,
    )


class Connected:
    """An engine under test, and its reports of being ready or not."""

    def __init__(self, address: str, resume_timeout_s: float) -> None:
        self.readiness: asyncio.Queue[bool] = asyncio.Queue()
        self.client = Engine(address, self._note, resume_timeout_s)
        self._task = asyncio.create_task(self.client.connection.run())

    async def _note(self, _: Engine, ready: bool) -> None:
        self.readiness.put_nowait(ready)

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
def client(connected: Connected) -> Engine:
    return connected.client


def submit(client: Engine, request: Request) -> list[TokenStream]:
    streams = client.streams.open(request)
    client.submit(streams)
    return streams


def submit_one(client: Engine, request: Request) -> TokenStream:
    (stream,) = submit(client, request)
    return stream


def pairs(rows: Sequence[LogprobRow]) -> list[list[tuple[int, float]]]:
    return [list(zip(*row, strict=True)) for row in rows]


async def rest(stream: TokenStream) -> list[int]:
    """The completion's tokens, once it is complete."""
    while stream.finish is None:
        await read(stream, len(stream.tokens))
    return stream.tokens


@pytest.mark.parametrize(
    ("within_s", "timeouts_s"), [(None, (0, 0)), (60, (50, 60)), (-1, (1e-4, 0.01))]
)
async def test_every_field_is_submitted(
    client: Engine,
    scheduler: FakeScheduler,
    within_s: float | None,
    timeouts_s: tuple[float, float],
) -> None:
    """Zero means that there is no deadline, so a deadline that has passed is not sent as zero."""
    stream = submit_one(
        client,
        request(
            deadline=None if within_s is None else time.monotonic() + within_s,
            min_tokens=2,
            top_k=20,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias=((3, -100.0), (2**30, 0.5)),
            logprobs=0,
            prompt_logprobs=4,
            grammar=Grammar(GrammarKind.EBNF, "root ::= 'a'"),
        ),
    )
    submit = await scheduler.submits.get()
    assert (submit.request, submit.request_id) == (stream.number, "an-id")
    assert np.frombuffer(submit.prompt_ids, "<i4").tolist() == PROMPT
    assert submit.generated_ids == b""
    assert (submit.priority, submit.cache_salt) == (-3, "salt")
    assert timeouts_s[0] <= submit.timeout_s <= timeouts_s[1]
    sampling = submit.sampling
    assert sampling == pb.TokenSampling(
        temperature=0.5,
        seed=2**63 + 1,
        max_tokens=5,
        eos_token_ids=[7],
        stop_token_ids=[8, 9],
        min_tokens=2,
        top_k=20,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        bias_ids=np.array([3, 2**30], "<i4").tobytes(),
        bias_values=np.array([-100, 0.5], "<f4").tobytes(),
        logprobs=0,
        prompt_logprobs=4,
        grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_EBNF, text="root ::= 'a'"),
    )
    assert sampling.HasField("logprobs")


async def test_completions_of_a_request_have_consecutive_numbers(
    client: Engine, scheduler: FakeScheduler
) -> None:
    scheduler.automatic = False
    before = submit_one(client, request())
    streams = submit(client, request(n=3))
    after = submit_one(client, request())
    first = before.number + 1
    assert [stream.number for stream in streams] == [first, first + 1, first + 2]
    assert after.number == first + 3
    submits = [await scheduler.submits.get() for _ in range(3)]
    assert [(submit.request, submit.n) for submit in submits] == [
        (before.number, 0),
        (first, 3),
        (after.number, 0),
    ]
    for stream in streams:
        client.close(stream)
    assert [await scheduler.aborts.get() for _ in range(3)] == [first, first + 1, first + 2]


async def test_tokens_and_logprobs_that_were_received_before_are_dropped(
    connected: Connected, scheduler: FakeScheduler
) -> None:
    scheduler.automatic = False
    stream = submit_one(connected.client, request(logprobs=1, prompt_logprobs=0))
    await scheduler.submits.get()
    number = stream.number
    prompt = [logprob_row(token, i, 0) for i, token in enumerate(PROMPT)]
    rows = [logprob_row(token, i, 1) for i, token in enumerate((11, 12, 13))]

    scheduler.send((), logprobs=[logprob_rows(number, True, 1, prompt[1:2])])
    scheduler.drop_connection()
    assert await connected.readiness.get() is False
    assert await connected.readiness.get() is True
    assert (await scheduler.submits.get()).sampling.prompt_logprobs == 0

    changed = [logprob_row(token, 9, 0) for token in PROMPT]
    scheduler.send(
        [(number, 0, 11), (number, 1, 12)],
        logprobs=[
            logprob_rows(number, True, 1, [changed[1], prompt[2]]),
            logprob_rows(number, False, 0, rows[:2]),
        ],
    )
    scheduler.send(
        [(number, 1, 12), (number, 2, 13)],
        logprobs=[logprob_rows(number, False, 1, [logprob_row(12, 9, 1), rows[2]])],
    )
    while len(stream.tokens) < 3:
        await read(stream, len(stream.tokens))
    assert stream.tokens == [11, 12, 13]
    assert pairs(stream.logprobs.of(0, 3)) == rows
    assert pairs(stream.logprobs.of(1, 1)) == rows[1:2]
    assert stream.prompt_logprobs.complete
    assert pairs(stream.prompt_logprobs.rows) == [[], *prompt[1:]]


async def test_a_missing_token_is_an_internal_error(
    client: Engine, scheduler: FakeScheduler
) -> None:
    scheduler.automatic = False
    stream = submit_one(client, request())
    await scheduler.submits.get()
    scheduler.send([(stream.number, 1, 12)])
    with pytest.raises(InternalError, match=r"^internal error$"):
        await read(stream, 0)
    assert await scheduler.aborts.get() == stream.number


async def test_closing_aborts_an_open_completion(client: Engine, scheduler: FakeScheduler) -> None:
    finished = submit_one(client, request())
    await rest(finished)
    scheduler.automatic = False
    stream = submit_one(client, request())
    client.close(finished)
    client.close(stream)
    client.close(stream)
    submit(client, request())
    for _ in range(3):
        await scheduler.submits.get()
    assert await scheduler.aborts.get() == stream.number
    assert scheduler.aborts.empty()


@pytest.mark.parametrize(
    ("finished", "error"),
    [
        (
            pb.Finished(cause=pb.FINISH_CAUSE_QUEUE_FULL, message="full", retry_after_s=1.5),
            QueueFullError("full", 1.5),
        ),
        (
            pb.Finished(cause=pb.FINISH_CAUSE_INVALID, message="does not fit the cache"),
            InvalidArgumentError("request", "does not fit the cache"),
        ),
        (
            pb.Finished(cause=pb.FINISH_CAUSE_INVALID, message="no: never", field="text[3]"),
            InvalidArgumentError("text[3]", "no: never"),
        ),
        (pb.Finished(cause=pb.FINISH_CAUSE_DEADLINE), DeadlineError("the deadline passed")),
        (
            pb.Finished(cause=pb.FINISH_CAUSE_INTERNAL, message="a secret of the engine"),
            InternalError("internal error"),
        ),
    ],
)
async def test_an_error_of_the_scheduler_is_raised(
    client: Engine, scheduler: FakeScheduler, finished: pb.Finished, error: ServiceError
) -> None:
    scheduler.rejection = finished
    stream = submit_one(client, request())
    with pytest.raises(type(error), match=f"^{re.escape(str(error))}") as caught:
        await read(stream, 0)
    assert list(caught.value.details()) == list(error.details())


async def test_streams_continue_after_a_lost_connection(
    connected: Connected, scheduler: FakeScheduler
) -> None:
    client = connected.client
    scheduler.automatic = False
    begun = submit_one(client, request(max_tokens=5))
    first = await scheduler.submits.get()
    scheduler.step()
    assert await read(begun, 0) == [11]
    unbegun, closed = submit_one(client, request(max_tokens=2)), submit_one(client, request())
    for _ in range(2):
        await scheduler.submits.get()

    scheduler.drop_connection()
    assert await connected.readiness.get() is False
    client.close(closed)
    with pytest.raises(UnavailableError):
        _ = client.engine_info

    assert await connected.readiness.get() is True
    again = [await scheduler.submits.get() for _ in range(2)]
    assert [submit.request for submit in again] == [begun.number, unbegun.number]
    assert scheduler.submits.empty()
    assert np.frombuffer(again[0].generated_ids, "<i4").tolist() == [11]
    assert again[0].sampling == first.sampling
    assert again[1].generated_ids == b""
    assert not first.resubmitted
    assert all(submit.resubmitted for submit in again)
    for _ in range(4):
        scheduler.step()
    assert await rest(begun) == [11, 12, 13, 11, 12]
    assert await rest(unbegun) == [11, 12]
    assert begun.finish is FinishReason.LENGTH


async def test_a_scheduler_is_found_once_its_name_resolves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_S", 0.5)
    fake = FakeScheduler(f"127.0.0.1:{free_port()}")
    await fake.start()
    async with name_server() as names:
        address = names.address(fake.address.replace("127.0.0.1", "scheduler.test"))
        with structlog.testing.capture_logs() as lines:
            connected = Connected(address, resume_timeout_s=30)
            await until(lambda: len(lines) >= 2, "two tries")
        for line in lines:
            assert line["event"] == "no connection to the scheduler; reconnecting"
            assert line["reason"].startswith("UNAVAILABLE: errors resolving scheduler.test:")
        names.known = True
        assert await connected.readiness.get() is True
        assert await rest(submit_one(connected.client, request(max_tokens=2))) == [11, 12]
        await connected.close()
    await fake.stop()


async def test_open_requests_fail_if_the_scheduler_does_not_return_in_time(
    scheduler: FakeScheduler,
) -> None:
    connected = Connected(scheduler.address, resume_timeout_s=0.01)
    assert await connected.readiness.get() is True
    scheduler.automatic = False
    stream = submit_one(connected.client, request())
    await scheduler.submits.get()
    await scheduler.stop()
    with pytest.raises(UnavailableError, match="did not return in time"):
        await read(stream, 0)
    await connected.close()


async def test_not_ready_before_the_engine_info_arrives(scheduler: FakeScheduler) -> None:
    scheduler.ready.clear()
    connected = Connected(scheduler.address, resume_timeout_s=30)
    with pytest.raises(UnavailableError):
        submit(connected.client, request())
    assert connected.readiness.empty()
    scheduler.ready.set()
    assert await connected.readiness.get() is True
    assert connected.client.engine_info == scheduler.info
    await connected.close()


async def test_not_ready_while_the_engine_waits_for_workers(
    connected: Connected, scheduler: FakeScheduler
) -> None:
    for serving in (False, True):
        scheduler.send_state(serving=serving)
        assert await connected.readiness.get() is serving
        assert await rest(submit_one(connected.client, request()))  # accepted all the same
