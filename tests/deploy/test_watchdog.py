"""The watchdog, and a process in supervisord's place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from deploy.errors import SupervisorSilentError
from deploy.plan import Layout, plan_stack
from deploy.stack import Stack
from deploy.supervisor import supervised_processes
from deploy.watchdog import Pauses, Watchdog
from shared.process.heartbeat import BEATS
from tests.stack import DEMO_MODEL
from tests.waiting import wait_for


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return plan_stack({"NANO_MODEL": str(DEMO_MODEL)}, Layout(), tmp_path, 1)[0]


@pytest.fixture
def supervisor() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


@contextmanager
def silent(directory: Path) -> Iterator[None]:
    """Listens where supervisord would, and answers nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "supervisor.sock"))
        listener.listen(100)
        yield


def test_a_supervisord_that_does_not_answer_is_killed(
    stack: Stack, supervisor: psutil.Process
) -> None:
    watchdog = Watchdog(stack, supervisor, interval_s=0.01)
    with silent(stack.directory):
        with pytest.raises(SupervisorSilentError):
            supervised_processes(stack.directory, timeout_s=0.01)
        for _ in range(BEATS - 1):
            assert watchdog.look()
        assert supervisor.is_running()
        watchdog.look()
        assert not psutil.wait_procs([supervisor], timeout=60)[1]
    assert not watchdog.look()


def test_a_supervisord_that_does_not_listen_is_left_alone(
    stack: Stack, supervisor: psutil.Process
) -> None:
    """It has just begun, or somebody has removed its socket."""
    watchdog = Watchdog(stack, supervisor, interval_s=0.01)
    for _ in range(3 * BEATS):
        assert watchdog.look()
    assert supervisor.is_running()


def test_a_stopped_supervisord_is_continued(stack: Stack, supervisor: psutil.Process) -> None:
    supervisor.suspend()
    wait_for(lambda: supervisor.status() == psutil.STATUS_STOPPED, "it to stop")
    assert Watchdog(stack, supervisor, interval_s=0.01).look()
    wait_for(lambda: supervisor.status() != psutil.STATUS_STOPPED, "it to go on")


def test_without_its_configuration_file_it_says_so_and_tries_again(
    stack: Stack, tmp_path: Path
) -> None:
    """Ever more rarely, and in one process: supervisord would start another at once."""
    stack.save()
    file, log = tmp_path / "nano.toml", tmp_path / "log"
    run = "import subprocess, sys; subprocess.call([sys.executable, '-m', *sys.argv[1:3]])"
    command = [sys.executable, "-c", run, "deploy.watchdog", str(stack.directory)]
    environment = os.environ | {"NANO_CONFIG_FILE": str(file)}
    with (
        log.open("wb") as output,
        subprocess.Popen([*command, "deploy.supervise"], env=environment, stderr=output) as parent,
    ):
        reason = "python -m deploy.watchdog: NANO_CONFIG_FILE: [Errno 2] No such file or directory"
        said = [f"{reason}: '{file}'; tries again in {pause} s" for pause in ("0.5", "1")]
        wait_for(lambda: log.read_text().splitlines()[:2] == said, "two tries")
        (watchdog,) = psutil.Process(parent.pid).children()
        file.write_text("")
        wait_for(watchdog.children, "it to watch")
        parent.kill()
        assert not psutil.wait_procs([watchdog], timeout=60)[1]


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pauses, tries = Pauses(), []
    for _ in range(600):
        if pauses.over("worker-0"):
            tries.append(now)
        now += 0.125
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert set(gaps[6:]) == {10.0}
    assert pauses.over("worker-1")
    now += 100
    assert pauses.over("worker-0")
