"""The parts of RUNTIME=ray that need no Ray; `tests/faults/test_ray.py` has the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.errors import LaunchError
from deploy.plan import StackSettings
from deploy.ray.layout import Endpoint, Member, RayStack
from deploy.stack import make_private

from .conftest import Launcher

FILE = Path("/state/schedulers")


def stack(tp: int = 2, host: str = "127.0.0.1") -> RayStack:
    settings = StackSettings(tp=tp, host=host, port=6000, allow_public_plaintext=True)
    return RayStack(settings, {"NANO_TP": str(tp)}, {"CPU": 0.5})


def test_an_engine_is_its_ranks_and_their_scheduler() -> None:
    found = stack().engine(1)
    assert [member.name for member, _ in found] == ["worker-2", "worker-3", "scheduler-1"]
    assert [resources["CPU"] for _, resources in found] == [0.5, 0.5, 0.25]
    assert Member.named("worker-3") == found[1][0]
    assert stack().arguments(found[1][0]) == ["--rank", "1"]


def test_ranks_meet_where_rank_0_is() -> None:
    first, second = Member("worker", 2), Member("worker", 3)
    own, other = Endpoint("10.0.0.1:2000", "10.0.0.1:3000"), Endpoint("10.0.0.2:2000")
    assert stack().meets(first)
    assert not stack().meets(second)
    found = stack().environment_of(first, own, {}, FILE)
    assert found == {
        "NANO_TP": "2",
        "NANO_WORKER_ADDRESSES": "10.0.0.1:2000,10.0.0.1:2000",
        "NANO_MASTER_ADDR": "10.0.0.1",
        "NANO_MASTER_PORT": "3000",
    }
    assert stack().environment_of(second, other, {}, FILE) is None
    found = stack().environment_of(second, other, {"worker-2": own}, FILE)
    assert found is not None
    assert (found["NANO_MASTER_ADDR"], found["NANO_MASTER_PORT"]) == ("10.0.0.1", "3000")
    assert found["NANO_WORKER_ADDRESSES"] == "10.0.0.2:2000,10.0.0.2:2000"


def test_one_rank_meets_nobody() -> None:
    found = stack(tp=1).environment_of(Member("worker", 3), Endpoint("10.0.0.1:2000"), {}, FILE)
    assert found is not None
    assert not [name for name in found if "MASTER" in name]


def test_a_scheduler_needs_all_its_ranks() -> None:
    scheduler, own = Member("scheduler", 1), Endpoint("[fd00::1]:2000")
    ranks = {"worker-2": Endpoint("10.0.0.1:2000"), "worker-3": Endpoint("10.0.0.2:2000")}
    assert stack().environment_of(scheduler, own, {"worker-2": own}, FILE) is None
    assert stack().environment_of(scheduler, own, ranks, FILE) == {
        "NANO_TP": "2",
        "NANO_ENGINE_NAME": "1",
        "NANO_SCHEDULER_ADDRESS": "[fd00::1]:2000",
        "NANO_WORKER_ADDRESSES": "10.0.0.1:2000,10.0.0.2:2000",
    }


@pytest.mark.parametrize("index", [0, 1])
def test_frontends_start_without_any_scheduler(index: int) -> None:
    frontend = Member("frontend", index)
    found = stack().environment_of(frontend, Endpoint(""), {}, FILE)
    assert found == {"NANO_TP": "2", "NANO_SCHEDULER_ADDRESSES": "file:/state/schedulers"}


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:6000"), ("0.0.0.0", "10.0.0.1:6000"), ("[::]", "10.0.0.1:6000")],
)
def test_where_a_frontend_is_reached(host: str, address: str) -> None:
    assert stack(host=host).address(Member("frontend", 0), "10.0.0.1", 2000) == address


def test_a_directory_that_others_may_have_made_is_refused(tmp_path: Path) -> None:
    private, link = tmp_path / "private", tmp_path / "link"
    make_private(private)
    assert private.stat().st_mode & 0o777 == 0o700
    make_private(private)
    link.symlink_to(private)
    with pytest.raises(LaunchError, match="link is not a directory"):
        make_private(link)
    private.chmod(0o755)
    with pytest.raises(LaunchError, match="open to other users"):
        make_private(private)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(LaunchError, match="belongs to user"):
            make_private(private)


def test_without_ray(launcher: Launcher) -> None:
    (launcher.directory / "ray.py").write_text("raise ModuleNotFoundError(name='ray')")
    path = f"{launcher.directory}:{launcher.environment['PYTHONPATH']}"
    said = launcher.fail("up", "--runtime", "ray", PYTHONPATH=path)
    assert said == "up: RUNTIME=ray needs Ray: make setup RUNTIME=ray installs it\n"
