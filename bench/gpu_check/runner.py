"""Runs a section in a process of its own, and again after a part that took the process with it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu_check.records import Part, Records, Status, append, read

POLL_S = 0.1
# For importing torch and finding the GPU, before the section's first word.
START_LIMIT_S = 60.0
LOG_LINES = 15

Progress = Callable[[Part], None]


@dataclass(frozen=True)
class Failure:
    status: Status
    message: str
    seconds: float


@dataclass(frozen=True)
class SectionRun:
    """A section's command, which leaves out the parts that `records` has."""

    command: Sequence[str]
    records: Path
    log: Path  # what the process prints
    limit_s: float
    stop: threading.Event  # when the user wants it all to end

    def __call__(self, progress: Progress) -> Records:
        """`progress` is told of every part that has ended."""
        deadline = time.monotonic() + self.limit_s
        told: set[str] = set()
        while True:
            before = read(self.records)
            failure = self._run_once(deadline, progress, told)
            after = read(self.records)
            if after.running:  # it took the process with it
                self._end(after.running.name, failure)
            elif not after.limits:
                self._end("start", failure)
            over = time.monotonic() > deadline or self.stop.is_set()
            if over or len(after.parts) == len(before.parts):
                for name in after.left:
                    self._end(name, Failure("out of time", "it had not begun", 0))
            after = read(self.records)
            _tell(after, progress, told)
            if not after.left:
                return after

    def _run_once(self, deadline: float, progress: Progress, told: set[str]) -> Failure:
        """-> what to say of the part that is running at the end, if any."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        current, since = "", time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                records = read(self.records)
                _tell(records, progress, told)
                running = records.running.name if records.running else ""
                now = time.monotonic()
                if running != current:
                    current, since = running, now
                limit = records.limits.get(running, START_LIMIT_S)
                if now - since > limit or now > deadline or self.stop.is_set():
                    return Failure("out of time", f"stopped\n{self._log_tail()}", now - since)
            message = f"exit status {process.returncode}\n{self._log_tail()}"
            return Failure("crashed", message, time.monotonic() - since)
        finally:
            _kill(process)

    def _end(self, part: str, failure: Failure) -> None:
        append(self.records, "end", name=part, **asdict(failure))

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


def _tell(records: Records, progress: Progress, told: set[str]) -> None:
    for part in records.parts.values():
        if part.status != "running" and part.name not in told:
            told.add(part.name)
            progress(part)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
