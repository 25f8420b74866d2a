"""Promise 5: the network between hosts is cut for a while, and streams go on when it heals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.health import SERVING, check_health
from deploy.stack import MODULES, SERVICES
from tests.faults.network import Hosts, missing
from tests.faults.streams import REQUESTS, assert_undamaged, open_streams, undisturbed
from tests.faults.transcript import Transcript
from tests.stack import DEMO_MODEL
from tests.waiting import wait_for

_PORT = 50051


@dataclass(frozen=True)
class Network:
    """A stack with a host for each service, and its answers when undisturbed."""

    hosts: Hosts
    logs: Path
    address: str
    expected: dict[str, Transcript]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if reason := missing():
        pytest.skip(reason)
    logs = tmp_path_factory.mktemp("logs")
    hosts = Hosts(["frontend", "scheduler", "worker"])
    try:
        address = f"{hosts.public_address}:{_PORT}"
        for name in SERVICES:
            _start(name, hosts, logs)
        try:
            wait_for(lambda: check_health(address) == SERVING, "the frontend to be SERVING")
            yield Network(hosts, logs, address, undisturbed(address, REQUESTS))
        finally:
            for log in sorted(logs.iterdir()):
                print(f"--- {log.name}", log.read_text(errors="replace")[-4000:], sep="\n")
    finally:
        hosts.close()


def _start(name: str, hosts: Hosts, logs: Path) -> None:
    environment = {
        "NANO_MODEL": str(DEMO_MODEL),
        "NANO_DTYPE": "float32",
        "NANO_HOST": hosts.public_address,
        "NANO_PORT": str(_PORT),
        "NANO_SCHEDULER_ADDRESS": f"{hosts.address('scheduler')}:50052",
        "NANO_WORKER_ADDRESSES": f"{hosts.address('worker')}:50053",
        "NANO_KV_BLOCKS": "1024",
        "NANO_BLOCK_SIZE": "16",
        "NANO_ALLOW_PLAINTEXT": "1",
        "NANO_ALLOW_PUBLIC_PLAINTEXT": "1",
    }
    with (logs / name).open("ab") as log:
        hosts.start(name, MODULES[name], environment, log)


@pytest.mark.parametrize(
    ("one", "other", "seconds"),
    [
        ("scheduler", "worker", 1),
        ("scheduler", "worker", 20),
        ("frontend", "scheduler", 4),
        ("frontend", "scheduler", 20),
    ],
)
def test_a_cut_both_ways(network: Network, one: str, other: str, seconds: float) -> None:
    _cut_and_heal(network, [(one, other), (other, one)], seconds)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("scheduler", "worker"),
        ("worker", "scheduler"),
        ("frontend", "scheduler"),
        ("scheduler", "frontend"),
    ],
    ids=lambda name: name,
)
def test_a_cut_one_way(network: Network, source: str, target: str) -> None:
    _cut_and_heal(network, [(source, target)], 6)


def test_a_scheduler_that_vanishes_with_its_host(network: Network) -> None:
    """Its kernel never tells the frontend that the connection has ended."""
    hosts = network.hosts
    with open_streams(network.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, "greedy", "seeded", "penalties", "several", "schema")
        hosts.cut("scheduler", "frontend")
        hosts.cut("frontend", "scheduler")
        hosts.kill("scheduler")
        time.sleep(10)  # until the host has forgotten its connections
        hosts.heal()
        _start("scheduler", hosts, network.logs)
        assert_undamaged(streams.wait_ended(), network.expected)


def _cut_and_heal(network: Network, ways: list[tuple[str, str]], seconds: float) -> None:
    with open_streams(network.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, "greedy", "seeded", "penalties", "several", "schema")
        for source, target in ways:
            network.hosts.cut(source, target)
        time.sleep(seconds)  # without a network
        open_then = set(streams.open)
        network.hosts.heal()
        assert_undamaged(streams.wait_ended(), network.expected)
    assert {"greedy", "seeded", "filters", "several"} <= open_then
