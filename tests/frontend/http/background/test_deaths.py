from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing

import pytest

from frontend.http.background.store import ResponseStore
from tests.frontend.cluster import submitted
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.background.rig import (
    SIXTH,
    LocalServer,
    Rig,
    backwards,
    begin,
    check_whole,
    continued,
    final,
    finish,
    until_dead,
)


@pytest.mark.parametrize("kind", ["parent", "fork", "stopped fork"])
async def test_another_frontend_continues_after_a_death(
    rig: Rig, b: LocalServer, scheduler: FakeScheduler, kind: str
) -> None:
    a = await rig.forked()
    response = await begin(a, scheduler)
    before = await a.read(response, until_number=SIXTH)
    reader = asyncio.create_task(b.read(response))
    fork = a.fork()
    if kind == "stopped fork":
        # It keeps its response until its parent process, or somebody else, kills it.
        a.send(signal.SIGSTOP, to_fork=True)
        assert await b.read(response, until_number=SIXTH) == before
        assert [*ResponseStore(str(rig.responses)).unfinished()] == []
        a.send(signal.SIGKILL, to_fork=True)
    else:
        a.send(signal.SIGKILL, to_fork=kind == "fork")
    await until_dead(fork)
    assert await continued(scheduler) == 6
    after = await b.read(response, SIXTH)
    whole = before + after
    check_whole(whole)
    assert whole == await reader == await b.read(response)
    assert final(whole) == await b.get(response)
    assert final(whole)["usage"]["output_tokens"] == 10


async def test_a_new_frontend_continues_what_no_process_remembers(
    rig: Rig, scheduler: FakeScheduler
) -> None:
    a = await rig.forked()
    responses = [await begin(a, scheduler, 3) for _ in range(3)]
    fork = a.fork()
    before = [await a.read(each, until_number=4) for each in responses]
    await a.kill()
    await until_dead(fork)
    b = await rig.local()
    for _ in responses:
        await submitted(scheduler)
    scheduler.next_token = backwards
    await finish(scheduler)
    for response, seen in zip(responses, before, strict=True):
        whole = await b.read(response)
        check_whole(whole)
        assert whole[:5] == seen


async def test_a_draining_frontend_hands_its_responses_over_at_once(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    response = await begin(a, scheduler)
    async with aclosing(a.events(response)) as stream:
        before = [await anext(stream) for _ in range(SIXTH + 1)]
        a.frontend.server.stop()
        # The stream keeps the frontend draining, and continues with the tokens of the other one.
        assert await continued(scheduler) == 6
        whole = before + [event async for event in stream]
    check_whole(whole)
    assert whole == await b.read(response)
    await a.serving
