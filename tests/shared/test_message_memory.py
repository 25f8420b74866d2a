"""`MessageMemory`: its bounds, the order in which callers wait, and that no byte is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.errors import QueueFullError
from shared.rpc import message_memory
from shared.rpc.callers import Caller
from shared.rpc.message_memory import Hold, MessageMemory

PLACE, TOTAL = 100, 400
ALICE, BOB = Caller("alice", 200), Caller("bob", 200)


class CountingCaller(Caller):
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountingCaller.comparisons += 1
        return super().__eq__(other)

    __hash__ = Caller.__hash__


class Sender:
    """Sends one message, when told to."""

    def __init__(self, memory: MessageMemory, caller: Caller) -> None:
        self.started = False
        self._sent: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(memory.receive(caller, self._read))

    async def _read(self) -> bytes:
        self.started = True
        return await self._sent

    async def send(self, size: int) -> Hold:
        self._sent.set_result(bytes(size))
        data, hold = await self.task
        assert len(data) == size
        return hold


async def turns() -> None:
    """Runs the event loop until only timers and senders can cause more."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_message_takes_the_largest_place_until_its_size_is_known() -> None:
    memory = MessageMemory(PLACE, TOTAL)
    sender = Sender(memory, ALICE)
    await turns()
    assert memory.used == PLACE
    hold = await sender.send(7)
    assert memory.used == 7
    hold.release()
    hold.release()
    assert memory.used == 0


async def test_callers_take_turns_and_none_takes_more_than_its_share() -> None:
    memory = MessageMemory(PLACE, TOTAL)
    alices = [Sender(memory, ALICE) for _ in range(50)]
    bob, dave = Sender(memory, BOB), Sender(memory, Caller("dave", TOTAL))
    carol = Sender(memory, Caller("carol", TOTAL))
    await turns()
    assert [each.started for each in alices].count(True) == 2  # its share
    assert bob.started
    assert dave.started
    assert not carol.started
    assert memory.used == TOTAL
    (await alices[0].send(0)).release()
    await turns()
    assert carol.started  # Alice's other messages came first, but Carol holds less
    assert memory.used == TOTAL
    for each in (*alices, bob, carol, dave):
        each.task.cancel()
    await turns()
    assert memory.used == 0


async def test_callers_with_places_leave_one_for_others() -> None:
    memory = MessageMemory(PLACE, 4 * TOTAL)
    floods = [
        [Sender(memory, Caller(name, 4 * TOTAL)) for _ in range(50)] for name in ("one", "two")
    ]
    await turns()
    assert [[each.started for each in flood].count(True) for flood in floods] == [8, 4]
    honest = [Sender(memory, ALICE) for _ in range(3)]
    await turns()
    assert [each.started for each in honest] == [True, True, False]
    for number, each in enumerate(honest):
        hold = await each.send(PLACE)
        hold.release()
        await turns()
        assert all(other.started for other in honest[: number + 2]), "a flood went first"
    for sender in (*floods[0], *floods[1]):
        sender.task.cancel()
    await turns()
    assert memory.used == 0


async def test_a_share_below_a_place_is_enough_for_one_message() -> None:
    memory = MessageMemory(PLACE, TOTAL)
    senders = [Sender(memory, Caller("small", 10)) for _ in range(3)]
    for number, each in enumerate(senders, start=1):
        await turns()
        assert [s.started for s in senders].count(True) == number
        await each.send(4)  # and it stays
    last = Sender(memory, Caller("small", 10))
    await turns()
    assert not last.started
    last.task.cancel()


async def test_slow_messages_give_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_memory, "_PATIENCE_S", 0.01)
    memory = MessageMemory(PLACE, TOTAL)
    slow = [Sender(memory, Caller(name, TOTAL)) for name in ("slow", "slow", "two", "three")]
    await turns()
    assert memory.used == TOTAL
    honest = Sender(memory, ALICE)
    async with asyncio.timeout(60):
        with pytest.raises(QueueFullError, match="took too long to arrive"):
            await slow[0].task  # the oldest
        hold = await honest.send(5)
    assert [each.task.done() for each in slow] == [True, False, False, False]
    hold.release()
    for each in slow:
        each.task.cancel()
    await turns()
    assert memory.used == 0


async def test_slow_messages_may_take_their_time_if_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_memory, "_PATIENCE_S", 0.0)
    memory = MessageMemory(PLACE, TOTAL)
    senders = [Sender(memory, ALICE) for _ in range(2)]
    await turns()
    for each in senders:
        (await each.send(1)).release()
    assert memory.used == 0


async def test_a_message_without_a_place_in_time_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_memory, "_MAX_WAIT_S", 0.01)
    memory = MessageMemory(PLACE, TOTAL)
    holds = [await Sender(memory, ALICE).send(PLACE) for _ in range(2)]
    with pytest.raises(QueueFullError, match="200 bytes of messages are being read or held"):
        await Sender(memory, ALICE).task
    for hold in holds:
        hold.release()
    assert memory.used == 0
    await Sender(memory, ALICE).send(1)


async def test_a_waiting_message_is_removed_without_a_search() -> None:
    memory = MessageMemory(PLACE, TOTAL)
    senders = [Sender(memory, CountingCaller("alice", 200)) for _ in range(3_000)]
    await turns()
    random.Random(1).shuffle(senders)
    CountingCaller.comparisons = 0
    for each in senders:
        each.task.cancel()
    await turns()
    assert memory.used == 0
    assert not memory._waiting
    assert CountingCaller.comparisons < 10 * len(senders)


async def test_nothing_is_lost_however_calls_end(seed: int) -> None:
    rng = random.Random(seed)
    memory = MessageMemory(PLACE, TOTAL)
    callers = [Caller(str(i), rng.choice((10, 150, 300, TOTAL))) for i in range(5)]
    senders: list[Sender] = []
    holds: list[Hold] = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.4:
            senders.append(Sender(memory, rng.choice(callers)))
        elif senders and action < 0.6:
            senders.pop(rng.randrange(len(senders))).task.cancel()
        elif senders and action < 0.8:
            ready = [each for each in senders if each.started and not each.task.done()]
            if ready:
                chosen = rng.choice(ready)
                senders.remove(chosen)
                holds.append(await chosen.send(rng.randint(0, PLACE)))
        elif holds:
            holds.pop(rng.randrange(len(holds))).release()
        if rng.random() < 0.7:
            await asyncio.sleep(0)
        assert 0 <= memory.used <= TOTAL
    for each in senders:
        each.task.cancel()
    for hold in holds:
        hold.release()
    await turns()
    assert memory.used == 0
    assert not memory._waiting
    assert not memory._reading
    assert not memory._used_by
    assert not memory._places


async def test_a_message_that_does_not_arrive_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even while nobody waits for its place."""
    monkeypatch.setattr(message_memory, "_MAX_READ_S", 0.01)
    memory = MessageMemory(PLACE, TOTAL)
    with pytest.raises(QueueFullError, match="took too long to arrive"):
        await Sender(memory, ALICE).task
    assert memory.used == 0
