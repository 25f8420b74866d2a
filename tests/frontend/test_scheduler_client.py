"""The stream to the scheduler: tokens, faults and resubmission."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from deploy.ports import free_port
from frontend.engines import connection, engine
from frontend.engines.pool import Engines
from frontend.logprobs import LogprobRow
from shared.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
    UnavailableError,
)
from shared.pb import scheduler_pb2 as pb
from shared.sampling_params import Grammar, GrammarKind
from tests.frontend.cluster import PROMPT, Cluster, expected, finish, request, submitted, tokens
from tests.frontend.fake_scheduler import FakeScheduler, logprob_row, logprob_rows
from tests.names import name_server
from tests.waiting import until


def pairs(rows: Sequence[LogprobRow]) -> list[list[tuple[int, float]]]:
    return [list(zip(*row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("within_s", "timeouts_s"), [(None, (0, 0)), (60, (50, 60)), (-1, (1e-4, 0.01))]
)
async def test_every_field_is_submitted(
    cluster: Cluster, a: FakeScheduler, within_s: float | None, timeouts_s: tuple[float, float]
) -> None:
    """Zero means that there is no deadline, so a deadline that has passed is not sent as zero."""
    numbers: dict[str, Any] = {
        **{"temperature": 0.5, "seed": 2**63 + 1, "max_tokens": 5, "min_tokens": 2, "top_k": 20},
        **{"top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -1},
        **{"frequency_penalty": 2, "logprobs": 0, "prompt_logprobs": 4},
    }
    stream = cluster.submit(
        deadline=None if within_s is None else time.monotonic() + within_s,
        priority=-3,
        cache_salt="salt",
        eos_token_ids=(7,),
        stop_token_ids=(8, 9),
        stop=("unseen by the scheduler",),
        logit_bias=((3, -100.0), (2**30, 0.5)),
        grammar=Grammar(GrammarKind.EBNF, "root ::= 'a'"),
        **numbers,
    )
    submit = await submitted(a)
    assert (submit.request, submit.request_id) == (stream.number, "an-id")
    assert np.frombuffer(submit.prompt_ids, "<i4").tolist() == PROMPT
    assert submit.generated_ids == b""
    assert (submit.priority, submit.cache_salt) == (-3, "salt")
    assert timeouts_s[0] <= submit.timeout_s <= timeouts_s[1]
    sampling = submit.sampling
    assert sampling == pb.TokenSampling(
        eos_token_ids=[7],
        stop_token_ids=[8, 9],
        bias_ids=np.array([3, 2**30], "<i4").tobytes(),
        bias_values=np.array([-100, 0.5], "<f4").tobytes(),
        grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_EBNF, text="root ::= 'a'"),
        **numbers,
    )
    assert sampling.HasField("logprobs")


async def test_completions_of_a_request_have_consecutive_numbers(
    cluster: Cluster, a: FakeScheduler
) -> None:
    before = cluster.submit()
    streams = cluster.engines.submit(request(n=3))
    after = cluster.submit()
    numbers = [each.number for each in (before, *streams, after)]
    assert numbers == [*range(before.number, before.number + 5)]
    submits = [await submitted(a) for _ in range(3)]
    expected = [(before.number, 0), (streams[0].number, 3), (after.number, 0)]
    assert [(submit.request, submit.n) for submit in submits] == expected
    for stream in streams:
        stream.close()
    assert [await a.aborts.get() for _ in range(3)] == numbers[1:4]


async def test_tokens_and_logprobs_that_were_received_before_are_dropped(
    cluster: Cluster, a: FakeScheduler
) -> None:
    stream = await cluster.sent(a, logprobs=1, prompt_logprobs=0)
    number = stream.number
    prompt = [logprob_row(token, i, 0) for i, token in enumerate(PROMPT)]
    rows = [logprob_row(token, i, 1) for i, token in enumerate((11, 12, 13))]

    a.send((), logprobs=[logprob_rows(number, True, 1, prompt[1:2])])
    await cluster.reconnect(a)
    assert (await submitted(a)).sampling.prompt_logprobs == 0

    changed = [logprob_row(token, 9, 0) for token in PROMPT]
    a.send(
        [(number, 0, 11), (number, 1, 12)],
        logprobs=[
            logprob_rows(number, True, 1, [changed[1], prompt[2]]),
            logprob_rows(number, False, 0, rows[:2]),
        ],
    )
    a.send(
        [(number, 1, 12), (number, 2, 13)],
        logprobs=[logprob_rows(number, False, 1, [logprob_row(12, 9, 1), rows[2]])],
    )
    assert await tokens(stream, 3) == [11, 12, 13]
    assert pairs(stream.logprobs.of(0, 3)) == rows
    assert pairs(stream.logprobs.of(1, 1)) == rows[1:2]
    assert stream.prompt_logprobs.complete
    assert pairs(stream.prompt_logprobs.rows) == [[], *prompt[1:]]


async def test_a_missing_token_is_an_internal_error(cluster: Cluster, a: FakeScheduler) -> None:
    stream = await cluster.sent(a)
    a.send([(stream.number, 1, 12)])
    with pytest.raises(InternalError, match=r"^internal error$"):
        await tokens(stream, 1)
    assert await a.aborts.get() == stream.number


async def test_closing_aborts_an_open_completion(cluster: Cluster, a: FakeScheduler) -> None:
    finished = await cluster.sent(a)
    await finish(a, finished)
    stream = cluster.submit()
    for each in (finished, stream, stream):
        each.close()
    cluster.submit()
    for _ in range(2):
        await submitted(a)
    assert await a.aborts.get() == stream.number
    assert a.aborts.empty()


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
    cluster: Cluster, a: FakeScheduler, finished: pb.Finished, error: ServiceError
) -> None:
    a.rejection = finished
    stream = cluster.submit()
    with pytest.raises(type(error), match=f"^{re.escape(str(error))}") as caught:
        await tokens(stream, 1)
    assert list(caught.value.details()) == list(error.details())


async def test_streams_continue_after_a_lost_connection(cluster: Cluster, a: FakeScheduler) -> None:
    begun = cluster.submit()
    first = await submitted(a)
    a.step()
    await tokens(begun, 1)
    unbegun, closed = cluster.submit(), cluster.submit()
    for _ in range(2):
        await submitted(a)
    a.drop_connection()
    await cluster.until_connected()
    closed.close()
    await cluster.until_connected("a")
    again = [await submitted(a) for _ in range(2)]
    assert [submit.request for submit in again] == [begun.number, unbegun.number]
    assert a.submits.empty()
    assert np.frombuffer(again[0].generated_ids, "<i4").tolist() == [11]
    assert again[0].sampling == first.sampling
    assert again[1].generated_ids == b""
    assert not first.resubmitted
    assert all(submit.resubmitted for submit in again)
    assert await finish(a, begun) == await finish(a, unbegun) == expected()


async def test_a_scheduler_is_found_once_its_name_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_S", 0.5)
    fake = FakeScheduler(f"127.0.0.1:{free_port()}")
    await fake.start()
    ready: asyncio.Queue[bool] = asyncio.Queue()
    async with name_server() as names:
        address = names.address(fake.address.replace("127.0.0.1", "scheduler.test"))
        (tmp_path / "engines").write_text(address)
        engines = Engines([f"file:{tmp_path}/engines"], ready.put)
        with structlog.testing.capture_logs() as lines:
            task = asyncio.create_task(engines.run())
            await until(lambda: len(lines) >= 2, "two tries")
        for line in lines:
            assert line["event"] == "no connection to the scheduler; reconnecting"
            assert line["reason"].startswith("UNAVAILABLE: errors resolving scheduler.test:")
        names.known = True
        assert await ready.get() is True
        assert await tokens(engines.submit(request())[0], 6) == expected()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await fake.stop()


async def test_open_requests_fail_if_the_scheduler_does_not_return_in_time(
    cluster: Cluster, a: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_RESUME_S", 0.01)
    stream = await cluster.sent(a)
    await a.stop()
    with pytest.raises(UnavailableError, match="did not return in time"):
        await tokens(stream, 1)


async def test_not_ready_before_the_engine_info_arrives(cluster: Cluster) -> None:
    a = await cluster.add("a")
    a.ready.clear()
    listed = asyncio.create_task(cluster.list("a"))
    await asyncio.wait_for(a.connected.wait(), 60)
    with pytest.raises(UnavailableError):
        cluster.submit()
    assert cluster.readiness.empty()
    a.ready.set()
    await listed
    assert await cluster.readiness.get() is True
    assert cluster.engine("a").info == a.info


async def test_not_ready_while_the_engine_waits_for_workers(
    cluster: Cluster, a: FakeScheduler
) -> None:
    assert await cluster.readiness.get() is True
    for serving in (False, True):
        a.send_state(serving=serving)
        assert await cluster.readiness.get() is serving
        stream = await cluster.sent(a)
        assert await finish(a, stream) == expected()  # accepted all the same
