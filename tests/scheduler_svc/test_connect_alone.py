"""A frontend that is connected alone, to try a request that may kill the scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.fake_worker import FakeWorker
from tests.scheduler_svc.stacks import stack_of


async def test_a_frontend_that_is_alone_has_the_engine_for_itself(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        other = await stack.frontend()
        await other.submit(1, [1, 2], 100)
        await stack.until(lambda load: load.running == 1)
        alone = await stack.frontend(alone=True)
        load = await stack.load()
        assert (load.running, load.waiting, load.frontends) == (0, 0, 1)
        assert (await other.failure()).code() is grpc.StatusCode.ABORTED
        newcomer = asyncio.create_task(stack.frontend())
        await alone.submit(7, [3, 4], 9, resubmitted=True)
        await alone.expect(7, [3, 4], 9)
        assert not newcomer.done()
        await alone.half_close()
        await (await newcomer).submit(1, [1, 2], 3)
        await newcomer.result().read_until_finished(1)


async def test_two_frontends_are_alone_one_after_the_other(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        first = await stack.frontend(alone=True)
        second = asyncio.create_task(stack.frontend(alone=True))
        await first.submit(1, [1], 3)
        await first.read_until_finished(1)
        assert not second.done()
        first.close()
        await second


async def test_no_frontend_is_alone_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.servicer._MAX_ALONE_S", 0.0)
    async with stack_of(tmp_path, FakeWorker()) as stack:
        alone = await stack.frontend(alone=True)
        assert (await alone.failure()).code() is grpc.StatusCode.ABORTED
        await stack.frontend()
