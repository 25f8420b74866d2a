"""`scale`: engines come and go, with stand-ins for the services."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest

from deploy.stack import run_directory

from .conftest import Launcher

pytestmark = pytest.mark.system


@pytest.mark.parametrize("ranks", ["--tp", "--pp"])
def test_engines_come_and_go_while_the_others_serve(
    launcher: Launcher, port: int, ranks: str
) -> None:
    launcher.succeed("up", "--port", port, "--engines", 2, ranks, 2)
    two = launcher.rows(port)
    assert [(row[0], row[1], row[5]) for row in two] == [
        *(("worker", str(index), str(index // 2)) for index in range(4)),
        ("scheduler", "0", "0"),
        ("scheduler", "1", "1"),
        ("frontend", "0", "-"),
    ]
    assert len({row[3] for row in two}) == 7
    assert launcher.listed(port) == ["scheduler.sock", "scheduler-1.sock"]
    frontend = psutil.Process(int(two[-1][2]))
    assert frontend.environ()["NANO_SCHEDULER_ADDRESSES"] == f"file:.run/{port}/engines"

    before = launcher.pids(port)
    assert "3 engines serve" in launcher.succeed("scale", "--port", port, "--engines", 3)
    assert launcher.listed(port) == ["scheduler.sock", "scheduler-1.sock", "scheduler-2.sock"]
    three = launcher.pids(port)
    assert len(three) == 10
    # No earlier process was replaced.
    assert three | before == three

    launcher.succeed("scale", "--port", port, "--engines", 2)
    assert launcher.listed(port) == ["scheduler.sock", "scheduler-1.sock"]
    assert launcher.rows(port) == two
    # The engine was stopped once its frontends had left it, and before its workers.
    assert launcher.events(port, "scheduler-2")[-1]["listed"] is False
    workers = [launcher.drained(port, f"worker-{index}") for index in (4, 5)]
    assert launcher.drained(port, "scheduler-2") < min(workers)

    launcher.succeed("down", "--port", port)
    assert not launcher.members(port)
    directory = launcher.directory / run_directory(port)
    assert not list(directory.glob("*.sock"))
    assert not (directory / "engines").exists()


def test_an_engine_that_cannot_start_or_is_interrupted_leaves_the_stack_as_it_was(
    launcher: Launcher, port: int
) -> None:
    behaviour = launcher.behaviour
    launcher.succeed("up", "--port", port)
    before = launcher.rows(port)
    behaviour.write_text("refuse")
    refused = launcher.fail("scale", "--port", port, "--engines", 2)
    assert "worker-1 cannot start: no weights in this model" in refused
    assert launcher.rows(port) == before
    assert launcher.listed(port) == ["scheduler.sock"]
    behaviour.write_text("silent")

    def scale_for_ever() -> subprocess.Popen[str]:
        scale = launcher.start("scale", "--port", port, "--engines", 2)
        assert scale.stdout
        assert any("worker-1" in line and "SILENT" in line for line in scale.stdout)
        return scale

    # At Ctrl-C it puts things right itself.
    scale = scale_for_ever()
    second = launcher.fail("scale", "--port", port, "--engines", 3)
    assert "PORT: another make up, scale or restart is changing its stack" in second
    scale.send_signal(signal.SIGINT)
    assert "stopping the new engines" in scale.communicate()[1]
    assert scale.returncode == 130
    assert launcher.rows(port) == before

    # Killed, it cannot; the same command, or another number, can.
    scale_for_ever().kill()
    assert launcher.listed(port) == ["scheduler.sock"]
    launcher.succeed("scale", "--port", port, "--engines", 1)
    assert launcher.rows(port) == before
    scale_for_ever().kill()
    behaviour.unlink()
    table = [line.split() for line in launcher("ps", "--port", port).stdout.splitlines()]
    (pid,) = [int(row[2]) for row in table if row[:2] == ["worker", "1"]]
    psutil.Process(pid).kill()
    launcher.succeed("scale", "--port", port, "--engines", 2)
    assert launcher.listed(port) == ["scheduler.sock", "scheduler-1.sock"]
    assert len(launcher.rows(port)) == 5
