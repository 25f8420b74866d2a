"""Requests that schedulers died with, which frontends report as suspects."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from shared.pb import scheduler_pb2
from tests.fake_worker import FakeWorker, completion
from tests.scheduler_svc.stacks import stack_of

WITHDRAW = scheduler_pb2.Trial(withdraw=True)


def alone(*requests: int) -> scheduler_pb2.Trial:
    return scheduler_pb2.Trial(requests=requests, alone=True)


def together(*requests: int) -> scheduler_pb2.Trial:
    return scheduler_pb2.Trial(requests=requests)


async def test_a_suspect_is_tried_alone(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        owner, other = await stack.frontend(), await stack.frontend()
        await other.submit(1, [1, 2], 100)
        await owner.tell_suspects({7: 2})
        assert await owner.next_trial() == await other.next_trial() == WITHDRAW
        newcomer = asyncio.create_task(stack.frontend())
        await owner.tell_suspects({}, holding=True)
        await other.tell_suspects({}, holding=True)
        assert await owner.next_trial() == alone(7)
        assert await other.next_trial() == alone()
        load = await stack.load()
        assert load.running == load.waiting == 0
        await owner.submit(7, [3, 4], 9, resubmitted=True)
        await owner.read_until_finished(7)
        assert owner.tokens[7] == completion([3, 4], 9)
        assert not newcomer.done()
        await owner.tell_suspects({}, cleared=[7])
        assert await owner.next_trial() == await other.next_trial() == together()
        await newcomer


async def test_a_suspect_that_takes_long_is_not_alone_for_ever(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        await frontend.tell_suspects({7: 0})  # for 2 ** 0 seconds
        assert await frontend.next_trial() == WITHDRAW
        await frontend.tell_suspects({}, holding=True)
        assert await frontend.next_trial() == alone(7)
        assert await frontend.next_trial() == WITHDRAW
        await frontend.tell_suspects({}, cleared=[7], holding=True)
        assert await frontend.next_trial() == together()


async def test_a_frontend_that_does_not_confirm_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.trials._CONFIRMATION_S", 2.0)
    async with stack_of(tmp_path, FakeWorker()) as stack:
        owner, hung = await stack.frontend(), await stack.frontend()
        await owner.tell_suspects({7: 2})
        assert await owner.next_trial() == await hung.next_trial() == WITHDRAW
        await owner.tell_suspects({}, holding=True)
        assert await owner.next_trial() == alone(7)
        assert (await hung.failure()).code() is grpc.StatusCode.ABORTED


async def test_many_suspects_are_tried_in_halves_while_the_rest_goes_on(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        first, second = await stack.frontend(), await stack.frontend()
        await second.tell_suspects({1: 2})
        assert await second.next_trial() == WITHDRAW
        await first.tell_suspects({n: 3 if n < 8 else 2 for n in range(12)}, holding=True)
        await second.tell_suspects({}, cleared=[1], holding=True)
        assert await first.next_trial() == WITHDRAW
        for half in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]):
            while (trial := await first.next_trial()) in (together(), alone()):
                pass
            assert trial == together(*half)
            await second.submit(half[0], [1], 3)
            await second.read_until_finished(half[0])
            for number in half[1:]:
                await first.tell_suspects({}, cleared=[number])
            await first.abort(half[0])
