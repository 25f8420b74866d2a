"""Starts, queries and stops a stack's supervisord."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from supervisor.xmlrpc import Faults, SupervisorTransport

from deploy.errors import SupervisorGoneError
from deploy.stack import Process, Stack, make_directory
from deploy.supervisor_config import control_socket, render_config

if TYPE_CHECKING:
    from deploy.plan import Environment

# Set in the environment of each process of a stack, so that they are found even if their supervisor
# was killed. Its value is the stack's directory.
MARKER = "NANOVLLM_STACK"
_POLL_S = 0.1


@dataclass(frozen=True)
class SupervisedProcess:
    """A process, as supervisord knows it."""

    name: str
    state: str  # RUNNING, EXITED, STOPPING, ... as supervisord calls them
    pid: int | None  # of the fork that serves (`shared.process`)
    exit_status: int | None  # None: killed by a signal, or still running


def start_supervisor(
    stack: Stack, environment: Environment, *, private: bool = False
) -> subprocess.Popen[bytes]:
    """Starts supervisord, which starts the services, in the background.

    If `private`, it ends when this process does, and removes the stack's directory.
    """
    directory = stack.directory
    make_directory(directory)
    for old in (*directory.glob("*.log*"), *directory.glob("*.sock")):
        old.unlink()
    stack.save()
    config = directory / "supervisord.conf"
    config.write_text(render_config(stack), encoding="utf-8")
    tie = ["--tied-to", str(os.getpid())] if private else []
    with (directory / "supervise.log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.supervise", str(config), *tie],
            env=environment | {MARKER: str(directory.absolute())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in this terminal is not meant for it
        )


def supervised_processes(directory: Path) -> list[SupervisedProcess]:
    """The processes that supervisord runs, in its order.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer.
    """
    with _supervisor(directory) as supervisor:
        infos: Any = supervisor.getAllProcessInfo()
    forks = {process.info["ppid"]: process.pid for process in _running(["ppid"])}
    return [
        SupervisedProcess(
            name=info["name"],
            state=info["statename"],
            # A process that does not run has pid 0, which is also the parent of the kernel's own.
            pid=forks.get(info["pid"], info["pid"]) if info["pid"] else None,
            exit_status=info["exitstatus"] if info["statename"] == "EXITED" else None,
        )
        for info in infos
    ]


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
    with _supervisor(directory) as supervisor, _already(Faults.NOT_RUNNING):
        supervisor.stopProcess(_full_name(process))


def start_process(directory: Path, process: Process) -> None:
    """Has supervisord start a process that is not running.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer.
    """
    with _supervisor(directory) as supervisor, _already(Faults.ALREADY_STARTED):
        supervisor.startProcess(_full_name(process), False)  # its health says when it serves


@contextmanager
def _supervisor(directory: Path) -> Iterator[Any]:
    """Yields supervisord's RPC methods."""
    transport = SupervisorTransport(serverurl=f"unix://{control_socket(directory)}")
    proxy = xmlrpc.client.ServerProxy("http://localhost", transport=transport)
    try:
        yield proxy.supervisor
    except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
        raise SupervisorGoneError(f"no supervisord answers in {directory}: {error}") from error
    finally:
        transport.close()


@contextmanager
def _already(code: int) -> Iterator[None]:
    """Ignores the fault `code`, with which supervisord refuses to do what is already done."""
    try:
        yield
    except xmlrpc.client.Fault as fault:
        if fault.faultCode != code:
            raise


def _full_name(process: Process) -> str:
    return f"{process.service}:{process.name}"


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
    pids = {process.pid for process in members}
    for process in members:
        if _parent(process) not in pids:  # supervisord, or a process that has lost it
            _signal(process.terminate)
    deadline = time.monotonic() + grace_s
    # A process that is ending no longer has an environment to be found by, but still its ports.
    while alive := [process for process in members if _is_alive(process)]:
        if time.monotonic() > deadline:
            report(f"killing {len(alive)} processes that did not end within {grace_s:.0f} s")
            for process in alive:
                _signal(process.kill)
            deadline = float("inf")
        time.sleep(_POLL_S)
        members |= set(stack_members(directory))
    for leftover in (directory / "supervisord.pid", directory / "stack.json"):
        leftover.unlink(missing_ok=True)
    for socket in directory.glob("*.sock"):
        socket.unlink(missing_ok=True)
    return len(members)


def _running(attributes: list[str] | None = None) -> Iterator[psutil.Process]:
    """Yields all processes of this machine, with these `attributes` in their `info`."""
    # psutil remembers those of the last call, even if another has got the same pid since.
    psutil.process_iter.cache_clear()
    return psutil.process_iter(attributes)


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
