"""Another user of the host who gives processes the look of a stack's."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from deploy.native.processes import (
    MARKER,
    NAME,
    parent_processes,
    replace_supervisor,
    stack_members,
    stop_stack,
)
from deploy.stack import run_directory
from tests.other_user import OTHER_USER, needs_root, process_of_another_user, running
from tests.stack import ROOT
from tests.waiting import wait_for

from .conftest import Launcher, plan
from .test_commands import named

pytestmark = [needs_root, pytest.mark.system]

# A program that shows another process as its fork, and ignores the signal to restart.
IMPOSTOR = """
import os, signal, sys
from shared.process.published_state import PublishedState
os.setresuid({user}, {user}, {user})
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
state = PublishedState("parent")
state.show({{"pid": {victim}, "reason": "", "due": 0.0}})
print(flush=True)
sys.stdin.read()
"""


def of_stack(directory: Path, name: str) -> dict[str, str]:
    return {MARKER: str(directory.absolute()), NAME: name}


@pytest.mark.parametrize("users", [(OTHER_USER,) * 3, (OTHER_USER, 0, 0), (0, 0, OTHER_USER)])
def test_a_process_of_another_user_is_no_member_and_gets_no_signal(
    tmp_path: Path, users: tuple[int, ...]
) -> None:
    stack, _ = plan(directory=tmp_path)
    stack.save()
    with process_of_another_user(of_stack(tmp_path, "worker-0"), users) as process:
        assert not stack_members(tmp_path)
        assert not parent_processes(tmp_path)
        # A stack.json that is left of a crash is not enough to adopt it.
        assert replace_supervisor(tmp_path) is None
        assert stop_stack(tmp_path, print) == 0
        assert process.poll() is None


def test_up_runs_no_code_of_another_user_when_it_replaces_a_supervisor(
    launcher: Launcher, port: int
) -> None:
    directory = launcher.directory / run_directory(port)
    evil, proof = launcher.directory / "evil", launcher.directory / "proof"
    evil.mkdir()
    environment = of_stack(directory, "frontend-9") | {"PYTHONPATH": str(evil)}
    # Before the stack, because then it has a lower process id.
    with process_of_another_user(environment) as process:
        (evil / "sitecustomize.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
        launcher.succeed("up", "--port", port, "--services", "frontend")
        assert "frontend-9" not in launcher.ps(port)
        supervisor = named(launcher.members(port), "deploy.native.supervisor")
        supervisor.kill()
        psutil.wait_procs([supervisor])
        assert "has a supervisor again" in launcher.succeed("up", "--port", port)
        assert len(launcher.pids(port)) == 1
        frontend = launcher.members(port)[-1]
        frontend.kill()
        psutil.wait_procs([frontend])
        wait_for(lambda: launcher.serving(port) == 1, "a successor")
        launcher.succeed("down", "--port", port)
        assert process.poll() is None
    assert not proof.exists()


def test_restart_kills_no_process_that_another_user_shows_as_a_fork(
    launcher: Launcher, port: int
) -> None:
    launcher.succeed("up", "--port", port, "--services", "worker", NANO_DRAIN_TIMEOUT_S="0")
    directory = launcher.directory / run_directory(port)
    worker = named(launcher.members(port), "worker_svc")
    package = launcher.directory / "evil" / "worker_svc"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    environment = of_stack(directory, "worker-0")
    environment["PYTHONPATH"] = f"{package.parent}:{ROOT}"
    with subprocess.Popen(["sleep", "600"]) as victim:
        program = IMPOSTOR.format(user=OTHER_USER, victim=victim.pid)
        (package / "__main__.py").write_text(program)
        with running(worker.cmdline(), environment) as impostor:
            # The next worker has a higher process id than the impostor.
            worker.kill()
            psutil.wait_procs([worker])
            wait_for(lambda: launcher.serving(port) == 1, "a successor")
            said = launcher.succeed("restart", "--port", port, "--service", "worker")
            assert "restarted 1 processes" in said
            assert victim.poll() is None
            assert impostor.poll() is None
        victim.send_signal(signal.SIGKILL)


def test_a_stack_in_another_users_directory_is_left_alone(launcher: Launcher, port: int) -> None:
    directory = launcher.directory / run_directory(port)
    launcher.succeed("up", "--port", port, "--services", "frontend")
    before = launcher.members(port)
    os.chown(directory, OTHER_USER, OTHER_USER)
    refused = f"{run_directory(port)} belongs to user {OTHER_USER}"
    for command in ("up", "restart", "ps", "logs", "top"):
        assert launcher.fail(command, "--port", port) == f"{command}: {refused}\n"
    assert f"warning stacks {refused}" in " ".join(
        launcher("doctor", "--port", port).stdout.split()
    )
    assert launcher.members(port) == before
    # Its processes end, its files stay.
    assert refused in launcher.fail("down", "--port", port)
    assert not launcher.members(port)
    os.chown(directory, 0, 0)
    assert (directory / "stack.json").exists()
