"""Stacks of several engines, with stand-ins for the services."""

from __future__ import annotations

from pathlib import Path

import psutil

from deploy.stack import run_directory

from .conftest import Launcher


def rows(launcher: Launcher, port: int) -> list[list[str]]:
    """The table of `ps`, whose processes all must be serving."""
    table = [line.split() for line in launcher("ps", "--port", port).stdout.splitlines()[1:]]
    assert all(row[4] == "RUNNING/SERVING" for row in table), table
    return table


def listed(launcher: Launcher, port: int) -> list[str]:
    """The sockets of the engines that frontends are to use."""
    file = launcher.directory / run_directory(port) / "engines"
    return [Path(line.removeprefix("unix:")).name for line in file.read_text().splitlines()]


def test_two_engines_from_up_to_down(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--port", port, "--engines", 2, "--tp", 2)
    assert up.returncode == 0, up.stderr
    table = rows(launcher, port)
    assert [(row[0], row[1], row[5]) for row in table] == [
        *(("worker", str(index), str(index // 2)) for index in range(4)),
        ("scheduler", "0", "0"),
        ("scheduler", "1", "1"),
        ("frontend", "0", "-"),
    ]
    assert len({row[3] for row in table}) == 7
    assert listed(launcher, port) == ["scheduler.sock", "scheduler-1.sock"]
    frontend = psutil.Process(int(table[-1][2]))
    assert frontend.environ()["NANO_SCHEDULER_ADDRESSES"] == f"file:.run/{port}/engines"

    assert launcher("down", "--port", port).returncode == 0
    assert not launcher.members(port)
    directory = launcher.directory / run_directory(port)
    assert not list(directory.glob("*.sock"))
    assert not (directory / "engines").exists()
