"""A real stack of processes, started as users start a private one, and ways to harm it.

with running_stack(tp=2, frontends=2) as stack:
    pid = stack.kill("worker", 1)
    stack.wait_replaced("worker", 1, pid)
    stack.wait_serving()

`Hold` keeps streams open until a fault has come.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

from deploy.errors import SupervisorGoneError
from deploy.health import CHANNEL_OPTIONS, SERVING
from deploy.native.processes import MARKER, running_processes, stack_members
from deploy.native.status import format_status, stack_status
from deploy.stack import Process, Stack
from nano_vllm_grpc.channels import open_blocking_channel
from shared.pb.scheduler_pb2 import GetLoadRequest, GetLoadResponse
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.waiting import WAIT_S, is_running, wait_for

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / "models" / "demo"

# A machine may stall for longer than the default, and no healthy process is to be replaced then.
# Tests in which a process hangs set less.
HANG_TIMEOUT_S = "60"

_LOG_LINES = 40


# Stacks that this process has started and not yet ended.
running: list[RealStack] = []


def faulty_environment(**variables: str) -> dict[str, str]:
    """The environment of services with the faults that these variables name.
    `tests/faults/faulty_services/sitecustomize.py` describes them."""
    return {"PYTHONPATH": f"{ROOT / 'tests/faults/faulty_services'}:{ROOT}", **variables}


class Hold:
    """Makes workers wait, so that streams are open when a fault comes, however late it comes.

    with stack.hold.after(20), open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(10)
        stack.kill("worker")
        stack.hold.release()
        streams.wait_ended()
    """

    def __init__(self) -> None:
        self._file = Path(tempfile.gettempdir(), f"hold-{secrets.token_hex(8)}")
        self.environment = faulty_environment(WORKER_HOLD=str(self._file))  # of the services

    def after(self, steps: int) -> Self:
        """Lets each worker run so many more steps that sample tokens. It waits with the next step
        until `release`, or until `after` is called again."""
        written = self._file.with_suffix(".new")
        written.write_text(str(steps))
        written.replace(self._file)
        return self

    def release(self) -> None:
        self._file.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RealStack:
    """The processes of a running stack, by service (`worker`, `scheduler`, `frontend`) and index,
    which is a worker's rank."""

    def __init__(self, stack: Stack, hold: Hold) -> None:
        self.stack = stack
        self.hold = hold

    @property
    def address(self) -> str:
        """The address at which clients reach the frontends."""
        return self.stack.address

    @property
    def directory(self) -> Path:
        return self.stack.directory

    def processes(self) -> list[Process]:
        return list(self.stack.processes())

    def pids(self) -> dict[tuple[str, int], int | None]:
        """The pids of all processes; None for one that is not running."""
        by_name = {each.name: each.pid for each in running_processes(self.directory)}
        found = {(each.service, each.index): by_name[each.name] for each in self.processes()}
        return {key: pid if pid and is_running(pid) else None for key, pid in found.items()}

    def pid(self, service: str, index: int = 0) -> int:
        """Returns the process's pid; waits for it if it is being restarted."""
        return wait_for(lambda: self.pids()[service, index], f"{service}-{index} to run")

    def signal(self, service: str, index: int, number: signal.Signals) -> int:
        """Sends a signal; returns the pid of the process that got it."""
        while True:
            pid = self.pid(service, index)
            with suppress(ProcessLookupError):  # it ended in the meantime
                os.kill(pid, number)
                return pid

    def kill(self, service: str, index: int = 0) -> int:
        """Kills with SIGKILL; returns the pid that the process had."""
        return self.signal(service, index, signal.SIGKILL)

    def terminate(self, service: str, index: int = 0) -> int:
        return self.signal(service, index, signal.SIGTERM)

    def stop(self, service: str, index: int = 0) -> int:
        """Sends SIGSTOP: the process hangs until `cont`."""
        return self.signal(service, index, signal.SIGSTOP)

    def cont(self, service: str, index: int = 0) -> int:
        return self.signal(service, index, signal.SIGCONT)

    def wait_replaced(self, service: str, index: int, old_pid: int) -> int:
        """Waits for the process that replaces `old_pid`; returns its pid."""

        def new_pid() -> int | None:
            pid = self.pids()[service, index]
            return pid if pid != old_pid else None

        return wait_for(new_pid, f"{service}-{index} to be restarted")

    def wait_serving(self) -> None:
        """Returns once every process is running and healthy."""

        def serving() -> bool:
            return all(status.health == SERVING for status in stack_status(self.stack))

        try:
            wait_for(serving, "all processes to be SERVING")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.describe()}") from None

    def load(self, engine: int = 0) -> GetLoadResponse:
        """The load as an engine's scheduler reports it; waits if the scheduler is starting."""
        address, tls = self.stack.scheduler_address_of(engine), self.stack.internal_tls
        with open_blocking_channel(address, tls, CHANNEL_OPTIONS) as one:
            stub = SchedulerServiceStub(one)
            return stub.GetLoad(GetLoadRequest(), timeout=WAIT_S, wait_for_ready=True)

    def wait_idle(self) -> GetLoadResponse:
        """Returns the first engine's load once nothing is waiting or running and no block is used
        in any engine."""

        def idle() -> GetLoadResponse | None:
            loads = [self.load(engine) for engine in range(self.stack.engines)]
            busy = any(load.waiting or load.running or load.blocks_used for load in loads)
            return None if busy else loads[0]

        try:
            return wait_for(idle, "the schedulers to be idle")
        except TimeoutError as error:
            loads = [self.load(engine) for engine in range(self.stack.engines)]
            raise TimeoutError(f"{error}: {loads}") from None

    def wait_load(self, reached: Callable[[GetLoadResponse], bool]) -> GetLoadResponse:
        """Returns the first load for which `reached` is true."""

        def check() -> GetLoadResponse | None:
            load = self.load()
            return load if reached(load) else None

        return wait_for(check, "the load")

    def log_sizes(self) -> dict[str, int]:
        """The sizes of the processes' logs in bytes, by name."""
        logs = {each.name: self.stack.log(each.name) for each in self.processes()}
        return {name: log.stat().st_size if log.exists() else 0 for name, log in logs.items()}

    def describe(self, since: Mapping[str, int] | None = None) -> str:
        """The state of all processes and the ends of their logs, from these sizes on."""
        try:
            parts = [format_status(stack_status(self.stack))]
        except (SupervisorGoneError, OSError) as error:
            parts = [f"the stack does not answer: {error}"]
        for name in self.log_sizes():
            log = self.stack.log(name)
            written = log.read_bytes()[(since or {}).get(name, 0) :] if log.exists() else b""
            lines = written.decode(errors="replace").splitlines()
            parts += [f"--- {name}", *lines[-_LOG_LINES:]]
        return "\n".join(parts)


@contextmanager
def running_stack(
    environment: Mapping[str, str] | None = None, **variables: object
) -> Iterator[RealStack]:
    """Runs a stack that serves the demo model; kills it at the end, and leaves nothing behind.

    Args:
        environment: variables for all processes, besides those of this one.
        variables: those of `make up`, in lower case.
    """
    hold = Hold()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in variables.items()]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cli", "run", "--port=0", f"--model={DEMO_MODEL}", *flags],
        cwd=ROOT,
        env={
            "NANO_HANG_TIMEOUT_S": HANG_TIMEOUT_S,
            **os.environ,
            **hold.environment,
            **(environment or {}),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    try:
        ready = launcher.stdout.readline().split()
        assert ready[:1] == ["READY"], "the stack did not start, see its stderr"
        stack = RealStack(Stack.load(_directory(launcher.pid)), hold)
        running.append(stack)
        try:
            yield stack
        except BaseException:
            print(stack.describe())
            raise
        finally:
            running.remove(stack)
            hold.release()
            launcher.stdin.close()  # or the launcher would report what follows
            kill_all(stack.directory)
    finally:
        launcher.stdin.close()
        launcher.stdout.close()
        launcher.wait(WAIT_S)


def _directory(launcher_pid: int) -> Path:
    """The state directory of the stack that this launcher started."""
    for child in psutil.Process(launcher_pid).children():
        if directory := child.environ().get(MARKER):
            return Path(directory)
    raise AssertionError("the launcher has no supervisor")


def kill_all(directory: Path) -> None:
    """Kills a stack's processes, and those that its supervisor starts meanwhile. An orderly end
    would take seconds."""
    while members := stack_members(directory):
        for each in members:
            with suppress(psutil.NoSuchProcess):
                each.kill()
