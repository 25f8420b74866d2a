"""`restart` of services, engines and models, with stand-ins for the services."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from tests.stack import DEMO_MODEL
from tests.taker import refused
from tests.waiting import wait_for

from .conftest import Launcher

BOTH = ["scheduler.sock", "scheduler-1.sock"]
pytestmark = pytest.mark.system


def changed(before: dict[str, int], after: dict[str, int]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def models(launcher: Launcher, port: int) -> set[Path]:
    """The models that processes have been started with."""
    commands = [psutil.Process(pid).cmdline() for pid in launcher.pids(port).values()]
    given = [words[words.index("--model") + 1] for words in commands]
    return {(launcher.directory / each).resolve() for each in given}


def other_model(launcher: Launcher, name: str) -> Path:
    model = launcher.directory / name
    shutil.copytree(DEMO_MODEL, model)
    return model


def test_processes_of_one_engine_restart_one_after_another(launcher: Launcher, port: int) -> None:
    launcher.succeed("up", "--port", port, "--tp", 2, "--frontends", 2)
    first = launcher.pids(port)
    said = launcher.succeed("restart", "--port", port, "--service", "worker")
    assert "restarted 2 processes" in said
    assert "worker-1     RUNNING/SERVING" in said
    second = launcher.pids(port)
    assert changed(first, second) == ["worker-0", "worker-1"]

    launcher.succeed("restart", "--port", port)
    assert changed(second, launcher.pids(port)) == list(first)
    # Each is stopped once the previous one has started.
    kinds = [each["event"] for each in launcher.events(port, "supervisor")]
    assert kinds == ["process started"] * 5 + ["process ended", "process started"] * 7


def test_there_must_be_something_to_restart_or_scale(launcher: Launcher, port: int) -> None:
    restart = "restart", "--port", port, "--service", "worker"
    scale = "scale", "--port", port, "--engines", 2
    for command in (restart, scale):
        assert "no stack was started" in launcher.fail(*command)
    launcher.succeed("up", "--port", port, "--services", "frontend")
    assert "SERVICE: no worker of the stack runs on this host" in launcher.fail(*restart)
    assert "ENGINES: several engines need worker and scheduler" in launcher.fail(*scale)
    assert len(launcher.pids(port)) == 1


def test_engines_restart_one_after_another_when_their_frontends_have_left(
    launcher: Launcher, port: int
) -> None:
    launcher.succeed("up", "--port", port, "--engines", 2)
    first = launcher.pids(port)
    assert "restarted 5 processes" in launcher.succeed("restart", "--port", port)
    second = launcher.pids(port)
    assert changed(first, second) == list(first)
    assert launcher.listed(port) == BOTH
    for scheduler in ("scheduler-0", "scheduler-1"):
        gone = [each for each in launcher.events(port, scheduler) if each["event"] == "gone"]
        assert [each["listed"] for each in gone] == [False]
    starts = [each for each in launcher.events(port, "supervisor") if "started" in each["event"]]
    assert [each["process"] for each in starts[5:]] == [
        "worker-0",
        "scheduler-0",
        "worker-1",
        "scheduler-1",
        "frontend-0",
    ]

    # One engine, then a service of each.
    launcher.succeed("restart", "--port", port, "--engine", 1)
    third = launcher.pids(port)
    assert changed(second, third) == ["worker-1", "scheduler-1"]
    launcher.succeed("restart", "--port", port, "--service", "worker")
    fourth = launcher.pids(port)
    assert changed(third, fourth) == ["worker-0", "worker-1"]
    for words, named in (
        (("--engine", 2), "ENGINE: 2 is not in [0, 1]"),
        (("--engine", 1, "--service", "frontend"), "SERVICE: an engine has no frontend"),
        (("--engine", 1, "--model", DEMO_MODEL), "MODEL: applies to the whole stack"),
        (("--model", "no/where"), "MODEL: no/where is not a directory"),
    ):
        assert named in launcher.fail("restart", "--port", port, *words)
    assert launcher.pids(port) == fourth


def test_restart_replaces_the_model_unless_it_cannot_be_loaded(
    launcher: Launcher, port: int
) -> None:
    launcher.succeed("up", "--port", port, "--engines", 2)
    first = launcher.pids(port)
    model = other_model(launcher, "broken")
    for file in model.glob("*.safetensors"):
        file.unlink()
    said = launcher.fail("restart", "--port", port, "--model", model)
    assert "MODEL: worker-0 cannot start: no weights in this model" in said
    assert f"Engine 0 serves {DEMO_MODEL} again" in said
    second = launcher.pids(port)
    assert changed(first, second) == ["worker-0", "scheduler-0"]
    assert models(launcher, port) == {DEMO_MODEL}
    assert launcher.listed(port) == BOTH

    model = other_model(launcher, "better; model % #2")
    with refused(port):  # no other user can take it while the frontend has left it
        launcher.succeed("restart", "--port", port, "--model", model)
    assert changed(second, launcher.pids(port)) == list(first)
    assert models(launcher, port) == {model}
    # It is the stack's from now on.
    launcher.succeed("scale", "--port", port, "--engines", 3)
    assert len(launcher.rows(port)) == 7
    assert models(launcher, port) == {model}


def test_a_restart_that_failed_or_was_killed_can_be_repeated(launcher: Launcher, port: int) -> None:
    """A worker that does not come back ends the restart, and the supervisor keeps starting it: also
    that of an engine which the stack has not begun with."""
    behaviour = launcher.behaviour
    launcher.succeed("up", "--port", port)

    def fail(worker: str, *options: object) -> list[str]:
        """The processes that a restart has replaced, although it failed."""
        before = launcher.pids(port)
        behaviour.write_text("refuse")
        failed = launcher.fail("restart", "--port", port, *options)
        assert f"{worker} cannot start: no weights in this model" in failed
        said = "EXITED starts again soon: no weights in this model"
        wait_for(lambda: said in launcher("ps", "--port", port).stdout, "the reason")
        behaviour.unlink()
        wait_for(lambda: launcher.serving(port) == len(before), "the worker to serve again")
        return changed(before, launcher.pids(port))

    assert fail("worker-0") == ["worker-0"]
    launcher.succeed("scale", "--port", port, "--engines", 2)
    assert fail("worker-1", "--engine", 1) == ["worker-1", "scheduler-1"]
    assert launcher.listed(port) == BOTH

    before = launcher.pids(port)
    behaviour.write_text("silent")
    killed = launcher.start("restart", "--port", port)
    assert killed.stdout
    assert any("worker-0" in line and "SILENT" in line for line in killed.stdout)
    assert launcher.listed(port) == BOTH[1:]
    killed.kill()
    behaviour.unlink()
    launcher.succeed("restart", "--port", port)
    assert changed(before, launcher.pids(port)) == list(before)
    assert launcher.listed(port) == BOTH
