"""Parent processes replace forks that die or hang."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from shared.process import run as process
from shared.process.heartbeat import BEATS
from shared.process.parent_process import REPLACED, RESTART
from shared.process.parent_state import ParentState, read_parent_state
from tests.waiting import wait_for

_PROGRAM = """
import asyncio, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
import structlog
from shared.process.kept import KeptDescriptors
from shared.process.parent_process import ParentProcess
from shared.process.successor import Predecessor

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

starts = Path(sys.argv[1])

def serve(heartbeat):
    ready = heartbeat.ready
    count = starts.stat().st_size if starts.exists() else 0
    with starts.open("a") as file:
        file.write(".")
    {body}

def say_pid(role="service"):
    os.write(1, f"{{role}} {{os.getpid()}}\\n".encode())  # in one piece

async def beat(heartbeat):
    heartbeat.ready()
    heartbeat.beat()
    say_pid()
    await heartbeat.exchange()

settings = SimpleNamespace(hang_timeout_s={hang_timeout_s}, spares=0, exit_with_parent=False)
sidecar, overlaps = None, False
{prelude}
sys.exit(ParentProcess(serve, settings, sidecar, None, overlaps, Predecessor.find()).run())
"""


def program(starts: Path, body: str, prelude: str = "", hang_timeout_s: float = 60.0) -> list[str]:
    code = _PROGRAM.format(body=body, prelude=prelude, hang_timeout_s=hang_timeout_s)
    return [sys.executable, "-c", code, str(starts)]


@pytest.mark.parametrize(
    ("body", "status", "forks"),
    [
        ("ready()", 0, 1),
        ("ready(); os.kill(os.getpid(), signal.SIGKILL if count < 3 else 0)", 0, 4),
        ("count or ready(); os._exit((75, 2, 2, 9, 2, 0)[count])", 0, 6),
        ("sys.exit(2)", 2, 1),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11, 1),
        ("count == 1 and ready(); os._exit(70)", 70, 1),
        ("count in (0, 3) and ready(); os._exit(70 * (count < 6))", 0, 7),
    ],
    ids=[
        "it ends",
        "killed",
        "cannot start again at first",
        "cannot start",
        "never ready",
        "not ready at first",
        "ready now and then",
    ],
)
def test_forks_follow_one_that_served(tmp_path: Path, body: str, status: int, forks: int) -> None:
    starts = tmp_path / "starts"
    assert subprocess.run(program(starts, body), timeout=60).returncode == status
    assert len(starts.read_text()) == forks


class RunningParent:
    """A running parent process whose forks print their pids, and those of its successors."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = psutil.Process(process.pid)
        self._first = process
        self._output = process.stdout
        self._found: list[tuple[str, int]] = []  # not asked for yet

    def next_fork(self) -> psutil.Process:
        """Waits for another fork."""
        return psutil.Process(self.next_pid())

    def next_parent(self, role: str = "service") -> psutil.Process:
        """Waits for a fork of the successor, which is `process` from then on -> the fork."""
        fork = psutil.Process(self.next_pid(role))
        assert fork.ppid() != self.process.pid
        self.process = psutil.Process(fork.ppid())
        return fork

    def restart(self, role: str = "service") -> psutil.Process:
        """Lets a successor replace the parent process -> its fork."""
        before = self.process
        before.send_signal(RESTART)
        fork = self.next_parent(role)
        assert before.wait(60) in (REPLACED, None)  # None: this process is not its parent process
        return fork

    def wait_refused(self, count: int) -> ParentState:
        """Waits until this number of successors could not start -> the parent process's state."""

        def refused() -> ParentState | None:
            state = read_parent_state(self.process.pid)
            return state if state and state.num_refused == count else None

        return wait_for(refused, "the refusal")

    def kill(self) -> None:
        for each in (self.process, *self.process.children(), self._first):
            each.kill()

    def next_pid(self, role: str = "service") -> int:
        """Waits until another process of this role says its pid."""
        assert self._output is not None
        while role not in (found := dict(reversed(self._found))):
            name, pid = self._output.readline().split()
            self._found.append((name, int(pid)))
        self._found.remove((role, found[role]))
        return found[role]


@contextmanager
def running_parent(
    starts: Path, body: str, prelude: str = "", hang_timeout_s: float = 60.0
) -> Iterator[RunningParent]:
    command = program(starts, body, prelude, hang_timeout_s)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield (parent := RunningParent(process))
        finally:
            with suppress(psutil.NoSuchProcess):
                parent.kill()


LASTS = "time.sleep(600)"
SIDECAR = """
def sidecar(heartbeat):
    say_pid("sidecar")
    {body}
"""


def ends_on(sign: signal.Signals) -> str:
    blocked = f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{sign.name}])"
    return f"{blocked}; ready(); say_pid(); signal.sigwait([signal.{sign.name}]); os._exit(9)"


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path: Path, sign: signal.Signals) -> None:
    with running_parent(tmp_path / "starts", ends_on(sign)) as parent:
        parent.next_fork()
        parent.process.send_signal(sign)
        assert parent.process.wait(60) == 9


def test_a_signal_that_interrupts_no_system_call_is_passed_on(tmp_path: Path) -> None:
    """A signal interrupts none if it arrives just before the wait, or on another thread."""
    prelude = """
import threading

def signal_yourself():
    while not starts.with_name("signal").exists():
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=signal_yourself, daemon=True).start()
"""
    with running_parent(tmp_path / "starts", ends_on(signal.SIGTERM), prelude) as parent:
        parent.next_fork()
        (tmp_path / "signal").touch()
        assert parent.process.wait(60) == 9


def test_a_fork_ends_with_its_parent(tmp_path: Path) -> None:
    with running_parent(tmp_path / "starts", f"ready(); say_pid(); {LASTS}") as parent:
        fork = parent.next_fork()
        parent.process.kill()
        assert not psutil.wait_procs([fork], timeout=60)[1]


def test_a_sidecar_outlives_forks_that_serve_and_has_successors(tmp_path: Path) -> None:
    body = f"ready(); say_pid(); {LASTS}"
    with running_parent(tmp_path / "starts", body, SIDECAR.format(body=LASTS)) as parent:
        sidecar = psutil.Process(parent.next_pid("sidecar"))
        service = parent.next_fork()
        service.kill()
        successor = parent.next_fork()
        assert sidecar.is_running()
        sidecar.kill()
        assert parent.next_pid("sidecar") != sidecar.pid
        assert successor.is_running()
        forks = parent.process.children()
        assert len(forks) == 2
        parent.process.kill()
        assert not psutil.wait_procs(forks, timeout=60)[1]


# Processes that should hang do so by themselves. Others never beat, because they could seem to hang
# on a busy machine.
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


def wait_gone(pid: int) -> None:
    wait_for(lambda: not psutil.pid_exists(pid), f"{pid} to end")


@pytest.mark.parametrize(
    "body",
    [
        f"ready(); say_pid(); count and {LASTS}; heartbeat.beat(); {STOPS}",
        f"ready(); say_pid(); count and {LASTS}; heartbeat.beat(); {LASTS}",
        f"count or ready(); say_pid(); count and {LASTS}; {STOPS}",
    ],
    ids=["stopped", "stuck", "stopped before it was ready"],
)
def test_a_fork_that_hangs_is_replaced(tmp_path: Path, body: str) -> None:
    with running_parent(tmp_path / "starts", body, hang_timeout_s=0.3) as parent:
        first = parent.next_pid()
        assert parent.next_pid() != first
        wait_gone(first)


@pytest.mark.parametrize("beat", ["heartbeat.beat()", "pass"])
def test_a_sidecar_that_is_stopped_is_replaced(tmp_path: Path, beat: str) -> None:
    first_only = "first = starts.with_name('first'); first.exists() and time.sleep(600)"
    prelude = SIDECAR.format(body=f"{first_only}; first.touch(); {beat}; {STOPS}")
    with running_parent(
        tmp_path / "starts", f"ready(); {LASTS}", prelude, hang_timeout_s=0.3
    ) as parent:
        first = parent.next_pid("sidecar")
        assert parent.next_pid("sidecar") != first
        wait_gone(first)


def test_a_fork_ends_a_parent_that_is_stopped(tmp_path: Path) -> None:
    body = "ready(); os.kill(os.getppid(), signal.SIGSTOP); asyncio.run(beat(heartbeat))"
    with running_parent(tmp_path / "starts", body, hang_timeout_s=0.3) as parent:
        fork = parent.next_pid()
        parent.process.wait(60)
        wait_gone(fork)


# Parent and fork say what they do, and their clock leaps by an hour at SIGUSR1, as if they had been
# stopped for so long.
LEAPS = """
from shared.process.fork import Fork

leaps = 0
monotonic, check = time.monotonic, Fork.check

def leap(*_):
    global leaps
    leaps += 1

def check_and_say(self, may_kill):
    check(self, may_kill)
    say_pid("check")

time.monotonic = lambda: monotonic() + 3600 * leaps
signal.signal(signal.SIGUSR1, leap)
Fork.check = check_and_say

async def leaping(heartbeat):
    say = heartbeat.beat
    heartbeat.beat = lambda: (say(), say_pid("beat"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, leap)
    heartbeat.ready()
    say_pid()
    await heartbeat.exchange()
"""


def test_stopping_everything_for_a_while_is_no_hang(tmp_path: Path) -> None:
    body = "asyncio.run(leaping(heartbeat))"
    with running_parent(tmp_path / "starts", body, LEAPS, hang_timeout_s=600.0) as parent:
        fork = parent.next_fork()
        parent.next_pid("check")
        for _ in range(BEATS + 2):
            for each in (parent.process, fork):
                each.suspend()
                each.send_signal(signal.SIGUSR1)
            for each in (fork, parent.process):
                each.resume()
            assert parent.next_pid("beat") == fork.pid
            assert parent.next_pid("check") == parent.process.pid
        assert parent.process.children() == [fork]


def test_a_service_may_open_as_many_descriptors_as_the_system_allows() -> None:
    """Otherwise a thousand silent connections would keep all other clients out."""
    ask = "resource.getrlimit(resource.RLIMIT_NOFILE)"
    code = f"import resource; from shared.process import run as process; hard = {ask}[1]\n"
    code += f"process.raise_descriptor_limit(); assert {ask} == (hard, hard) and hard > 64"
    limited = ["bash", "-c", 'ulimit -Sn 64; exec "$@"', "-", sys.executable, "-c", code]
    subprocess.run(limited, check=True, timeout=60)


@pytest.mark.parametrize(("limit", "value"), [("_MAX_OBJECTS", 1000), ("_IDLE_S", 1000)])
async def test_old_objects_are_left_alone_while_there_are_many_and_the_process_is_busy(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(process, "_COLLECTIONS_EVERY_S", 0)
    monkeypatch.setattr(process, "_IDLE_S", 0)
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    async def generations_collected() -> set[int]:
        generations.clear()
        for _ in range(10):
            await asyncio.sleep(0)
        return {*generations}

    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()  # importing a service's `__main__`, as other tests do, disables it
    gc.freeze()
    gc.callbacks.append(note)
    collecting = asyncio.create_task(process.collect_old_garbage())
    try:
        assert 2 in await generations_collected()
        generations.clear()
        many = [[i] for i in range(200_000)]
        assert {*generations} == {0, 1}
        assert 2 not in await generations_collected()
        monkeypatch.setattr(process, limit, value)
        assert 2 in await generations_collected()
        assert 2 not in await generations_collected()  # it is no garbage
        many.clear()
        assert 2 in await generations_collected()
    finally:
        collecting.cancel()
        gc.callbacks.remove(note)
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        if not enabled:
            gc.disable()
