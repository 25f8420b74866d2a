"""The parts of RUNTIME=ray that need no Ray; `tests/faults/test_ray.py` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.plan import StackSettings
from deploy.ray.layout import Endpoint, RayStack
from deploy.stack import Process

from .conftest import Launcher

FILE = Path("/state/schedulers")


def stack(tp: int = 2, host: str = "127.0.0.1", pp: int = 1) -> RayStack:
    settings = StackSettings(tp=tp, pp=pp, host=host, port=6000, allow_public_plaintext=True)
    return RayStack(settings, {"NANO_TP": str(tp)}, {"CPU": 0.5})


def test_an_engine_is_its_ranks_and_their_scheduler() -> None:
    found = stack().engine(1)
    assert [each.name for each in found] == ["worker-2", "worker-3", "scheduler-1"]
    assert [stack().resources(each)["CPU"] for each in found] == [0.5, 0.5, 0.25]
    assert stack().arguments(found[1]) == ["--rank", "1"]


def test_ranks_of_stages_are_numbered_over_all_stages() -> None:
    found = stack(pp=2).engine(1)
    ranks = [f"worker-{index}" for index in range(4, 8)]
    assert [each.name for each in found] == [*ranks, "scheduler-1"]
    assert stack(pp=2).arguments(found[3]) == ["--rank", "3"]
    assert [stack(pp=2).meets(each) for each in found] == [True, False, False, False, False]
    assert stack(pp=2).peers(found[3]) == ["worker-4"]
    assert stack(pp=2).peers(found[4]) == ranks
    own = Endpoint("10.0.0.1:2000", "10.0.0.1:3000")
    environment = stack(pp=2).environment_of(found[0], own, {}, FILE)
    assert environment
    assert environment["NANO_WORKER_ADDRESSES"] == ",".join(["10.0.0.1:2000"] * 4)


def test_ranks_meet_at_rank_0() -> None:
    first, second, _ = stack().engine(1)
    own, other = Endpoint("10.0.0.1:2000", "10.0.0.1:3000"), Endpoint("10.0.0.2:2000")
    assert stack().meets(first)
    assert not stack().meets(second)
    meeting = {"NANO_TP": "2", "NANO_MASTER_ADDR": "10.0.0.1", "NANO_MASTER_PORT": "3000"}
    addresses = {"NANO_WORKER_ADDRESSES": "10.0.0.1:2000,10.0.0.1:2000"}
    assert stack().environment_of(first, own, {}, FILE) == meeting | addresses
    assert stack().environment_of(second, other, {}, FILE) is None
    addresses = {"NANO_WORKER_ADDRESSES": "10.0.0.2:2000,10.0.0.2:2000"}
    assert stack().environment_of(second, other, {"worker-2": own}, FILE) == meeting | addresses
    # A single rank needs no meeting place.
    found = stack(tp=1).environment_of(Process("worker", 3), other, {}, FILE)
    assert found == {"NANO_TP": "1", "NANO_WORKER_ADDRESSES": "10.0.0.2:2000"}


def test_a_scheduler_needs_all_its_ranks_and_a_frontend_no_scheduler() -> None:
    scheduler, own = Process("scheduler", 1), Endpoint("[fd00::1]:2000")
    ranks = {"worker-2": Endpoint("10.0.0.1:2000"), "worker-3": Endpoint("10.0.0.2:2000")}
    assert stack().environment_of(scheduler, own, {"worker-2": own}, FILE) is None
    assert stack().environment_of(scheduler, own, ranks, FILE) == {
        "NANO_TP": "2",
        "NANO_ENGINE_NAME": "1",
        "NANO_SCHEDULER_ADDRESS": "[fd00::1]:2000",
        "NANO_WORKER_ADDRESSES": "10.0.0.1:2000,10.0.0.2:2000",
    }
    found = stack().environment_of(Process("frontend", 1), Endpoint(""), {}, FILE)
    assert found == {"NANO_TP": "2", "NANO_SCHEDULER_ADDRESSES": "file:/state/schedulers"}


@pytest.mark.parametrize(("port", "expected"), [(50051, 8000), (6000, 0)])
def test_frontends_serve_http_where_each_node_can(port: int, expected: int) -> None:
    found = RayStack(StackSettings(port=port), {}, {})
    assert found.http_port == expected
    environment = found.environment_of(Process("frontend", 0), Endpoint(""), {}, FILE)
    assert environment
    directory = environment.get("NANO_RESPONSES_DIRECTORY")
    assert directory == ("/state/responses" if expected else None)


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:6000"), ("0.0.0.0", "10.0.0.1:6000"), ("[::]", "10.0.0.1:6000")],
)
def test_address_of_a_frontend(host: str, address: str) -> None:
    assert stack(host=host).address(Process("frontend", 0), "10.0.0.1", 2000) == address


def test_without_ray(launcher: Launcher) -> None:
    (launcher.directory / "ray.py").write_text("raise ModuleNotFoundError(name='ray')")
    said = launcher.fail("up", "--runtime", "ray", PYTHONPATH=str(launcher.directory))
    assert said == "up: RUNTIME=ray needs Ray: make setup RUNTIME=ray installs it\n"
