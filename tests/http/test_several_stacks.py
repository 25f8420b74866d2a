"""One gateway in front of two stacks: a request goes to the one that has its prefix, as the
events of the stacks' caches say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deploy.ports import free_port
from tests.certificates import Authority
from tests.http.stacks import (
    BLOCK,
    Gateway,
    Side,
    frontend,
    gateway,
    lets_in,
    tunnel,
    wait_until_served,
)
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def sides() -> Iterator[list[Side]]:
    with ExitStack() as processes:
        directory = processes.enter_context(TemporaryDirectory(prefix="nano"))  # a short path
        found = []
        for name in ("one", "other"):
            Path(directory, name).mkdir()
            found.append(Side(Path(directory, name), processes))
        for side in found:
            side.wait_serving()
        yield found


@pytest.fixture(scope="module")
def smg(sides: list[Side], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("several") / "gateway"
    engine_addresses = [side.engine_address for side in sides]
    with gateway(directory, engine_addresses) as found:
        subscribed(found, engine_addresses)
        yield found


def subscribed(smg: Gateway, engine_addresses: list[str]) -> None:
    """Waits until the gateway knows what the caches hold."""
    for engine_address in engine_addresses:
        wait_for(lambda d=engine_address: smg.snapshots(d), "a snapshot")  # type: ignore[misc]


def told(smg: Gateway, side: Side, *prompts: str | list[int], through: str = "") -> None:
    """Has one stack complete prompts without the gateway, which then learns of their blocks.
    `through`: where the gateway connects to, if not to the stack's engine_address."""
    engine_address = through or side.engine_address
    before = smg.stored(engine_address)
    num_blocks = sum(map(side.ask, prompts))
    assert num_blocks
    wait_for(lambda: smg.stored(engine_address) - before >= num_blocks, "the events")


def restart(smg: Gateway, side: Side) -> None:
    """Empties the cache of a stack, as the gateway then knows."""
    before = smg.snapshots(side.engine_address)
    side.restart_scheduler()
    wait_for(lambda: smg.snapshots(side.engine_address) > before, "a snapshot")


def assert_goes_to(smg: Gateway, sides: list[Side], side: Side, prompt: str) -> None:
    """Through the gateway, a prompt finds all its blocks at one stack, and no other is asked."""
    num_blocks = len(side.llm.tokenize(prompt)) // BLOCK
    before = [each.counters() for each in sides]
    smg.complete(prompt)
    for each, (admissions, cached) in zip(sides, before, strict=True):
        ours = each is side
        assert each.counters() == (admissions + ours, cached + ours * num_blocks * BLOCK)


def prompts(about: str, count: int = 8) -> list[str]:
    """Texts of two blocks and a bit, of which none begins as another."""
    return [f"{number} {about}: " + "there was a fox who " * 15 for number in range(count)]


def test_a_prefix_is_found_that_the_gateway_never_saw(smg: Gateway, sides: list[Side]) -> None:
    asked = prompts("unseen")
    for number, prompt in enumerate(asked):
        told(smg, sides[number % 2], prompt)
    for number, prompt in enumerate(asked):
        assert_goes_to(smg, sides, sides[number % 2], prompt)


def test_a_prefix_is_followed_at_once_when_it_moves(smg: Gateway, sides: list[Side]) -> None:
    one, other = sides
    asked = prompts("moving", count=4)
    told(smg, one, *asked)
    for prompt in asked * 5:  # although the other has nothing
        assert_goes_to(smg, sides, one, prompt)
    restart(smg, one)
    told(smg, other, *asked)
    for prompt in asked * 5:
        assert_goes_to(smg, sides, other, prompt)
    fillers = [[number] * 5 * BLOCK for number in range(100, 106)]
    told(smg, other, *fillers)  # more than fit: nothing else is left
    told(smg, one, *asked)
    for prompt in asked:
        assert_goes_to(smg, sides, one, prompt)


def test_a_cache_that_is_lost_is_forgotten(smg: Gateway, sides: list[Side]) -> None:
    one, other = sides
    asked = prompts("lost", count=3)
    told(smg, one, *asked)
    restart(smg, one)
    told(smg, other, *asked)
    for prompt in asked:
        assert_goes_to(smg, sides, other, prompt)


def test_a_frontend_of_several_engines_needs_no_events(sides: list[Side], tmp_path: Path) -> None:
    """It sends no events, because it has several caches, and finds prefixes itself."""
    engine_address, address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    engines = ",".join(side.scheduler_address for side in sides)
    with ExitStack() as processes:
        processes.enter_context(
            frontend(tmp_path, address, engine_address, scheduler_addresses=engines)
        )
        wait_until_served(address)
        smg = processes.enter_context(gateway(tmp_path / "gateway", [engine_address]))
        before = [side.counters()[0] for side in sides]
        for prompt in prompts("engines", count=4):
            smg.complete(prompt)
        assert sum(side.counters()[0] for side in sides) == sum(before) + 4
        assert not smg.snapshots(engine_address)


@pytest.mark.skipif(not shutil.which("stunnel"), reason="stunnel is not installed")
def test_tunnels_between_hosts_ask_for_certificates(sides: list[Side], tmp_path: Path) -> None:
    """The commands are those of docs/use/http.md."""
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    with ExitStack() as tunnels:
        ends = []
        for number, side in enumerate(sides):
            directory = tmp_path / str(number)
            directory.mkdir()
            ends.append(tunnels.enter_context(tunnel(directory, authority, side.engine_address)))
        insides = [inside for inside, _ in ends]
        with gateway(tmp_path / "gateway", insides) as smg:
            subscribed(smg, insides)
            asked = prompts("tunnels", count=4)
            for number, prompt in enumerate(asked):
                told(smg, sides[number % 2], prompt, through=insides[number % 2])
            for number, prompt in enumerate(asked):
                assert_goes_to(smg, sides, sides[number % 2], prompt)
        for _, port in ends:
            assert lets_in(port, authority, authority.issue("client", "DNS:client"))
            assert not lets_in(port, authority, stranger.issue("client", "DNS:client"))
            assert not lets_in(port, authority, None)
