"""Runs a module in its own process, and again after a test that took the process down with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bench.gpu.records import Journal, Outcome, Records

# For importing torch and collecting, and for ending after the last test.
START_LIMIT_S = 90.0
TEST_LIMIT_S = 120.0
LOG_LINES = 40
# Makes a hanging process say where it hangs (`plugin`), the time it has to begin, and the pause
# after which it has ended.
STACKS_SIGNAL = signal.SIGUSR1
_STACKS_S, _QUIET_S = 5.0, 0.2
_MAX_READS = 100  # of a process that does not stop printing
# Exit statuses: passed, a test failed, and `plugin`'s when the process has lost the GPU.
EXIT_DEVICE_LOST = 70
_WELL = (0, 1, EXIT_DEVICE_LOST)
_PIPE_BYTES = 1 << 16


@dataclass(frozen=True)
class Plan:
    """A module's command and its time limits.

    `test_limit_s` is for tests without a limit of their own (`pytest.mark.timeout`).
    """

    name: str  # in the journal
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str]
    journal_file: int
    start_limit_s: float = START_LIMIT_S
    test_limit_s: float = TEST_LIMIT_S


class ModuleRun:
    """A plan being carried out; call `poll` again and again.

    Args:
        log: descriptor of the file for the processes' output.
        deadline: by `time.monotonic`; counts if it is sooner than the plan's own limit.
    """

    def __init__(self, plan: Plan, journal: Journal, log: int, deadline: float) -> None:
        self.plan = plan
        self.started = time.monotonic()
        self._journal = journal
        self._log = log
        self._deadline = min(deadline, self.started + plan.limit_s)
        self._process: subprocess.Popen[bytes]
        self._progress: tuple[int, int]
        self._ended_before: int
        self._start()

    @property
    def records(self) -> Records:
        return self._journal.of(self.plan.name)

    def poll(self) -> bool:
        """Handles whatever has happened; returns whether it is over and all tests have records."""
        self._drain()
        ended = _has_ended(self._process)
        records, now = self.records, time.monotonic()
        if ended:
            self._close()
        elif now > self._deadline:
            self.stop("out of time", f"{now - self.started:.0f} s of the module")
            return True
        elif (progress := (len(records.tests), records.ended)) != self._progress:
            self._progress, self._since = progress, now
            return False
        elif now - self._since > self._limit_s:
            self._end_current("out of time", f"{now - self._since:.0f} s")
        else:
            return False
        records = self.records
        if records.left and records.ended > self._ended_before:
            self._start()
            return False
        self._end_left("crashed", "the process did not get to it")
        return True

    def stop(self, outcome: Outcome, reason: str) -> None:
        """Ends the process and every test that has not ended."""
        self._end_current(outcome, reason)
        self._end_left(outcome, f"{reason}: it had not begun")

    def _start(self) -> None:
        records = self.records
        self._progress, self._ended_before = (len(records.tests), records.ended), records.ended
        self._since = time.monotonic()
        self._tail: deque[bytes] = deque(maxlen=LOG_LINES)
        self._unfinished = b""  # line
        self._process = subprocess.Popen(
            self.plan.command,
            env=self.plan.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(self.plan.journal_file,),
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    @property
    def _limit_s(self) -> float:
        running = self.records.running
        if running is None:  # it is importing, or at its end
            return self.plan.start_limit_s
        return running.limit_s or self.plan.test_limit_s

    def _close(self) -> None:
        """Cleans up after the process has ended by itself, and records a crash."""
        self._kill()
        records, status = self.records, self._process.returncode
        if status in _WELL and records.planned and not records.running:
            return
        reason = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        self._record("crashed", reason)

    def _end_current(self, outcome: Outcome, reason: str) -> None:
        before = self.records.running
        if not _has_ended(self._process):
            self._ask_where()
        self._kill()
        if before is None or self.records.running:  # otherwise it has just ended
            self._record(outcome, reason)

    def _ask_where(self) -> None:
        """Has the process print its stacks, and reads them."""
        self._drain()
        self._process.send_signal(STACKS_SIGNAL)
        pause = _STACKS_S
        for _ in range(_MAX_READS):
            readable, _, _ = select.select([self._output], [], [], pause)
            if not readable or _has_ended(self._process):
                break
            self._drain()
            pause = _QUIET_S

    def _record(self, outcome: Outcome, reason: str) -> None:
        """Records the end of the running test, or of what comes before or after the tests."""
        records = self.records
        if records.running:
            name = records.running.name
        elif not records.planned:
            name = "start"
        elif not records.left:
            name = "exit"
        else:
            return  # between two tests
        tail = b"\n".join(self._tail).decode(errors="replace")
        seconds = time.monotonic() - self._since
        self._journal.end(self.plan.name, name, outcome, f"{reason}\n{tail}".rstrip(), seconds)

    def _end_left(self, outcome: Outcome, reason: str) -> None:
        for test in self.records.left:
            self._journal.end(self.plan.name, test, outcome, reason, 0.0)

    def _kill(self) -> None:
        """Kills the process and all it started. Its id is its own until it is waited for."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._drain(b"\n")
        self._output.close()

    def _drain(self, last: bytes = b"") -> None:
        """Moves the process's output to the log, where the lines of several processes mix."""
        data = self._unfinished
        with suppress(BlockingIOError):
            while read := os.read(self._output.fileno(), _PIPE_BYTES):
                data += read
        *lines, self._unfinished = (data + last).split(b"\n") if data else [b""]
        self._tail.extend(lines)
        tagged = b"".join(b"%s: %s\n" % (self.plan.name.encode(), line) for line in lines)
        with suppress(OSError):  # a full disk costs the log, not the results
            os.write(self._log, tagged)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended; it can still be waited for."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, flags) is not None
