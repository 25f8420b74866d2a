"""A worker whose process is stopped is replaced; one that is merely loading is left alone."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.stack import wait_for

from .conftest import Launcher
from .test_commands import named

pytestmark = pytest.mark.timeout(200)
HANG = {"NANO_HANG_TIMEOUT_S": "1"}


def test_a_stopped_worker_is_replaced(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--port", port, "--tp", 2, **HANG)
    assert up.returncode == 0, up.stderr
    before = launcher.members(port)
    stopped = next(p for p in before if p.cmdline()[-3:] == ["worker_svc", "--rank", "1"])
    stopped.send_signal(signal.SIGSTOP)
    assert not psutil.wait_procs([stopped], timeout=60)[1]

    def serving() -> bool:
        return bool(launcher("ps", "--port", port).stdout.count("RUNNING/SERVING") == 4)

    wait_for(serving, "all processes to serve")
    gone = {p.pid for p in before} - {p.pid for p in launcher.members(port)}
    assert gone == {stopped.pid}  # and no other
    log = launcher.directory / ".run" / str(port) / "watchdog-0.log"
    assert f'"pid": {stopped.pid}' in log.read_text()


def test_a_worker_that_has_not_served_yet_is_left_alone_unless_it_is_stopped(
    launcher: Launcher, port: int
) -> None:
    up = launcher.start(
        "up", "--port", port, "--services", "worker", "--tp", 1, STANDIN="silent", **HANG
    )

    def watched() -> bool:
        return any("deploy.watchdog" in p.cmdline() for p in launcher.members(port))

    wait_for(watched, "the watchdog to run")
    worker = named(launcher.members(port), "worker_svc")
    wait_for(lambda: "SILENT" in launcher("ps", "--port", port).stdout, "the worker to be SILENT")
    for _ in range(3):
        assert worker.is_running()
        launcher("ps", "--port", port)  # takes longer than the watchdog waits
    assert worker.is_running()
    worker.send_signal(signal.SIGSTOP)
    assert not psutil.wait_procs([worker], timeout=60)[1]
    up.kill()
