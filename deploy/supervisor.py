"""Starts, queries and stops a stack's supervisord."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from supervisor.xmlrpc import Faults

from deploy.engines import link_missing_models, list_engines
from deploy.errors import LaunchError, SupervisorGoneError
from deploy.stack import Process, Stack, make_directory
from deploy.supervisor_config import write_config
from deploy.supervisor_rpc import ANSWER_S, already, supervisor_rpc
from shared.process.keeper_state import read_keeper_state

if TYPE_CHECKING:
    from deploy.plan import Environment

# Set in the environment of each process of a stack, so that they are found even if their supervisor
# was killed. Its value is the stack's directory.
MARKER = "NANOVLLM_STACK"
_POLL_S = 0.1
_STOP_POLL_S = 0.02


@dataclass(frozen=True)
class SupervisedProcess:
    """A process, as supervisord knows it."""

    name: str
    state: str = "STOPPED"  # RUNNING, EXITED, STOPPING, ... as supervisord calls them
    pid: int | None = None  # of the fork that serves (`shared.process.keeper`), or starts
    exit_status: int | None = None  # None: killed by a signal, or still running
    trouble: str = ""  # why there is no such fork, or why it was needed


def start_supervisor(
    stack: Stack, environment: Environment, *, tied: bool = False, temporary: bool = False
) -> subprocess.Popen[bytes]:
    """Starts supervisord, which starts the services, in the background.

    If `tied`, it ends when this process does, and removes the stack's directory if that is
    `temporary`. If not, it is started again when it dies (`deploy.watchdog`).
    """
    directory = stack.directory
    make_directory(directory)
    _clear(directory, "*.log*")
    stack.set_up(False)
    stack.save()
    link_missing_models(stack)
    if stack.count("scheduler"):
        list_engines(stack, range(stack.engines))
    write_config(stack, tied)
    options = ["--tied-to", str(os.getpid())] if tied else []
    options += ["--remove"] if temporary else []
    return _run_supervisor(directory, environment | {MARKER: str(directory.absolute())}, options)


def start_supervisor_again(directory: Path) -> subprocess.Popen[bytes]:
    """Starts the supervisord of a stack in the background that has lost its own, in this process's
    environment, which is the stack's."""
    for leftover in directory.glob("*.sock"):
        leftover.unlink(missing_ok=True)
    return _run_supervisor(directory, dict(os.environ), [])


def _run_supervisor(
    directory: Path, environment: Environment, options: list[str]
) -> subprocess.Popen[bytes]:
    config = directory / "supervisord.conf"
    with (directory / "supervise.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.supervise", str(config), *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in this terminal is not meant for it
        )


def supervised_processes(directory: Path, timeout_s: float = ANSWER_S) -> list[SupervisedProcess]:
    """The processes that supervisord runs, in its order.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer, or it does not answer.
    """
    with supervisor_rpc(directory, timeout_s) as supervisor:
        infos: Any = supervisor.getAllProcessInfo()
    return [_supervised(info) for info in infos]


def _supervised(info: dict[str, Any]) -> SupervisedProcess:
    pid = info["pid"] or None  # 0: it does not run
    state = read_keeper_state(pid) if pid else None
    return SupervisedProcess(
        name=info["name"],
        state=info["statename"],
        pid=(state.pid or None) if state else pid,
        exit_status=info["exitstatus"] if info["statename"] == "EXITED" else None,
        trouble=state.trouble if state else "",
    )


def is_running(directory: Path) -> bool:
    """Whether a supervisord with processes to run answers."""
    try:
        return bool(supervised_processes(directory))
    except SupervisorGoneError:
        return False


def stop_process(directory: Path, process: Process) -> None:
    """Has supervisord stop a process, or kill it after its grace period; returns once it has ended.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer.
    """
    # It answers once the process has ended.
    with supervisor_rpc(directory, timeout_s=None) as supervisor, already(Faults.NOT_RUNNING):
        supervisor.stopProcess(_full_name(process))


def start_process(directory: Path, process: Process) -> None:
    """Has supervisord start a process that is not running.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer.
    """
    with supervisor_rpc(directory) as supervisor, already(Faults.ALREADY_STARTED):
        supervisor.startProcess(_full_name(process), False)  # its health says when it serves


def _full_name(process: Process) -> str:
    return f"{process.group}:{process.name}"


def stack_members(directory: Path) -> list[psutil.Process]:
    """All living processes of the stack: the services, and supervisord if it is alive."""
    marker = str(directory.absolute())
    members = []
    for process in _running():
        try:
            if process.environ().get(MARKER) == marker:
                members.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, a zombie, or somebody else's
            continue
    return members


def stop_stack(directory: Path, grace_s: float, report: Callable[[str], None]) -> int:
    """Ends every process of the stack: supervisord stops them in order; those out of its reach,
    and those still there after `grace_s` seconds, are killed. Idempotent.

    Returns:
        The number of processes there were.
    """
    members = set(stack_members(directory))
    told: set[psutil.Process] = set()
    deadline = time.monotonic() + grace_s
    with suppress(LaunchError):
        _stop_groups(Stack.load(directory), deadline)
    # A process that is ending no longer has an environment to be found by, but still its ports.
    while alive := [process for process in members if _is_alive(process)]:
        pids = {process.pid for process in alive}
        for process in alive:
            # supervisord, one that the watchdog has just started, or a process that has lost it.
            if process not in told and _parent(process) not in pids:
                _signal(process.terminate)
                told.add(process)
        if time.monotonic() > deadline:
            report(f"killing {len(alive)} processes that did not end within {grace_s:.0f} s")
            for process in alive:
                _signal(process.kill)
            deadline = float("inf")
        time.sleep(_POLL_S)
        members |= set(stack_members(directory))
    _clear(directory, "supervisord.pid", "stack.json", "up")
    return len(members)


def _stop_groups(stack: Stack, deadline: float) -> None:
    """Has supervisord stop its groups, those that call others first. By itself it would look only
    once a second whether a group has ended, and it is told to end last.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer.
    """
    starting_order = dict.fromkeys(process.group for process in stack.processes())
    with supervisor_rpc(stack.directory) as supervisor:
        for group in ("watchdog", *reversed(starting_order)):
            found = [each for each in supervisor.getAllProcessInfo() if each["group"] == group]
            with already(Faults.BAD_NAME):
                supervisor.stopProcessGroup(group, False)
            keepers = [_found(each["pid"]) for each in found if each["pid"]]
            while any(map(_is_alive, filter(None, keepers))) and time.monotonic() < deadline:
                time.sleep(_STOP_POLL_S)


def _found(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _clear(directory: Path, *patterns: str) -> None:
    """Removes what is only of use to a stack that runs, and what fits the patterns."""
    for pattern in (*patterns, "*.sock", "metrics/*", "models/*", "engines"):
        for leftover in directory.glob(pattern):
            leftover.unlink(missing_ok=True)


def _running() -> Iterator[psutil.Process]:
    """Yields all processes of this machine."""
    # psutil remembers those of the last call, even if another has got the same pid since.
    psutil.process_iter.cache_clear()
    return psutil.process_iter()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return
