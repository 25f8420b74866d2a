"""A frontend's stream, without gRPC and without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scheduler_svc.rpc.servicer import SchedulerServicer
from shared.errors import StreamEndedError
from shared.pb import scheduler_pb2 as pb


class FakeEngine:
    """Has 5 turns' worth of sequences to abort."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def clock(self) -> float:
        return 0.0

    def submit(self, seq: object, n: int) -> None:
        self.events.append("submit")

    def abort_connection(self, connection: int, limit: int) -> bool:
        self.events.append("abort")
        return self.events.count("abort") < 5


class Context:
    async def write(self, message: object) -> None: ...


async def submissions() -> AsyncIterator[pb.FrontendMessage]:
    while True:
        yield pb.FrontendMessage(submit=pb.Submit(request=1, prompt_ids=bytes(4)))
        await asyncio.sleep(0)


async def test_a_frontend_that_is_cut_off_submits_nothing_more() -> None:
    engine, servicer = FakeEngine(), SchedulerServicer()
    untyped: Any = servicer
    untyped.start(engine, pb.EngineInfo())
    call = asyncio.create_task(untyped.Connect(submissions(), Context()))
    while engine.events.count("submit") < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    untyped._connections[0].cut_off("too slow")
    with pytest.raises(StreamEndedError, match="too slow"):
        await call
    aborted = engine.events.index("abort")
    assert engine.events[aborted:] == ["abort"] * 5
