"""A new response is answered once an engine has taken it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from frontend.generation import Generation
from frontend.generations import Generations
from frontend.request import GenerationRequest
from shared.errors import InternalError, QueueFullError, ServiceError, UnavailableError
from tests.frontend.cluster import submitted
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.background.rig import (
    LocalServer,
    Rig,
    background,
    check_whole,
    continued,
    finish,
)
from tests.waiting import until

Begin = Callable[[Generations, GenerationRequest, float], Awaitable[Generation]]


class SlowStart:
    """Delays the start of the first generation."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._is_first = True
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    async def begin(
        self, generations: Generations, request: GenerationRequest, received_at: float
    ) -> Generation:
        if self._is_first:
            self._is_first = False
            self.reached.set()
            await self.released.wait()
        return await self._begin(generations, request, received_at)


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStart:
    slow = SlowStart(Generations.begin)

    async def begin(
        generations: Generations, request: GenerationRequest, received_at: float
    ) -> Generation:
        return await slow.begin(generations, request, received_at)

    monkeypatch.setattr(Generations, "begin", begin)
    return slow


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFullError("waiting: 32 requests wait", 1.0, "waiting"), 429),
        (UnavailableError("no engine is ready"), 503),
        (InternalError("internal error"), 500),
    ],
)
async def test_a_response_that_no_engine_takes_is_not_stored(
    a: LocalServer,
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    error: ServiceError,
    status: int,
    stream: bool,
) -> None:
    async def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Generations, "begin", refuse)
    answer = await a.http.post("/v1/responses", json=background(stream=stream))
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(error)
    assert not [*rig.responses.iterdir()]


async def test_a_response_that_starts_while_its_frontend_stops_is_continued(
    slow: SlowStart, a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    creating = asyncio.create_task(a.create())
    await slow.reached.wait()
    a.frontend.server.stop()
    created = await creating
    assert await continued(scheduler) == 0
    check_whole(await b.read(created["id"]))


async def test_a_response_starts_although_its_client_has_left(
    slow: SlowStart, a: LocalServer, b: LocalServer, rig: Rig, scheduler: FakeScheduler
) -> None:
    creating = asyncio.create_task(a.create())
    await slow.reached.wait()
    (path,) = rig.responses.iterdir()
    creating.cancel()
    await asyncio.wait([creating])
    calls = a.frontend.server.calls
    await until(lambda: calls.count == 1, "the call that created the response to end")
    slow.released.set()
    await submitted(scheduler)
    await finish(scheduler)
    events = await b.read(path.name.partition("-")[2])
    check_whole(events)


async def test_a_client_with_one_place_gets_a_response(rig: Rig, scheduler: FakeScheduler) -> None:
    server = await rig.local(max_requests_per_client=1)
    answer = await server.http.post("/v1/responses", json=background())
    assert answer.status_code == 200
