"""An attack of each kind does what it says, and harms no honest stream; `python -m tests.abuse`
plays all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.abuse.attack import Gains, Target
from tests.abuse.attacks import ATTACKS
from tests.abuse.rig import Rig, running_rig
from tests.waiting import wait_for

_FOREVER_S = 300.0  # attacks end as soon as they have done enough

# When an attack is seen to be doing what it says.
ENOUGH: dict[str, Callable[[Gains], bool]] = {
    "rapid-reset": lambda gains: gains.sent["calls reset"] > 1_000,
    "shut-windows": lambda gains: gains.answers["HEADERS"] > 0 == gains.answers["DATA"],
    "huge-repetitions": lambda gains: gains.answers["INVALID_ARGUMENT"] > 1,
    "large-messages": lambda gains: gains.answers["RESOURCE_EXHAUSTED"] > 10,
    "cancel-storm": lambda gains: gains.answers["cancelled"] > 100,
    "wrong-tokens": lambda gains: gains.answers["UNAUTHENTICATED"] > 100,
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with running_rig(anonymous=False) as running:
        yield running


async def play(rig: Rig, name: str, enough: Callable[[Gains], bool]) -> Gains:
    """Plays an attack until it has done enough."""
    address = rig.address(ATTACKS[name].interface)
    target = Target(address, rig.attackers_token, _FOREVER_S, nothing)
    playing = asyncio.create_task(ATTACKS[name].play(target))
    done = asyncio.create_task(
        asyncio.to_thread(wait_for, lambda: enough(target.gains) or playing.done(), name)
    )
    await done
    if playing.done():
        await playing  # why it failed
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert enough(target.gains), target.gains
    return target.gains


async def nothing() -> None:
    pass


@pytest.mark.parametrize("name", ENOUGH)
async def test_an_attack_harms_no_honest_stream(rig: Rig, name: str) -> None:
    pids = rig.stack.pids()
    await asyncio.to_thread(rig.begin)
    print(await play(rig, name, ENOUGH[name]))
    figures = await asyncio.to_thread(rig.end)
    assert figures.tokens
    assert not figures.harm
    assert rig.stack.pids() == pids
