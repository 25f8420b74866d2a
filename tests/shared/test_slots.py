"""Slots: who gets the next one."""

from __future__ import annotations

import asyncio

import pytest

from shared.slots import Slots


async def entered(slots: Slots, order: list[str], client: str) -> None:
    await slots.enter(client)
    order.append(client)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_clients_take_turns_however_many_slots_one_asks_for() -> None:
    slots, order = Slots(1), list[str]()
    await slots.enter("first")
    many = [asyncio.create_task(entered(slots, order, "many")) for _ in range(20)]
    await settle()
    one = asyncio.create_task(entered(slots, order, "one"))
    await settle()
    assert not order
    for _ in range(21):
        slots.leave()
        await settle()
    await asyncio.gather(*many, one)
    assert order.index("one") <= 1


@pytest.mark.parametrize("is_late", [False, True], ids=["before its turn", "at its turn"])
async def test_a_cancelled_request_leaves_its_slot_to_others(is_late: bool) -> None:
    slots, order = Slots(1), list[str]()
    await slots.enter("first")
    gone = asyncio.create_task(entered(slots, order, "gone"))
    await settle()
    if is_late:
        slots.leave()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    if not is_late:
        slots.leave()
    await asyncio.wait_for(entered(slots, order, "last"), 60)
    assert order == ["last"]


async def test_a_client_at_its_limit_does_not_keep_others_out() -> None:
    slots, order = Slots(1, lambda client: client != "many"), list[str]()
    waiting = asyncio.create_task(entered(slots, order, "many"))
    await settle()
    await asyncio.wait_for(entered(slots, order, "one"), 60)
    assert order == ["one"]
    waiting.cancel()
