"""`restart`, with stand-ins for the services."""

from __future__ import annotations

import pytest

from tests.waiting import wait_for

from .conftest import Launcher
from .test_engines import events, rows

pytestmark = pytest.mark.system


def pids(launcher: Launcher, port: int) -> dict[str, str]:
    """The pids by name and index; all must be serving."""
    return {f"{row[0]}-{row[1]}": row[2] for row in rows(launcher, port)}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def test_restart_of_one_service_or_of_all(launcher: Launcher, port: int) -> None:
    assert launcher("up", "--port", port, "--tp", 2, "--frontends", 2).returncode == 0
    first = pids(launcher, port)

    restart = launcher("restart", "--port", port, "--service", "worker_svc")
    assert restart.returncode == 0, restart.stderr
    assert "restarted 2 processes" in restart.stdout
    assert "worker-1     RUNNING/SERVING" in restart.stdout
    second = pids(launcher, port)
    assert changed(first, second) == ["worker-0", "worker-1"]

    assert launcher("restart", "--port", port).returncode == 0
    assert changed(second, pids(launcher, port)) == list(first)
    # One after another: each is stopped once the previous one has started.
    kinds = [each["event"] for each in events(launcher, port, "supervisor")]
    assert kinds == ["process started"] * 5 + ["process ended", "process started"] * 7


def test_a_process_that_does_not_come_back_ends_the_restart(launcher: Launcher, port: int) -> None:
    behaviour = launcher.directory / "behaviour"
    up = launcher("up", "--port", port, STANDIN_FILE=str(behaviour))
    assert up.returncode == 0, up.stderr
    before = pids(launcher, port)
    behaviour.write_text("refuse")
    restart = launcher("restart", "--port", port)
    assert restart.returncode == 1
    assert "worker-0 cannot start: no weights in this model" in restart.stderr

    # The rest was left alone. Once nothing is in its way, the process comes back by itself.
    def states() -> str:
        return launcher("ps", "--port", port).stdout

    wait_for(lambda: "EXITED starts again soon: no weights in this model" in states(), "the reason")
    behaviour.unlink()
    wait_for(lambda: states().count("RUNNING/SERVING") == 3, "the worker to serve again")
    assert changed(before, pids(launcher, port)) == ["worker-0"]


def test_there_must_be_something_to_restart_or_scale(launcher: Launcher, port: int) -> None:
    restart = "restart", "--port", port, "--service", "worker"
    scale = "scale", "--port", port, "--engines", 2
    for command in (restart, scale):
        refused = launcher(*command)
        assert refused.returncode == 1
        assert "no stack was started" in refused.stderr

    assert launcher("up", "--port", port, "--services", "frontend").returncode == 0
    for command, reason in (
        (restart, "SERVICE: no worker of the stack runs on this host"),
        (scale, "ENGINES: several engines need worker and scheduler"),
    ):
        refused = launcher(*command)
        assert refused.returncode == 1
        assert reason in refused.stderr
    assert len(pids(launcher, port)) == 1
