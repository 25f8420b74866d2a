"""`restart` of several engines, one after another, with stand-ins for the services."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from tests.stack import DEMO_MODEL
from tests.waiting import wait_for

from .conftest import Launcher
from .test_engines import events, listed, pids, rows, serving
from .test_restart import changed

BOTH = ["scheduler.sock", "scheduler-1.sock"]
pytestmark = pytest.mark.system


def up(launcher: Launcher, port: int) -> dict[str, str]:
    up = launcher("up", "--port", port, "--engines", 2)
    assert up.returncode == 0, up.stderr
    return pids(rows(launcher, port))


def models(launcher: Launcher, port: int) -> dict[str, Path]:
    """The model that each process has been started with."""
    found = {}
    for name, pid in pids(rows(launcher, port)).items():
        words = psutil.Process(int(pid)).cmdline()
        found[name] = (launcher.directory / words[words.index("--model") + 1]).resolve()
    return found


def other_model(launcher: Launcher, name: str) -> Path:
    model = launcher.directory / name
    shutil.copytree(DEMO_MODEL, model)
    return model


def test_engines_restart_one_after_another_when_their_frontends_have_left(
    launcher: Launcher, port: int
) -> None:
    first = up(launcher, port)
    restart = launcher("restart", "--port", port)
    assert restart.returncode == 0, restart.stderr
    assert "restarted 5 processes" in restart.stdout
    second = pids(rows(launcher, port))
    assert changed(first, second) == list(first)
    assert listed(launcher, port) == BOTH
    for scheduler in ("scheduler-0", "scheduler-1"):
        gone = [each for each in events(launcher, port, scheduler) if each["event"] == "gone"]
        assert [each["listed"] for each in gone] == [False]
    starts = [each for each in events(launcher, port, "supervisor") if "started" in each["event"]]
    assert [each["process"] for each in starts[5:]] == [
        "worker-0",
        "scheduler-0",
        "worker-1",
        "scheduler-1",
        "frontend-0",
    ]

    # One engine, then a service of each.
    assert launcher("restart", "--port", port, "--engine", 1).returncode == 0
    third = pids(rows(launcher, port))
    assert changed(second, third) == ["worker-1", "scheduler-1"]
    assert launcher("restart", "--port", port, "--service", "worker").returncode == 0
    fourth = pids(rows(launcher, port))
    assert changed(third, fourth) == ["worker-0", "worker-1"]
    for words, named in (
        (("--engine", 2), "ENGINE: 2 is not in [0, 1]"),
        (("--engine", 1, "--service", "frontend"), "SERVICE: an engine has no frontend"),
        (("--engine", 1, "--model", DEMO_MODEL), "MODEL: applies to the whole stack"),
        (("--model", "no/where"), "MODEL: no/where is not a directory"),
    ):
        restart = launcher("restart", "--port", port, *words)
        assert restart.returncode == 1
        assert named in restart.stderr
    assert pids(rows(launcher, port)) == fourth


def test_a_model_takes_the_place_of_another_unless_it_cannot_be_loaded(
    launcher: Launcher, port: int
) -> None:
    first = up(launcher, port)
    model = other_model(launcher, "broken")
    for file in model.glob("*.safetensors"):
        file.unlink()
    restart = launcher("restart", "--port", port, "--model", model)
    assert restart.returncode == 1
    assert "MODEL: worker-0 cannot start: no weights in this model" in restart.stderr
    assert f"Engine 0 serves {DEMO_MODEL} again" in restart.stderr
    second = pids(rows(launcher, port))
    assert changed(first, second) == ["worker-0", "scheduler-0"]
    assert set(models(launcher, port).values()) == {DEMO_MODEL}
    assert listed(launcher, port) == BOTH

    model = other_model(launcher, "better; model % #2")
    restart = launcher("restart", "--port", port, "--model", model)
    assert restart.returncode == 0, restart.stderr
    assert changed(second, pids(rows(launcher, port))) == list(first)
    assert set(models(launcher, port).values()) == {model}
    # It is the stack's from now on.
    assert launcher("scale", "--port", port, "--engines", 3).returncode == 0
    assert len(rows(launcher, port)) == 7
    assert set(models(launcher, port).values()) == {model}


def test_a_restart_that_failed_or_was_killed_goes_on(launcher: Launcher, port: int) -> None:
    """A worker that does not come back ends the restart, and is tried again: also that of an engine
    which the stack has not begun with."""
    behaviour = launcher.directory / "behaviour"
    assert launcher("up", "--port", port, STANDIN_FILE=str(behaviour)).returncode == 0
    assert launcher("scale", "--port", port, "--engines", 2).returncode == 0
    first = pids(rows(launcher, port))
    behaviour.write_text("refuse")
    restart = launcher("restart", "--port", port, "--engine", 1)
    assert restart.returncode == 1
    assert "worker-1 cannot start: no weights in this model" in restart.stderr
    assert listed(launcher, port) == BOTH
    behaviour.unlink()
    wait_for(lambda: serving(launcher, port) == 5, "the worker to serve again")
    second = pids(rows(launcher, port))
    assert changed(first, second) == ["worker-1", "scheduler-1"]

    behaviour.write_text("silent")
    killed = launcher.start("restart", "--port", port)
    assert killed.stdout
    assert any("worker-0" in line and "SILENT" in line for line in killed.stdout)
    assert listed(launcher, port) == BOTH[1:]
    killed.kill()
    behaviour.unlink()
    again = launcher("restart", "--port", port)
    assert again.returncode == 0, again.stderr
    assert changed(second, pids(rows(launcher, port))) == list(first)
    assert listed(launcher, port) == BOTH
