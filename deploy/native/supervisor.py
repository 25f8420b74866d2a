"""Starts the processes of a stack, and restarts those that end:
`python -m deploy.native.supervisor DIRECTORY [--tied-to PID] [--remove]`.

In the stack's directory, `stack.json` lists the processes of the stack, and `stopped` those that a
command has stopped. The supervisor reads both whenever a process has ended. It never stops a
process: commands do (`deploy.native.processes`). No process ends with the supervisor: `make up`
starts another one, which adopts the processes that run.

With `--tied-to`, the supervisor stops the stack in order once the process PID has ended for any
reason and, with `--remove`, removes its directory. Such a stack ends with its supervisor, too.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from prometheus_client.metrics_core import Metric

from deploy.child import Child, rotate
from deploy.errors import LaunchError
from deploy.native.processes import (
    BEAT_S,
    NAME,
    STATE_NAME,
    RunningProcess,
    parent_processes,
    stop_stack,
    stopped_processes,
    supervisor_lock,
)
from deploy.stack import MODULES, Process, Stack
from shared.config import ServiceSettings, settings_or_exit
from shared.process.death_signal import adopt_orphans, end_with_parent
from shared.process.fork import CANNOT_START
from shared.process.published_state import PublishedState
from shared.process.run import raise_descriptor_limit
from shared.telemetry.logging import configure_logging
from shared.telemetry.metrics import ServiceMetrics
from shared.telemetry.metrics_endpoint import open_endpoint

log = structlog.get_logger(__name__)


class Supervisor:
    """Keeps the processes running that a stack's directory lists."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._published = PublishedState(STATE_NAME)
        self._children: dict[str, Child] = {}
        self._is_stopping = False
        self._woken, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._waking)
        # A child's end wakes the loop through its pidfd, a command through SIGCONT. SIGHUP has a
        # handler, because children would inherit an ignored signal.
        for number in (signal.SIGCONT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self._is_stopping = True

    def start(self) -> None:
        """Adopts the processes that run, and starts the others."""
        for name, parent in parent_processes(self._directory).items():
            self._child(name).adopt(parent.pid)
        self._turn()

    def run(self) -> None:
        """Supervises until SIGTERM or SIGINT."""
        while not self._is_stopping:
            self._turn()
            self._sleep()

    def _turn(self) -> None:
        for child in self._children.values():
            child.poll()
            child.follow()
        self._reap()
        stack, stopped = self._read()
        wanted = {each.name: each for each in stack.processes()} if stack else {}
        for name, process in wanted.items():
            child = self._child(name)
            if name in stopped:
                child.forget_failures()
            if stack and name not in stopped and child.may_start(stack.was_up):
                child.start(command(stack, process), os.environ | {NAME: name})
        for name in [*self._children]:
            if name not in wanted and not self._children[name].pid:
                del self._children[name]
        for log_file in self._directory.glob("*.log"):
            rotate(log_file)
        shown = [vars(_described(child, name in stopped)) for name, child in self._children.items()]
        self._published.show({"beat": time.monotonic(), "processes": shown})

    def _reap(self) -> None:
        """Forgets orphans that have ended, such as forks of a parent process that was killed."""
        known = {child.pid for child in self._children.values()}
        with suppress(ChildProcessError):
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (found := os.waitid(os.P_ALL, 0, flags)) and found.si_pid not in known:
                os.waitpid(found.si_pid, 0)

    def restarts(self) -> dict[str, int]:
        """Returns how often each process has been restarted, by name."""
        return {name: max(child.starts - 1, 0) for name, child in [*self._children.items()]}

    def _child(self, name: str) -> Child:
        return self._children.setdefault(name, Child(name, self._directory / f"{name}.log"))

    def _read(self) -> tuple[Stack | None, set[str]]:
        """Returns the wanted stack, None while it is being stopped, and the stopped processes."""
        try:
            return Stack.load(self._directory), stopped_processes(self._directory)
        except (LaunchError, OSError):
            return None, set()

    def _sleep(self) -> None:
        """Returns when a process has ended, a signal has arrived, or a start or beat is due."""
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


def _described(child: Child, stopped: bool) -> RunningProcess:
    if child.pid:
        return RunningProcess(child.name, "RUNNING", child.pid, child.exit_status)
    if child.failure:
        return RunningProcess(child.name, "FAILED", trouble=f"cannot be run: {child.failure}")
    state = "STOPPED" if stopped or not child.starts else "EXITED"
    return RunningProcess(child.name, state, exit_status=child.exit_status)


def command(stack: Stack, process: Process) -> list[str]:
    """Returns the command line of a process, with the settings that only this process has. The
    environment has the common settings and those of engine 0."""
    flags: dict[str, object] = {}
    if process.engine:
        flags["index"] = process.index
        flags["engine-name"] = process.engine
        flags["worker-addresses"] = ",".join(stack.worker_addresses_of(process.engine))
        if process.service == "scheduler":
            flags["scheduler-address"] = process.address
        elif stack.master_ports:
            flags["master-port"] = stack.master_ports[process.engine - 1]
    if stack.model_path and process.service != "dashboard":
        flags["model"] = stack.model_of(process.engine)
    if process.service == "worker":
        if stack.engines > 1:
            flags["engines-on-host"] = stack.engines
        flags["rank"] = process.index % stack.ranks_per_engine
        if stack.num_ranks < stack.ranks_per_engine:
            flags["ranks-on-host"] = stack.num_ranks
    if process.service == "frontend":
        flags["index"] = process.index
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if process.service == "dashboard":
        words = [str(stack.directory)]
    # -P: modules come from the installation, never from the user's current directory.
    return [sys.executable, "-P", "-m", MODULES[process.service], *words]


class SupervisorMetrics(ServiceMetrics):
    """Metrics of the supervisor. Prometheus' own `up` shows whether it runs and answers.

    `restarts` returns how often each process has been restarted, by name.
    """

    def __init__(self, restarts: Callable[[], Mapping[str, int]]) -> None:
        super().__init__()
        self._process_restarts = restarts

    def families(self) -> Iterator[Metric]:
        restarts = [((name,), count) for name, count in self._process_restarts().items()]
        help_text = "Restarts of a process by the supervisor."
        yield self._counters("process_restarts", help_text, ("process",), restarts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.native.supervisor")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tied-to", type=int, metavar="PID")
    parser.add_argument("--remove", action="store_true", help="remove the directory at the end")
    args = parser.parse_args()
    settings = settings_or_exit(ServiceSettings, [])
    configure_logging(settings, "supervisor")
    if args.tied_to is not None:
        end_with_parent(args.tied_to, signal.SIGTERM)
    raise_descriptor_limit()
    adopt_orphans()
    try:
        if (owner := supervisor_lock(args.directory)) is not None:
            raise LaunchError(f"process {owner} supervises {args.directory} already")
    except (LaunchError, FileNotFoundError) as error:
        log.error("cannot start", reason=str(error))
        return CANNOT_START
    supervisor = Supervisor(args.directory)
    supervisor.start()
    try:
        metrics = SupervisorMetrics(supervisor.restarts)
        if endpoint := open_endpoint(settings, "supervisor", 0, metrics):
            endpoint.serve(0)
        supervisor.run()
    finally:
        if args.tied_to is not None:
            stop_stack(args.directory, log.error, spared=os.getpid())
        if args.remove:
            shutil.rmtree(args.directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
