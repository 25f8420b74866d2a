"""Starts the processes of a stack, and starts again those that end:
`python -m deploy.native.supervisor DIRECTORY [--tied-to PID] [--remove]`.

`stack.json` in the stack's directory says which processes the stack has, and `stopped` which of
them a command has stopped. The supervisor reads both whenever a process has ended. It never stops
a process: commands do (`deploy.native.processes`). It adopts processes that run already, so nothing
ends when the supervisor does, and `make up` starts another.

With `--tied-to`, the stack belongs to the process PID: once that is gone, however it ended, the
stack is stopped in order and, with `--remove`, its directory removed. Such a stack ends with its
supervisor, too.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, ClassVar

import structlog
from prometheus_client.metrics_core import Metric

from deploy.errors import LaunchError
from deploy.native.processes import (
    BEAT_S,
    BOARD,
    NAME,
    RunningProcess,
    parent_processes,
    stack_grace_s,
    stop_stack,
    stopped_processes,
    supervisor_lock,
)
from deploy.stack import MODULES, Process, Stack
from shared.backoff import Backoff
from shared.config import ServiceSettings, settings_or_exit
from shared.process.board import Board
from shared.process.death_signal import end_with_parent
from shared.process.fork import CANNOT_START
from shared.process.run import raise_descriptor_limit
from shared.telemetry.logging import configure_logging
from shared.telemetry.metrics import ServiceMetrics
from shared.telemetry.metrics_endpoint import open_endpoint

log = structlog.get_logger(__name__)

# Between tries, doubled after each, until a process has run for a while.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 10.0
_LASTING_S = 10.0
_MAX_LOG_BYTES = 10 << 20
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SupervisorSettings(ServiceSettings):
    """The stack's settings that the supervisor reads."""

    program: ClassVar[str] = "python -m deploy.native.supervisor"


class Child:
    """A process of the stack, from one start to the next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0  # 0: it does not run
        self.pidfd = -1
        self._child: subprocess.Popen[bytes] | None = None  # None also if it was adopted
        self._exit_status: int | None = None
        self._failure = ""  # why it could not be run
        self._has_run = False
        self.restarts = 0
        self._started = self.due = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)

    def adopt(self, pid: int) -> None:
        """Takes over a process that another supervisor has started."""
        with suppress(ProcessLookupError):
            self.pidfd = os.pidfd_open(pid)
            self.pid, self._has_run, self._started = pid, True, time.monotonic()

    def start(self, command: list[str], output: Path) -> None:
        self._started, self._failure, self._exit_status = time.monotonic(), "", None
        self.restarts += self._has_run
        self._has_run = True
        environment = os.environ | {NAME: self.name}
        try:
            with _open_log(output) as file:
                self._child = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    process_group=0,
                )
            self.pid = self._child.pid
            self.pidfd = os.pidfd_open(self.pid)
            log.info("process started", process=self.name, pid=self.pid)
        except OSError as error:  # no memory, no descriptors
            self._failure = str(error)
            self._plan_next()

    def may_start(self, was_up: bool) -> bool:
        """Whether to start it now. Before the stack was up, what cannot start is left alone: the
        launcher tells the user why."""
        given_up = self._exit_status == CANNOT_START and not was_up
        return not self.pid and not given_up and time.monotonic() >= self.due

    def poll(self) -> None:
        """Notices that the process has ended."""
        if not self.pid or not _is_readable(self.pidfd):
            return
        os.close(self.pidfd)
        self._exit_status = self._child.wait() if self._child else None
        log.error("process ended", process=self.name, pid=self.pid, exit_status=self._exit_status)
        self.pid, self.pidfd, self._child = 0, -1, None
        self._plan_next()

    def _plan_next(self) -> None:
        lasted = time.monotonic() - self._started > _LASTING_S
        if lasted:
            self._backoff.reset()
        self.due = time.monotonic() + (0.0 if lasted else self._backoff.next_s())

    def described(self, stopped: bool) -> RunningProcess:
        if self.pid:
            return RunningProcess(self.name, "RUNNING", self.pid)
        if self._failure:
            return RunningProcess(self.name, "FAILED", trouble=f"cannot be run: {self._failure}")
        state = "STOPPED" if stopped or not self._has_run else "EXITED"
        return RunningProcess(self.name, state, exit_status=self._exit_status)


class Supervisor:
    """Keeps the processes running that a stack's directory asks for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._board = Board(BOARD)
        self._children: dict[str, Child] = {}
        self._is_told_to_stop = False
        self._woken, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._waking)
        # A child's end wakes the loop through its pidfd, and commands do with SIGCONT. SIGHUP is
        # handled rather than ignored: children would inherit that.
        for number in (signal.SIGCONT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self._is_told_to_stop = True

    def start(self) -> None:
        """Adopts the processes that run, and starts the others."""
        for name, parent in parent_processes(self._directory).items():
            self._child(name).adopt(parent.pid)
        self._turn()

    def run(self) -> None:
        """Supervises until SIGTERM or SIGINT."""
        while not self._is_told_to_stop:
            self._turn()
            self._sleep()

    def _turn(self) -> None:
        for child in self._children.values():
            child.poll()
        stack, stopped = self._read()
        wanted = {each.name: each for each in stack.processes()} if stack else {}
        for name, process in wanted.items():
            child = self._child(name)
            if stack and name not in stopped and child.may_start(stack.was_up):
                child.start(command(stack, process), stack.log(name))
        for name in [*self._children]:
            if name not in wanted and not self._children[name].pid:
                del self._children[name]
        for log_file in self._directory.glob("*.log"):
            rotate(log_file)
        shown = [vars(each.described(each.name in stopped)) for each in self._children.values()]
        self._board.show({"beat": time.monotonic(), "processes": shown})

    def restarts(self) -> dict[str, int]:
        """How often each process has been started again, by name."""
        return {name: child.restarts for name, child in [*self._children.items()]}

    def _child(self, name: str) -> Child:
        return self._children.setdefault(name, Child(name))

    def _read(self) -> tuple[Stack | None, set[str]]:
        """The stack as it is to be, None while it is being stopped, and what is to be stopped."""
        try:
            return Stack.load(self._directory), stopped_processes(self._directory)
        except (LaunchError, OSError):
            return None, set()

    def _sleep(self) -> None:
        """Returns when a process has ended, a signal has arrived, or something is due."""
        due = [each.due for each in self._children.values() if not each.pid]
        until = [each - time.monotonic() for each in due if each > time.monotonic()]
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        for child in self._children.values():
            if child.pid:
                poll.register(child.pidfd, select.POLLIN)
        poll.poll(min([BEAT_S, *until]) * 1000 + 1)
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)


def command(stack: Stack, process: Process) -> list[str]:
    """The command line of a process. Settings that all share are in the environment, which has
    those of engine 0; the command line has what sets the process apart."""
    flags: dict[str, object] = {}
    if process.engine:
        flags["index"] = process.index
        flags["engine-name"] = process.engine
        flags["worker-addresses"] = ",".join(stack.worker_addresses_of(process.engine))
        if process.service == "scheduler":
            flags["scheduler-address"] = process.address
        elif stack.master_ports:
            flags["master-port"] = stack.master_ports[process.engine - 1]
    if stack.model_path and process.service != "page":
        flags["model"] = stack.model_link(process.engine)
    if process.service == "worker":
        if stack.engines > 1:
            flags["engines-on-host"] = stack.engines
        flags["rank"] = process.index % stack.tp
    if process.service == "frontend":
        flags["index"] = process.index
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if process.service == "page":
        words = [str(stack.directory)]
    # -P: modules come from the installation, never from the user's current directory.
    return [sys.executable, "-P", "-m", MODULES[process.service], *words]


def _open_log(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError:  # a full disk: the process runs without a log
        return Path(os.devnull).open("ab")


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def rotate(log_file: Path, max_bytes: int = _MAX_LOG_BYTES) -> None:
    """Moves the text of a long log to the file beside it. Its process goes on writing to the file
    that it has open, which is emptied: lines written meanwhile are lost."""
    with suppress(OSError):
        if log_file.stat().st_size > max_bytes:
            shutil.copyfile(log_file, log_file.with_name(f"{log_file.name}.1"))
            os.truncate(log_file, 0)


class SupervisorMetrics(ServiceMetrics):
    """Prometheus' own `up` tells whether the supervisor runs and answers."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__()
        self._supervisor = supervisor

    def families(self) -> Iterator[Metric]:
        restarts = [((name,), count) for name, count in self._supervisor.restarts().items()]
        help_text = "Times that the supervisor has started a process again."
        yield self._counters("process_restarts", help_text, ("process",), restarts)


def main() -> int:
    parser = argparse.ArgumentParser(prog=SupervisorSettings.program)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tied-to", type=int, metavar="PID")
    parser.add_argument("--remove", action="store_true", help="the directory, at the end")
    args = parser.parse_args()
    settings = settings_or_exit(SupervisorSettings, [])
    configure_logging(settings, "supervisor")
    if args.tied_to is not None:
        end_with_parent(args.tied_to, signal.SIGTERM)
    raise_descriptor_limit()
    if (owner := supervisor_lock(args.directory)) is not None:
        log.error("cannot start", reason=f"process {owner} supervises {args.directory} already")
        return CANNOT_START
    supervisor = Supervisor(args.directory)
    supervisor.start()
    try:
        if endpoint := open_endpoint(settings, "supervisor", 0, SupervisorMetrics(supervisor)):
            endpoint.serve(0)
        supervisor.run()
    finally:
        if args.tied_to is not None:
            grace_s = stack_grace_s(args.directory)
            stop_stack(args.directory, grace_s, log.error, spared=os.getpid())
        if args.remove:
            shutil.rmtree(args.directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
