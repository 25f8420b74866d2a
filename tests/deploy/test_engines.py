"""Stacks of several engines, with stand-ins for the services."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.stack import run_directory

from .conftest import Launcher

pytestmark = pytest.mark.system


def rows(launcher: Launcher, port: int) -> list[list[str]]:
    """The table of `ps`, whose processes all must be serving."""
    supervisor, *table = [
        line.split() for line in launcher("ps", "--port", port).stdout.splitlines()[1:]
    ]
    assert (supervisor[0], supervisor[4]) == ("supervisor", "RUNNING")
    assert all(row[4] == "RUNNING/SERVING" for row in table), table
    return table


def pids(table: list[list[str]]) -> dict[str, str]:
    return {f"{row[0]}-{row[1]}": row[2] for row in table}


def serving(launcher: Launcher, port: int) -> int:
    return launcher("ps", "--port", port).stdout.count("RUNNING/SERVING")


def listed(launcher: Launcher, port: int) -> list[str]:
    """The sockets of the engines that frontends are to use."""
    file = launcher.directory / run_directory(port) / "engines"
    return [Path(line.removeprefix("unix:")).name for line in file.read_text().splitlines()]


def events(launcher: Launcher, port: int, process: str) -> list[dict[str, Any]]:
    log = launcher.directory / run_directory(port) / f"{process}.log"
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_engines_come_and_go_while_the_others_serve(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--port", port, "--engines", 2, "--tp", 2)
    assert up.returncode == 0, up.stderr
    two = rows(launcher, port)
    assert [(row[0], row[1], row[5]) for row in two] == [
        *(("worker", str(index), str(index // 2)) for index in range(4)),
        ("scheduler", "0", "0"),
        ("scheduler", "1", "1"),
        ("frontend", "0", "-"),
    ]
    assert len({row[3] for row in two}) == 7
    assert listed(launcher, port) == ["scheduler.sock", "scheduler-1.sock"]
    frontend = psutil.Process(int(two[-1][2]))
    assert frontend.environ()["NANO_SCHEDULER_ADDRESSES"] == f"file:.run/{port}/engines"

    more = launcher("scale", "--port", port, "--engines", 3)
    assert more.returncode == 0, more.stderr
    assert "3 engines serve" in more.stdout
    assert listed(launcher, port) == ["scheduler.sock", "scheduler-1.sock", "scheduler-2.sock"]
    three = rows(launcher, port)
    assert len(three) == 10
    # Nothing that was there has been touched.
    assert pids(three) | pids(two) == pids(three)

    fewer = launcher("scale", "--port", port, "--engines", 2)
    assert fewer.returncode == 0, fewer.stderr
    assert listed(launcher, port) == ["scheduler.sock", "scheduler-1.sock"]
    assert rows(launcher, port) == two
    # It was stopped once its frontends had left it, and before its workers.
    assert events(launcher, port, "scheduler-2")[-1]["listed"] is False
    directory = launcher.directory / run_directory(port)
    ends = [each for each in events(launcher, port, "supervisor") if "ended" in each["event"]]
    stops = [each["process"] for each in ends]
    assert stops[0] == "scheduler-2"
    assert sorted(stops[1:]) == ["worker-4", "worker-5"]

    assert launcher("down", "--port", port).returncode == 0
    assert not launcher.members(port)
    assert not list(directory.glob("*.sock"))
    assert not (directory / "engines").exists()


def test_an_engine_that_cannot_start_or_is_interrupted_leaves_the_stack_as_it_was(
    launcher: Launcher, port: int
) -> None:
    behaviour = launcher.directory / "behaviour"
    assert launcher("up", "--port", port, STANDIN_FILE=str(behaviour)).returncode == 0
    before = rows(launcher, port)
    behaviour.write_text("refuse")
    more = launcher("scale", "--port", port, "--engines", 2)
    assert more.returncode == 1
    assert "worker-1 cannot start: no weights in this model" in more.stderr
    assert rows(launcher, port) == before
    assert listed(launcher, port) == ["scheduler.sock"]
    behaviour.write_text("silent")

    def scale_for_ever() -> subprocess.Popen[str]:
        scale = launcher.start("scale", "--port", port, "--engines", 2)
        assert scale.stdout
        assert any("worker-1" in line and "SILENT" in line for line in scale.stdout)
        return scale

    # At Ctrl-C it puts things right itself.
    scale = scale_for_ever()
    second = launcher("scale", "--port", port, "--engines", 3)
    assert second.returncode == 1
    assert "PORT: another make up, scale or restart is changing its stack" in second.stderr
    scale.send_signal(signal.SIGINT)
    assert "stopping the new engines" in scale.communicate()[1]
    assert scale.returncode == 130
    assert rows(launcher, port) == before

    # Killed, it cannot; the same command, or another number, can.
    scale_for_ever().kill()
    assert listed(launcher, port) == ["scheduler.sock"]
    assert launcher("scale", "--port", port, "--engines", 1).returncode == 0
    assert rows(launcher, port) == before
    scale_for_ever().kill()
    behaviour.unlink()
    table = [line.split() for line in launcher("ps", "--port", port).stdout.splitlines()]
    psutil.Process(int(pids(table)["worker-1"])).kill()
    assert launcher("scale", "--port", port, "--engines", 2).returncode == 0
    assert listed(launcher, port) == ["scheduler.sock", "scheduler-1.sock"]
    assert len(rows(launcher, port)) == 5
