"""The supervisor's processes, and the end of those that have lost it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.child import Child, rotate
from deploy.errors import SupervisorGoneError
from deploy.native.commands import down
from deploy.native.processes import (
    MARKER,
    running_processes,
    stack_members,
    stop_stack,
)
from deploy.native.supervisor import command
from deploy.plan import Layout, plan_stack
from deploy.stack import Stack, run_directory
from tests.waiting import WAIT_S, wait_for

DEMO = str(Path(__file__).parents[2] / "models" / "demo")


def settings(stack: Stack, shared: dict[str, str], name: str) -> dict[str, str]:
    """A process's, which are in its environment or else on its command line."""
    words = command(stack, next(each for each in stack.processes() if each.name == name))[4:]
    pairs = zip(words[::2], words[1::2], strict=True)
    flags = {key[2:].replace("-", "_").upper(): value for key, value in pairs}
    return {key.removeprefix("NANO_"): value for key, value in shared.items()} | flags


def test_flags_of_processes() -> None:
    environment = {"NANO_MODEL": DEMO, "NANO_TP": "4", "NANO_MASTER_PORT": "9"}
    stack, shared = plan_stack(environment, Layout(frontends=2, ranks="2-3"), Path("100%"), 1)
    names = ["worker-2", "worker-3", "scheduler-0", "frontend-0", "frontend-1"]
    assert [each.name for each in stack.processes()][:5] == names
    worker = settings(stack, shared, "worker-3")
    assert (worker["MODEL"], worker["RANK"]) == (DEMO, "3")
    frontend = settings(stack, shared, "frontend-1")
    assert (frontend["MODEL"], frontend["INDEX"]) == (DEMO, "1")


def test_flags_of_engines() -> None:
    environment = {"NANO_MODEL": DEMO, "NANO_TP": "2"}
    stack, shared = plan_stack(environment, Layout(engines=3), Path("run"), 1)
    for engine in range(3):
        first, second = 2 * engine, 2 * engine + 1
        addresses = f"unix:run/worker-{first}.sock,unix:run/worker-{second}.sock"
        scheduler = settings(stack, shared, f"scheduler-{engine}")
        assert scheduler["WORKER_ADDRESSES"] == addresses
        assert scheduler["SCHEDULER_ADDRESS"] == stack.scheduler_address_of(engine)
        assert scheduler.get("ENGINE_NAME", "0") == str(engine)
        for rank, index in enumerate((first, second)):
            worker = settings(stack, shared, f"worker-{index}")
            assert (worker["WORKER_ADDRESSES"], worker["RANK"]) == (addresses, str(rank))
            assert worker.get("INDEX", worker["RANK"]) == str(index)
            assert worker["ENGINES_ON_HOST"] == "3"
    meeting = [settings(stack, shared, f"worker-{index}")["MASTER_PORT"] for index in range(6)]
    assert meeting[::2] == meeting[1::2]
    assert len(set(meeting)) == 3


def test_no_processes_without_a_stack(tmp_path: Path) -> None:
    with pytest.raises(SupervisorGoneError):
        running_processes(tmp_path)


def test_a_process_that_cannot_be_run_is_tried_again(tmp_path: Path) -> None:
    child = Child("worker-0", tmp_path / "log")
    child.start([str(tmp_path / "missing")], {})
    assert not child.pid
    assert "No such file or directory" in child.failure
    assert child.due > time.monotonic()
    wait_for(lambda: child.may_start(was_up=False), "the next try")
    child.start(["echo", "hello"], {})
    child.poll(WAIT_S)
    assert (child.pid, child.exit_status, child.failure, child.starts) == (0, 0, "", 2)
    assert child.log.read_text() == "hello\n"


def test_a_process_that_cannot_start_is_left_alone_until_the_stack_was_up(tmp_path: Path) -> None:
    child = Child("worker-0", tmp_path / "log")
    child.start(["sh", "-c", "exit 2"], {})
    child.poll(WAIT_S)
    assert child.exit_status == 2
    wait_for(lambda: child.may_start(was_up=True), "the next try")
    assert not child.may_start(was_up=False)


@pytest.mark.parametrize(("ignores", "status"), [("", -15), ("trap '' TERM; ", -9)])
def test_a_process_that_does_not_end_is_killed(tmp_path: Path, ignores: str, status: int) -> None:
    child = Child("worker-0", tmp_path / "log")
    child.start(["sh", "-c", f"{ignores}echo; exec sleep 600"], {})
    wait_for(lambda: child.log.exists() and child.log.read_text(), "it to run")
    child.stop(0.1 if status == -9 else WAIT_S)
    assert (child.pid, child.exit_status) == (0, status)


def test_a_log_does_not_grow_without_end(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    with log.open("ab") as written:
        written.write(b"first\n")
        written.flush()
        rotate(log, max_bytes=5)
        written.write(b"second\n")
    assert log.with_name("worker-0.log.1").read_text() == "first\n"
    assert log.read_text() == "second\n"
    rotate(log, max_bytes=7)
    assert log.read_text() == "second\n"


def test_a_reused_pid(tmp_path: Path) -> None:
    with member(tmp_path) as process:
        (earlier,) = stack_members(tmp_path)
        # As psutil remembers a process from which this one has taken the pid over.
        earlier._ident = (process.pid, earlier.create_time() - 1)
        (found,) = stack_members(tmp_path)
        found.terminate()
        assert process.wait() == -signal.SIGTERM


@contextmanager
def member(directory: Path, command: str = "echo; read x") -> Iterator[subprocess.Popen[bytes]]:
    """Runs a shell that belongs to the stack in this directory; yields once it has said a line."""
    environment = os.environ | {MARKER: str(directory)}
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", command], stdin=pipe, stdout=pipe, env=environment) as shell:
        assert shell.stdout
        shell.stdout.readline()
        try:
            yield shell
        finally:
            shell.kill()


def test_a_process_that_ignores_signals_is_killed_after_the_grace(tmp_path: Path) -> None:
    with member(tmp_path, "trap '' TERM; echo; read x") as process:
        assert [member.pid for member in stack_members(tmp_path)] == [process.pid]
        assert not stack_members(tmp_path.parent)
        said: list[str] = []
        assert stop_stack(tmp_path, said.append) == 1
        assert process.wait() == -signal.SIGKILL
    assert "killing 1 processes" in said[0]


def test_down_removes_a_directory_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = run_directory(6000)
    (directory / "models").mkdir(parents=True)
    (directory / "lock").touch()
    log = directory / "worker-0.log"
    log.touch()
    down({"NANO_PORT": "6000"})
    assert log.exists()
    log.unlink()
    down({"NANO_PORT": "6000"})
    assert not directory.exists()
