"""Starts, restarts and stops a process of a stack, and rotates its log."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil
import structlog

from deploy.errors import LaunchError
from deploy.native.ending import own_processes
from deploy.stack import open_file
from shared.backoff import Backoff
from shared.process.fork import CANNOT_START
from shared.process.successor import PREDECESSOR

log = structlog.get_logger(__name__)

# Pause before the next start: doubled after each, until a process has run for `_LASTING_S`.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 10.0
_LASTING_S = 10.0
_MAX_LOG_BYTES = 10 << 20


class Child:
    """A process that can be started again once it has ended. Its output goes to `log`."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.pid = 0  # 0: it does not run
        self.pidfd = -1
        self.exit_status: int | None = None  # of the last run that ended; None: unknown
        self.failure = ""  # why the last start failed
        self.starts = 0
        self.due = 0.0  # earliest time of the next start, by the monotonic clock
        self._popen: subprocess.Popen[bytes] | None = None  # None also for an adopted process
        self._started = 0.0
        self._ended = 0  # the id of a process whose successor has not been looked for
        self._created = 0.0  # when the process was started, by psutil's clock
        self._backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)

    def adopt(self, pid: int) -> None:
        """Takes over a process that this one has not started."""
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            self._created = psutil.Process(pid).create_time()
            self.pidfd = os.pidfd_open(pid)
            self.pid, self.starts, self._started = pid, self.starts + 1, time.monotonic()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the process, or notes why that fails."""
        self._started, self.failure = time.monotonic(), ""
        self.starts += 1
        try:
            with open_log(self.log) as file:
                self._popen = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    process_group=0,  # Ctrl-C in a terminal must not reach it
                )
            self.pid = self._popen.pid
            self.pidfd = os.pidfd_open(self.pid)
            self._created = psutil.Process(self.pid).create_time()
            log.info("process started", process=self.name, pid=self.pid)
        except OSError as error:  # no memory, no descriptors
            self.failure = str(error)
            self._plan_next()

    def may_start(self, was_up: bool = True) -> bool:
        """Whether to start the process now. Before the stack has been up, one that cannot start is
        not started again: the launcher tells the user why."""
        given_up = self.exit_status == CANNOT_START and not was_up
        return not self.pid and not given_up and time.monotonic() >= self.due

    def forget_failures(self) -> None:
        """Lets the process start without a pause."""
        self.due = 0.0
        self._backoff.reset()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Notices that the process has ended; waits at most `timeout_s` seconds for that."""
        if not self.pid:
            return
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return
        os.close(self.pidfd)
        self.exit_status = self._popen.wait() if self._popen else _exit_status(self.pid)
        log.info("process ended", process=self.name, pid=self.pid, exit_status=self.exit_status)
        self._ended, self.pid, self.pidfd, self._popen = self.pid, 0, -1, None
        self._plan_next()

    def follow(self) -> None:
        """Adopts the successor of the process, if that has just ended and has left one."""
        ended, self._ended = self._ended, 0
        if ended and (successor := _successor_of(ended, self._created)):
            self.adopt(successor)

    def stop(self, grace_s: float) -> None:
        """Asks the process to end, and kills it if it takes longer than `grace_s` seconds."""
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _LASTING_S)):
            if self.pid:
                signal.pidfd_send_signal(self.pidfd, number)
                self.poll(limit_s)

    def _plan_next(self) -> None:
        lasted = time.monotonic() - self._started > _LASTING_S
        if lasted:
            self._backoff.reset()
        self.due = time.monotonic() + (0.0 if lasted else self._backoff.next_s())


def _successor_of(pid: int, created: float) -> int:
    """Finds the successor (`shared.process.successor`) of a process of this user that has ended
    -> its process id; 0: there is none.

    Args:
        created: when the process was started, by psutil's clock. Older processes are successors of
            another one that had the same id.
    """
    found = {}  # with forks of the successor, which have its environment
    for process in own_processes():
        with suppress(psutil.Error, OSError):
            if process.environ().get(PREDECESSOR, "").split()[1:2] == [str(pid)]:
                found[process.pid] = process.ppid(), process.create_time()
    for each, (parent, began) in found.items():
        if parent not in found and began >= created:
            return each
    return 0


def _exit_status(pid: int) -> int | None:
    """The exit status of an adopted process that has ended; None if it was no child of this one."""
    with suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


def open_log(path: Path) -> BinaryIO:
    """Opens a log to append to it. If that is impossible, nothing is logged."""
    try:
        return open(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    except (OSError, LaunchError):  # such as a full disk: the process runs without a log
        return Path(os.devnull).open("ab")


def rotate(log_file: Path, max_bytes: int = _MAX_LOG_BYTES) -> None:
    """Copies a long log to `NAME.1` and empties it. The process keeps the file open and continues
    to write: lines that it writes in this moment are lost."""
    with suppress(OSError, LaunchError):
        if log_file.lstat().st_size <= max_bytes:
            return
        earlier = log_file.with_name(f"{log_file.name}.1")
        earlier.unlink(missing_ok=True)
        with (
            open(open_file(log_file, os.O_RDWR), "r+b") as file,
            open(open_file(earlier, os.O_WRONLY | os.O_CREAT), "wb") as copy,
        ):
            shutil.copyfileobj(file, copy)
            copy.flush()  # before anything is lost, because the disk may be full
            file.truncate(0)
