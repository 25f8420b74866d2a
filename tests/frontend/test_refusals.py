"""Refusals, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from frontend.callers import refusals
from frontend.callers.refusals import Refusals
from tests.simulation import virtual_time


def seconds_of(count: int, caller: str = "a") -> list[float]:
    """When each of so many refusals at once is due."""

    async def measure() -> list[float]:
        paced, loop = Refusals(), asyncio.get_running_loop()
        began_at = loop.time()

        async def one() -> float:
            await paced.wait(caller)
            return loop.time() - began_at

        return await asyncio.gather(*(one() for _ in range(count)))

    return sorted(virtual_time.run(measure()))


def test_a_burst_is_answered_at_once() -> None:
    assert seconds_of(50) == [0.0] * 50


def test_a_flood_is_answered_fifty_a_second() -> None:
    seconds = seconds_of(150)
    assert seconds[49] == 0.0
    assert seconds[-1] == pytest.approx(99 / 50, abs=0.05)


def test_no_more_wait_than_a_caller_may_have_waiting() -> None:
    seconds = seconds_of(1000)
    assert 120 <= sum(each > 0 for each in seconds) <= 128
    assert max(seconds) < 3


def test_a_caller_that_goes_away_waits_no_longer() -> None:
    async def leave() -> None:
        paced = Refusals()
        waiting = [asyncio.create_task(paced.wait("a")) for _ in range(200)]
        await asyncio.sleep(0.001)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not paced._waiting
        await asyncio.sleep(10)
        before = asyncio.get_running_loop().time()
        await paced.wait("a")
        assert asyncio.get_running_loop().time() == before

    virtual_time.run(leave())


def test_one_caller_does_not_wait_for_anothers_refusals() -> None:
    async def both() -> None:
        paced = Refusals()
        flood = [asyncio.create_task(paced.wait("a")) for _ in range(200)]
        await asyncio.sleep(0)
        before = asyncio.get_running_loop().time()
        await paced.wait("b")
        assert asyncio.get_running_loop().time() == before
        await asyncio.gather(*flood)

    virtual_time.run(both())


def test_callers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_MAX_CALLERS", 4)

    async def many() -> None:
        paced = Refusals()
        for number in range(100):
            await paced.wait(str(number))
            await asyncio.sleep(0.001)
        assert len(paced._next) <= 4

    virtual_time.run(many())
