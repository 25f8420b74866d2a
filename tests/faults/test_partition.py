"""Promise 5: the network between hosts is cut for a while, and streams continue when it heals."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.health import SERVING, check_health
from deploy.stack import ENGINE_SERVICES, MODULES
from tests.faults.network import Hosts, missing
from tests.faults.streams import REQUESTS, assert_undamaged, open_streams, undisturbed
from tests.faults.transcript import Transcript
from tests.stack import DEMO_MODEL, Hold
from tests.waiting import wait_for

_PORT = 50051

_REQUESTS = deepcopy(REQUESTS)
for _name in ("greedy", "seeded", "filters", "stop string"):
    _REQUESTS[_name].sampling.max_tokens = 1000
_STEPS = 400  # at most, before each of two cuts: so some streams are open, however late those come


@dataclass(frozen=True)
class Network:
    """A stack with a host for each service, and its answers when undisturbed."""

    hosts: Hosts
    hold: Hold
    logs: Path
    address: str
    expected: dict[str, Transcript]


@pytest.fixture(scope="module")
def hosts_of_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if reason := missing():
        pytest.skip(reason)
    logs = tmp_path_factory.mktemp("logs")
    hosts, hold = Hosts(["frontend", "scheduler", "worker"]), Hold()
    try:
        address = f"{hosts.public_address}:{_PORT}"
        for name in ENGINE_SERVICES:
            _start(name, hosts, hold, logs)
        try:
            wait_for(lambda: check_health(address) == SERVING, "the frontend to be SERVING")
            yield Network(hosts, hold, logs, address, undisturbed(address, _REQUESTS))
        finally:
            for log in sorted(logs.iterdir()):
                print(f"--- {log.name}", log.read_text(errors="replace")[-4000:], sep="\n")
    finally:
        hosts.close()


@pytest.fixture
def network(hosts_of_services: Network) -> Iterator[Network]:
    """The module's network, healed before and after each test."""
    wait_for(lambda: check_health(hosts_of_services.address) == SERVING, "it to be SERVING")
    yield hosts_of_services
    hosts_of_services.hosts.heal()


def _start(name: str, hosts: Hosts, hold: Hold, logs: Path) -> None:
    environment = {
        "NANO_MODEL": str(DEMO_MODEL),
        "NANO_DTYPE": "float32",
        "NANO_HOST": hosts.public_address,
        "NANO_PORT": str(_PORT),
        "NANO_SCHEDULER_ADDRESS": f"{hosts.address('scheduler')}:50052",
        "NANO_WORKER_ADDRESSES": f"{hosts.address('worker')}:50053",
        "NANO_KV_BLOCKS": "1024",
        "NANO_BLOCK_SIZE": "16",
        "NANO_SPECULATION": "none",
        "NANO_ALLOW_PLAINTEXT": "1",
        "NANO_ALLOW_PUBLIC_PLAINTEXT": "1",
        "KEEPALIVE_S": "2",
        **hold.environment,
    }
    with (logs / name).open("ab") as log:
        hosts.start(name, MODULES[name], environment, log)


@pytest.mark.parametrize(
    "ways",
    [
        [("scheduler", "worker"), ("worker", "scheduler")],
        [("scheduler", "worker")],
        [("worker", "scheduler")],
        [("frontend", "scheduler")],
        [("scheduler", "frontend")],
    ],
    ids=lambda ways: " and ".join(map("-".join, ways)),
)
def test_a_short_cut_and_a_long_one(network: Network, ways: list[tuple[str, str]]) -> None:
    """Connections outlive the first, not the second."""
    hosts, (one, other) = network.hosts, ways[0]

    def segments_resent() -> int:
        return hosts.segments_resent(one) + hosts.segments_resent(other)

    def packets_are_lost() -> bool:
        return segments_resent() > before

    def connections_have_ended() -> bool:
        return not (hosts.connected(one, other) or hosts.connected(other, one))

    with network.hold, open_streams(network.address, _REQUESTS) as streams:
        for reached in (packets_are_lost, connections_have_ended):
            received = streams.num_tokens
            network.hold.after(_STEPS)
            streams.wait_for_tokens(received + 50)
            with hosts.stopped("worker"):
                before = segments_resent()
                for source, target in ways:
                    hosts.cut(source, target)
            wait_for(reached, reached.__name__)
            hosts.heal()
        network.hold.release()
        assert_undamaged(streams.wait_ended(), network.expected)


def test_a_scheduler_that_vanishes_with_its_host(network: Network) -> None:
    """Its kernel never tells the frontend that the connection has ended."""
    hosts = network.hosts
    with network.hold.after(_STEPS), open_streams(network.address, _REQUESTS) as streams:
        streams.wait_for_tokens(50)
        with hosts.stopped("worker"):
            hosts.cut("scheduler", "frontend")
            hosts.cut("frontend", "scheduler")
        hosts.kill("scheduler")
        wait_for(
            lambda: not hosts.connected("frontend", "scheduler"),
            "the frontend to give the connection up",
        )
        hosts.heal()
        network.hold.release()
        _start("scheduler", hosts, network.hold, network.logs)
        assert_undamaged(streams.wait_ended(), network.expected)
