"""Attacks do what they say, to a real stack, and change no token of honest streams beside them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.abuse.attack import ATTACKS, Loot, Target
from tests.abuse.attacks import flow_control
from tests.abuse.campaign import play_round
from tests.abuse.report import Report, Result
from tests.abuse.rig import Rig, running_rig
from tests.waiting import wait_for

_FOREVER_S = 300.0  # attacks end as soon as they have done enough

# Whether an attack is seen to be doing what it says.
ENOUGH: dict[str, Callable[[Loot], bool]] = {
    "silent-sockets": lambda loot: loot.sent["connections"] == 1_500,
    "ping-flood": lambda loot: loot.sent["pings"] > 5_000 and loot.answers["PING"] > 0,
    "rapid-reset": lambda loot: loot.sent["calls reset"] > 1_000,
    "continuations": lambda loot: loot.answers["connections closed"] > 0,
    "shut-windows": lambda loot: loot.answers["HEADERS"] > 0,
    "tiny-windows": lambda loot: loot.answers["DATA"] > 100,
    "half-sent": lambda loot: loot.sent["streams"] == 4_000,
    "slow-messages": lambda loot: loot.sent["bytes"] > 1 << 20,
    "unread-watches": lambda loot: loot.sent["streams"] >= 1_000,
    "deep-nesting": lambda loot: loot.answers["INVALID_ARGUMENT"] > 1,
    "metadata": lambda loot: loot.answers["OK"] > 10,
    "first-priority": lambda loot: loot.tokens > 100,
    "cancel-storm": lambda loot: loot.answers["cancelled"] > 200,
    "wrong-tokens": lambda loot: loot.answers["UNAUTHENTICATED"] > 100,
    "cache-watchers": lambda loot: min(loot.answers[a] for a in ("OK", "RESOURCE_EXHAUSTED")) > 10,
    "engine-flood": lambda loot: loot.answers["OK"] > 200,
    "foreign-aborts": lambda loot: loot.answers["OK"] > 500,
    "tokenizer-files": lambda loot: loot.answers["OK"] > 50,
    "http-connections": lambda loot: loot.sent["connections"] == 1_500,
    "http-kept-items": lambda loot: loot.answers["404"] > 8,
    "http-abandoned": lambda loot: loot.answers["200"] > 100,
    "page-polls": lambda loot: loot.answers["200"] > 50 and loot.answers["503"] > 0,
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with running_rig(anonymous=False) as running:
        yield running


@pytest.fixture(scope="module")
def open_rig() -> Iterator[Rig]:
    """A rig that asks for no tokens, and so serves HTTP."""
    with running_rig(anonymous=True) as running:
        yield running


async def play(rig: Rig, name: str, enough: Callable[[Loot], bool]) -> Loot:
    """Plays an attack until it has done enough."""
    address = rig.address(ATTACKS[name].door)
    target = Target(address, rig.attackers_token, _FOREVER_S, nothing)
    playing = asyncio.create_task(ATTACKS[name].play(target))
    done = asyncio.create_task(
        asyncio.to_thread(wait_for, lambda: enough(target.loot) or playing.done(), name)
    )
    await done
    if playing.done():
        await playing  # why it failed
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert enough(target.loot), target.loot
    return target.loot


async def nothing() -> None:
    pass


@pytest.mark.parametrize("name", ENOUGH)
async def test_an_attack_harms_no_honest_stream(request: pytest.FixtureRequest, name: str) -> None:
    fixture = "open_rig" if ATTACKS[name].anonymous else "rig"
    rig: Rig = request.getfixturevalue(fixture)
    await asyncio.to_thread(rig.begin)
    loot = await play(rig, name, ENOUGH[name])
    print(loot)
    figures = await asyncio.to_thread(rig.end)
    assert figures.tokens
    assert not figures.errors
    assert figures.wrong == figures.stuck == 0


def test_a_round_is_measured(rig: Rig, tmp_path: Path) -> None:
    attack = ATTACKS["many-biases"]
    found = play_round(rig, attack, seconds=0.3)
    for window in (found.none, found.attack, found.control):
        assert window.gaps
        assert 0 < window.gap_p50_ms <= window.gap_p99_ms <= window.gap_worst_ms
        assert window.health_ms.keys() == {"frontend", "scheduler"}
    assert found.loot["sent"]["calls"]
    for memory in (found.memory_before_mb, found.memory_after_mb):
        assert min(memory["frontend"], memory["scheduler_svc"], memory["worker_svc"]) > 1
    report = Report(0.3, 1, [Result(attack.name, attack.about, False, False, [found])])
    report.save(tmp_path / "report.json")
    (saved,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert saved["p99_factor"] == pytest.approx(found.attack.gap_p99_ms / found.control.gap_p99_ms)
    Console(file=io.StringIO()).print(report.render(2.0))


async def test_a_shut_window_holds_back_all_data(rig: Rig) -> None:
    loot = await play(rig, "shut-windows", ENOUGH["shut-windows"])
    assert loot.answers["DATA"] == 0


async def test_a_request_for_the_longest_completion_is_valid(rig: Rig) -> None:
    """Attacks that hold data back would hold back nothing if their requests were refused."""
    target = Target(rig.stack.address, rig.attackers_token, _FOREVER_S, nothing)
    async with target.channel() as channel:
        request = flow_control.LONG_COMPLETION
        reading = asyncio.create_task(target.generate(channel, request))
        await asyncio.to_thread(wait_for, lambda: target.loot.tokens or reading.done(), "tokens")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert target.loot.tokens, target.loot
