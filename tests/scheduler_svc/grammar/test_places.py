"""Places: who gets the next one."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_svc.grammar.places import Places


async def entered(places: Places, order: list[str], client: str) -> None:
    await places.enter(client)
    order.append(client)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_clients_take_turns_however_many_places_one_asks_for() -> None:
    places, order = Places(1, lambda _: True), list[str]()
    await places.enter("first")
    many = [asyncio.create_task(entered(places, order, "many")) for _ in range(20)]
    await settle()
    one = asyncio.create_task(entered(places, order, "one"))
    await settle()
    assert not order
    for _ in range(21):
        places.leave()
        await settle()
    await asyncio.gather(*many, one)
    assert order.index("one") <= 1


async def test_one_that_gives_up_leaves_its_turn_to_others() -> None:
    places, order = Places(1, lambda _: True), list[str]()
    await places.enter("first")
    gone = asyncio.create_task(entered(places, order, "gone"))
    last = asyncio.create_task(entered(places, order, "last"))
    await settle()
    gone.cancel()
    places.leave()
    await asyncio.wait_for(last, 60)
    assert order == ["last"]


async def test_one_that_gives_up_just_as_its_turn_comes_gives_the_place_back() -> None:
    places, order = Places(1, lambda _: True), list[str]()
    await places.enter("first")
    gone = asyncio.create_task(entered(places, order, "gone"))
    await settle()
    places.leave()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.wait_for(entered(places, order, "last"), 60)


async def test_nobody_enters_before_there_is_room() -> None:
    room = False
    places, order = Places(1, lambda _: room), list[str]()
    waiting = asyncio.create_task(entered(places, order, "one"))
    await settle()
    assert not order
    room = True
    places.look()
    await asyncio.wait_for(waiting, 60)


async def test_one_that_may_not_enter_does_not_keep_others_out() -> None:
    places, order = Places(1, lambda client: client != "many"), list[str]()
    waiting = asyncio.create_task(entered(places, order, "many"))
    await settle()
    await asyncio.wait_for(entered(places, order, "one"), 60)
    assert order == ["one"]
    waiting.cancel()
