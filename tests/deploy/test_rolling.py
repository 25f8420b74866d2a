"""`restart` of several engines, one after another, with stand-ins for the services."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from deploy.stack import run_directory
from tests.stack import DEMO_MODEL
from tests.waiting import wait_for

from .conftest import Launcher
from .test_engines import events, listed, pids, rows
from .test_restart import changed

BOTH = ["scheduler.sock", "scheduler-1.sock"]


def up(launcher: Launcher, port: int, **environment: str) -> dict[str, str]:
    up = launcher("up", "--port", port, "--engines", 2, **environment)
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
    before = up(launcher, port)
    restart = launcher("restart", "--port", port)
    assert restart.returncode == 0, restart.stderr
    assert "restarted 5 processes" in restart.stdout
    assert changed(before, pids(rows(launcher, port))) == list(before)
    assert listed(launcher, port) == BOTH
    for scheduler in ("scheduler-0", "scheduler-1"):
        gone = [each for each in events(launcher, port, scheduler) if each["event"] == "gone"]
        assert [each["listed"] for each in gone] == [False]
    log = (launcher.directory / run_directory(port) / "supervisord.log").read_text()
    names = [line.split("'")[1] for line in log.splitlines() if "spawned:" in line][6:]
    assert names == ["worker-0", "scheduler-0", "worker-1", "scheduler-1", "frontend-0"]


def test_restart_of_one_engine_or_of_a_service_of_each(launcher: Launcher, port: int) -> None:
    first = up(launcher, port)
    assert launcher("restart", "--port", port, "--engine", 1).returncode == 0
    second = pids(rows(launcher, port))
    assert changed(first, second) == ["worker-1", "scheduler-1"]
    assert launcher("restart", "--port", port, "--service", "worker").returncode == 0
    third = pids(rows(launcher, port))
    assert changed(second, third) == ["worker-0", "worker-1"]
    for words, named in (
        (("--engine", 2), "ENGINE: 2 is none of the 2"),
        (("--engine", 1, "--service", "frontend"), "SERVICE: an engine has no frontend"),
        (("--engine", 1, "--model", DEMO_MODEL), "MODEL: is all engines' and frontends'"),
        (("--model", "no/where"), "MODEL: no/where is no directory"),
    ):
        restart = launcher("restart", "--port", port, *words)
        assert restart.returncode == 1
        assert named in restart.stderr
    assert pids(rows(launcher, port)) == third


def test_a_model_takes_the_place_of_another(launcher: Launcher, port: int) -> None:
    before = up(launcher, port)
    model = other_model(launcher, "better; model % #2")
    restart = launcher("restart", "--port", port, "--model", model)
    assert restart.returncode == 0, restart.stderr
    assert changed(before, pids(rows(launcher, port))) == list(before)
    assert set(models(launcher, port).values()) == {model}
    # It is the stack's from now on.
    assert launcher("scale", "--port", port, "--engines", 3).returncode == 0
    assert len(rows(launcher, port)) == 7
    assert set(models(launcher, port).values()) == {model}


def test_a_model_that_cannot_be_loaded_leaves_the_stack_with_its_own(
    launcher: Launcher, port: int
) -> None:
    before = up(launcher, port)
    model = other_model(launcher, "broken")
    for file in model.glob("*.safetensors"):
        file.unlink()
    restart = launcher("restart", "--port", port, "--model", model)
    assert restart.returncode == 1
    assert "MODEL: worker-0 cannot start: no weights in this model" in restart.stderr
    assert f"Engine 0 serves {DEMO_MODEL} again" in restart.stderr
    assert changed(before, pids(rows(launcher, port))) == ["worker-0", "scheduler-0"]
    assert set(models(launcher, port).values()) == {DEMO_MODEL}
    assert listed(launcher, port) == BOTH


def test_a_restart_that_was_killed_goes_on(launcher: Launcher, port: int) -> None:
    behaviour = launcher.directory / "behaviour"
    before = up(launcher, port, STANDIN_FILE=str(behaviour))
    behaviour.write_text("silent")
    restart = launcher.start("restart", "--port", port)
    assert restart.stdout
    assert any("worker-0" in line and "SILENT" in line for line in restart.stdout)
    assert listed(launcher, port) == BOTH[1:]
    restart.kill()
    behaviour.unlink()
    again = launcher("restart", "--port", port)
    assert again.returncode == 0, again.stderr
    assert changed(before, pids(rows(launcher, port))) == list(before)
    assert listed(launcher, port) == BOTH


def test_an_engine_that_does_not_come_back_ends_the_restart(launcher: Launcher, port: int) -> None:
    """Its worker is tried again, also that of an engine which the watchdog has not begun with."""
    behaviour = launcher.directory / "behaviour"
    assert launcher("up", "--port", port, STANDIN_FILE=str(behaviour)).returncode == 0
    assert launcher("scale", "--port", port, "--engines", 2).returncode == 0
    before = pids(rows(launcher, port))
    behaviour.write_text("refuse")
    restart = launcher("restart", "--port", port, "--engine", 1)
    assert restart.returncode == 1
    assert "worker-1 cannot start: no weights in this model" in restart.stderr
    assert listed(launcher, port) == BOTH
    behaviour.unlink()

    def serving() -> bool:
        return launcher("ps", "--port", port).stdout.count("RUNNING/SERVING") == 5

    wait_for(serving, "the worker to serve again")
    assert changed(before, pids(rows(launcher, port))) == ["worker-1", "scheduler-1"]
