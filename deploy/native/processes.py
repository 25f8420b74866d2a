"""Finds, starts and stops the processes of a stack, and starts the supervisor
(`deploy.native.supervisor`), which restarts processes that end."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from deploy.child import open_log
from deploy.engines import list_engines
from deploy.errors import LaunchError, SupervisorGoneError
from deploy.native.ending import (
    KILL_AFTER_S,
    end_in_order,
    is_alive,
    own_processes,
    send,
    wait_ended,
)
from deploy.native.environment import (
    ENVIRONMENT_FILE,
    kept_environment,
    load_environment,
    save_environment,
)
from deploy.plan import Environment
from deploy.stack import (
    SERVICES,
    Stack,
    make_directory,
    open_file,
    own_directory,
    replace_file,
)
from shared.config import PREFIX
from shared.process.owner import is_own
from shared.process.parent_state import read_parent_state
from shared.process.published_state import read_published_state

# Set in the environment of each process of a stack: the stack's directory, and the process's name.
# Commands find processes by these variables, with or without a supervisor.
MARKER = "NANOVLLM_STACK"
NAME = "NANOVLLM_PROCESS"

_TIED = f"{PREFIX}EXIT_WITH_PARENT"  # set in the environment of a stack that ends with a process

STATE_NAME = "supervisor"  # by which the supervisor publishes its state
BEAT_S = 1.0  # maximum time between its updates of its state
_SILENT_S = 5.0  # without an update
_LOCK_FILE = "supervisor.lock"
_LOCK = "hhqqi"  # struct flock: type, whence, start, length, process id
_POLL_S = 0.02


@dataclass(frozen=True)
class RunningProcess:
    """A process of a stack as the supervisor knows it."""

    name: str
    state: str = "STOPPED"  # or RUNNING; EXITED: to be restarted; FAILED: it cannot be run
    pid: int | None = None  # of the service fork (`shared.process.parent_process`)
    exit_status: int | None = None  # of the last run that ended; None: unknown
    trouble: str = ""  # why there is no fork, or why the last one ended


@dataclass(frozen=True)
class SupervisorState:
    """The supervisor of a stack. `state`: RUNNING, or SILENT if it is stopped or hangs."""

    pid: int
    state: str
    processes: tuple[RunningProcess, ...]


def start_supervisor(
    stack: Stack, environment: Environment, *, tied: bool = False, temporary: bool = False
) -> subprocess.Popen[bytes]:
    """Starts the supervisor, which starts the services, in the background.

    If `tied`, the stack ends when this process does, and its directory is removed if it is
    `temporary`. If not, only `stop_stack` ends the stack.
    """
    directory = stack.directory
    make_directory(directory)
    _clear(directory, "*.log*")
    stack.save()
    if stack.http_port:
        make_directory(stack.responses_directory)
    if stack.count("scheduler"):
        list_engines(stack, range(stack.engines))
    options = []
    if tied:
        environment = environment | {_TIED: "1"}
        options = ["--tied-to", str(os.getpid()), *(["--remove"] if temporary else [])]
    save_environment(directory, environment)
    # Only an untied stack gets another supervisor, which must not make a difference.
    kept = environment if tied else kept_environment(environment)
    return _run_supervisor(directory, kept, options)


def replace_supervisor(directory: Path) -> subprocess.Popen[bytes] | None:
    """Starts a supervisor for a stack in the background that has processes, but no supervisor or a
    silent one. Returns None if there is nothing to do.

    Raises:
        LaunchError: other users may have changed the stack's directory or the files in it.
    """
    supervisor = find_supervisor(directory)
    if supervisor and supervisor.state == "RUNNING":
        return None
    if not parent_processes(directory) or not (directory / "stack.json").exists():
        return None
    Stack.load(directory)
    environment = load_environment(directory)
    if _TIED in environment:  # these processes end with their supervisor
        return None
    if supervisor:
        with suppress(psutil.NoSuchProcess):
            silent = psutil.Process(supervisor.pid)
            silent.kill()
            wait_ended([silent], KILL_AFTER_S)
    return _run_supervisor(directory, environment, [])


def _run_supervisor(
    directory: Path, environment: Environment, options: list[str]
) -> subprocess.Popen[bytes]:
    with open_log(directory / "supervisor.log") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.native.supervisor", str(directory), *options],
            env=environment | {MARKER: str(directory.absolute())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in this terminal must not reach it
        )


def supervisor_lock(directory: Path) -> int | None:
    """Takes the lock of a stack's supervisor until this process ends.

    Returns:
        None, or the process id of the supervisor that holds the lock.
    """
    descriptor = open_file(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _lock_owner(descriptor)
    return None


def _lock_owner(descriptor: int) -> int | None:
    asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_, pid = struct.unpack(_LOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def find_supervisor(directory: Path) -> SupervisorState | None:
    """Returns the state of a stack's supervisor; None if there is none.

    Raises:
        LaunchError: other users may have changed the stack's directory.
    """
    try:
        with open(open_file(directory / _LOCK_FILE), "rb") as file:
            pid = _lock_owner(file.fileno())
    except FileNotFoundError:
        return None
    if pid is None or not is_own(pid):
        return None
    shown = read_published_state(pid, STATE_NAME) or read_published_state(
        pid, STATE_NAME
    )  # again, if it was being written
    if shown is None:
        return SupervisorState(pid, "STARTING", ())
    silent = time.monotonic() - shown["beat"] > _SILENT_S
    found = tuple(_with_fork(RunningProcess(**each)) for each in shown["processes"])
    return SupervisorState(pid, "SILENT" if silent else "RUNNING", found)


def _with_fork(process: RunningProcess) -> RunningProcess:
    """Replaces a parent process by its service fork."""
    state = read_parent_state(process.pid) if process.pid else None
    if state is None:
        return process
    return replace(process, pid=state.pid or None, trouble=state.trouble)


def running_processes(directory: Path) -> list[RunningProcess]:
    """Returns the processes of a stack, whether or not it has a supervisor.

    Raises:
        SupervisorGoneError: there is no supervisor, and no process.
    """
    supervisor = find_supervisor(directory)
    if supervisor and supervisor.state == "RUNNING":
        return list(supervisor.processes)
    found = parent_processes(directory)
    if not found and not supervisor:
        raise SupervisorGoneError(f"no stack runs in {directory}")
    return [_with_fork(RunningProcess(name, "RUNNING", each.pid)) for name, each in found.items()]


def is_running(directory: Path) -> bool:
    """Whether a supervisor runs and has processes."""
    supervisor = find_supervisor(directory)
    return supervisor is not None and bool(supervisor.processes)


def stop_timeout_s(stack: Stack) -> float:
    """Seconds that a process has to end on its own before it is killed."""
    return stack.drain_timeout_s + KILL_AFTER_S


def stop_processes(stack: Stack, names: Collection[str]) -> None:
    """Stops these processes, clients before the servers they call; returns once they have ended.
    The supervisor does not restart them until `start_processes`."""
    _set_stopped(stack, stopped_processes(stack.directory) | set(names))
    while chosen := {  # again, because a killed process may have left a successor
        name: parent for name, parent in parent_processes(stack.directory).items() if name in names
    }:
        end_in_order(chosen, stop_timeout_s(stack))
    # A process whose end the supervisor sees only after `start_processes` would seem to have failed
    # and start after a pause.
    while _has_running(find_supervisor(stack.directory), names):
        time.sleep(_POLL_S)


def _has_running(supervisor: SupervisorState | None, names: Collection[str]) -> bool:
    """Whether a supervisor that is not silent thinks that one of these processes runs."""
    if supervisor is None or supervisor.state == "SILENT":
        return False
    return any(each.state == "RUNNING" and each.name in names for each in supervisor.processes)


def start_processes(stack: Stack, names: Collection[str]) -> None:
    """Makes the supervisor start these processes.

    Raises:
        SupervisorGoneError: there is no supervisor.
    """
    _set_stopped(stack, stopped_processes(stack.directory) - set(names))
    wake_supervisor(stack.directory)


def wake_supervisor(directory: Path) -> None:
    """Makes the supervisor read now which processes are to run.

    Raises:
        SupervisorGoneError: there is no supervisor.
    """
    supervisor = find_supervisor(directory)
    if supervisor is None:
        raise SupervisorGoneError(
            f"no supervisor runs in {directory}; make up starts one for the stack"
        )
    # Any other signal would harm a supervisor that does not handle it yet.
    with suppress(ProcessLookupError):
        os.kill(supervisor.pid, signal.SIGCONT)


def stopped_processes(directory: Path) -> set[str]:
    """The names of the processes that are to stay stopped."""
    try:
        with open(open_file(directory / "stopped"), encoding="utf-8") as file:
            return set(file.read().split())
    except FileNotFoundError:
        return set()


def _set_stopped(stack: Stack, names: set[str]) -> None:
    replace_file(stack.directory / "stopped", " ".join(sorted(names)))


def parent_processes(directory: Path) -> dict[str, psutil.Process]:
    """Returns the living processes of a stack by name, without their forks."""
    named: dict[str, list[psutil.Process]] = {}
    for process in stack_members(directory):
        with suppress(psutil.Error, OSError):
            if name := process.environ().get(NAME):
                named.setdefault(name, []).append(process)
    return {name: _oldest(processes) for name, processes in named.items()}


def _oldest(processes: list[psutil.Process]) -> psutil.Process:
    """Returns the process that is not a child of another one."""
    pids = {each.pid for each in processes}
    return next((each for each in processes if _parent(each) not in pids), processes[0])


def stack_members(directory: Path) -> list[psutil.Process]:
    """Returns all living processes of the stack, including the supervisor. A process of another
    user is none of them, whatever its environment says."""
    marker = str(directory.absolute())
    members = []
    for process in own_processes():
        with suppress(psutil.Error, OSError):  # it has ended, or is a zombie
            # If the process still runs, all answers were its own.
            if process.environ().get(MARKER) == marker and process.is_running():
                members.append(process)
    return members


def stop_stack(directory: Path, report: Callable[[str], None], spared: int = 0) -> int:
    """Stops all processes of the stack, clients before the servers they call. Kills those that
    still run after the time that all services need one after another. Idempotent.

    Args:
        spared: the process id of a member that is not to be stopped.

    Returns:
        The number of processes that ran.
    """
    members = _others(directory, spared)
    signalled: set[psutil.Process] = set()
    grace_s, began = 0.0, time.monotonic()
    with suppress(LaunchError):
        limit_s = stop_timeout_s(Stack.load(directory))
        grace_s = len(SERVICES) * limit_s + KILL_AFTER_S
        (directory / "stack.json").unlink()  # from now on the supervisor starts nothing
        end_in_order(parent_processes(directory), limit_s, began + grace_s)
    deadline = began + grace_s
    # A process that is ending may have lost its environment, but still has its ports.
    while alive := [process for process in members if is_alive(process)]:
        pids = {process.pid for process in alive}
        for process in alive:
            # The supervisor, or a process that has lost its parent.
            if process not in signalled and _parent(process) not in pids:
                send(process.terminate)
                signalled.add(process)
        if time.monotonic() > deadline:
            report(f"killing {len(alive)} processes that did not end within {grace_s:.0f} s")
            for process in alive:
                send(process.kill)
            deadline = float("inf")
        time.sleep(_POLL_S)
        members |= _others(directory, spared)
    _clear(directory, _LOCK_FILE, ENVIRONMENT_FILE, "stack.json", "stopped")
    return len(members)


def _others(directory: Path, spared: int) -> set[psutil.Process]:
    return {each for each in stack_members(directory) if each.pid != spared}


def _clear(directory: Path, *patterns: str) -> None:
    """Removes files that only a running stack needs, and those that match `patterns`."""
    with suppress(FileNotFoundError), own_directory(directory):
        for pattern in (*patterns, "*.new", "*.sock", "metrics/*", "engines"):
            for leftover in directory.glob(pattern):
                leftover.unlink(missing_ok=True)


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None
