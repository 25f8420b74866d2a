"""Requests that schedulers died with: they are tried one at a time, and a culprit alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from frontend.engines import deaths
from frontend.engines.deaths import MIN_DEATHS_BEFORE_ALONE, MIN_PROGRESS, DeathRecord
from frontend.engines.token_stream import TokenStream
from shared.errors import InternalError
from tests.frontend.cluster import Cluster, expected, finish, request, submitted, tokens
from tests.frontend.fake_scheduler import FakeScheduler


async def restart(scheduler: FakeScheduler) -> None:
    await scheduler.stop()
    await scheduler.start()


async def suspects(cluster: Cluster, count: int) -> tuple[FakeScheduler, list[TokenStream]]:
    """Completions, two of whose schedulers died. The first one is submitted to the third."""
    a = await cluster.add("a")
    await cluster.list("a")
    streams = [cluster.submit() for _ in range(count)]
    for _ in range(2):
        await numbers(a, count)
        await restart(a)
    assert await numbers(a, 1) == [streams[0].number]
    return a, streams


async def numbers(scheduler: FakeScheduler, count: int) -> list[int]:
    """The numbers of the next completions that are submitted."""
    return [(await submitted(scheduler)).request for _ in range(count)]


@pytest.mark.parametrize(
    ("losses", "is_suspect", "must_be_alone"),
    [
        ([0], False, False),
        ([0, 0], True, False),
        ([0, 1, 2], True, True),
        ([0, 0, MIN_PROGRESS], False, False),
        ([0, 0, 1, MIN_PROGRESS], True, True),
    ],
)
def test_deaths_without_progress_make_a_suspect(
    losses: Sequence[int], is_suspect: bool, must_be_alone: bool
) -> None:
    """`losses`: the number of tokens at each death."""
    record = DeathRecord()
    assert not any(record.add(num_tokens, alone=False) for num_tokens in losses)
    assert (record.is_suspect, record.must_be_alone) == (is_suspect, must_be_alone)


@pytest.mark.parametrize(("tokens_alone", "to_blame"), [(0, True), (1, False), (4, False)])
def test_only_a_completion_without_a_token_is_to_blame_for_a_death_alone(
    tokens_alone: int, to_blame: bool
) -> None:
    record = DeathRecord()
    for _ in range(MIN_DEATHS_BEFORE_ALONE):
        record.add(7, alone=False)
    assert record.add(7 + tokens_alone, alone=True) is to_blame


async def test_the_next_suspect_is_submitted_once_the_first_has_made_progress(
    cluster: Cluster,
) -> None:
    a, streams = await suspects(cluster, 3)
    new = cluster.submit()
    assert await numbers(a, 1) == [new.number]  # which is no suspect
    for _ in range(MIN_PROGRESS):
        a.step()
    assert await numbers(a, 1) == [streams[1].number]
    streams[1].close()
    assert await numbers(a, 1) == [streams[2].number]
    for stream in (streams[0], streams[2], new):
        assert await finish(a, stream) == expected()
    assert not a.alone


async def test_the_next_suspect_is_submitted_once_the_first_has_had_its_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_MAX_LOG_SECONDS", -7)
    a, streams = await suspects(cluster, 2)
    assert await numbers(a, 1) == [streams[1].number]
    await restart(a)  # a third death, of which each may be the reason
    assert await numbers(a, 1) == [streams[0].number]
    assert a.alone


async def test_an_orderly_end_of_a_connection_clears_no_suspect(cluster: Cluster) -> None:
    a, streams = await suspects(cluster, 2)
    a.drop_connection()
    assert await numbers(a, 1) == [streams[0].number]
    new = cluster.submit()
    assert await numbers(a, 1) == [new.number]


async def test_after_three_deaths_a_completion_is_alone_at_the_scheduler(cluster: Cluster) -> None:
    a, (stream, other) = await suspects(cluster, 2)
    await restart(a)
    assert await numbers(a, 1) == [stream.number]
    assert a.alone
    await cluster.until_serving(0)
    new = cluster.engines.submit(request(n=2))
    for _ in range(MIN_PROGRESS):
        a.step()
    # The other suspect is tried beside the rest. Only new requests count as new.
    again = [await submitted(a) for _ in range(3)]
    assert [each.request for each in again] == [other.number, stream.number, new[0].number]
    assert [(each.resubmitted, each.n) for each in again] == [(True, 0), (True, 0), (False, 2)]
    assert not a.alone
    await cluster.until_serving(1)
    for each in (stream, other, *new):
        assert await finish(a, each) == expected()


async def test_a_completion_that_kills_a_scheduler_alone_ends(cluster: Cluster) -> None:
    a, (deadly, other) = await suspects(cluster, 2)
    await restart(a)
    assert await numbers(a, 1) == [deadly.number]
    assert a.alone
    await restart(a)
    with pytest.raises(InternalError):
        await tokens(deadly, 1)
    assert await numbers(a, 1) == [other.number]
    assert not a.alone
    assert await finish(a, other) == expected()


async def test_a_suspect_that_leaves_while_it_is_alone_ends_the_connection(
    cluster: Cluster,
) -> None:
    a, (stream, other) = await suspects(cluster, 2)
    await restart(a)
    assert await numbers(a, 1) == [stream.number]
    stream.close()
    assert await numbers(a, 1) == [other.number]
    assert not a.alone
