"""A function that a parent process runs in one fork after another (`parent_process`)."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import structlog

from shared.backoff import Backoff
from shared.process.heartbeat import BEAT, BEATS, READY, Heartbeat, received, send
from shared.process.parent_state import ParentState

log = structlog.get_logger(__name__)

CANNOT_START = 2  # exit status for settings or a model that cannot work, before any fork was ready
# Pause before the next fork: doubled after each failure, until a fork is ready.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 10.0

Serve = Callable[[Heartbeat], object]


class Fork:
    """The parent process's view of a function that runs in one fork after another."""

    def __init__(self, function: Serve, hang_timeout_s: float, serves: bool = True) -> None:
        self.function = function
        self.pid = 0  # of the present fork; 0: there is none
        self.due: float | None = 0.0  # time of the next fork; None: none is planned
        self.status: int | None = None  # exit status of the last fork
        self.reason = ""  # why the last fork ended
        self.was_ready = False  # whether any fork has been ready, also of a predecessor
        self.restarts = 0
        self._hang_timeout_s = hang_timeout_s
        self._serves = serves
        self._peer: socket.socket | None = None
        self._backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        self._last_pid = 0
        self._begin()

    def _begin(self) -> None:
        self._ready = self._stopped = self._beats = self._received = self._killed = False
        self._silent = 0  # consecutive checks without a beat
        self._failure = ""  # the reason that the fork has sent

    @property
    def is_ready(self) -> bool:
        return self._ready

    @property
    def has_ended(self) -> bool:
        return not self.pid and self.due is None

    @property
    def state(self) -> ParentState:
        return ParentState(self.pid, "" if self._ready else self.reason, self.due or 0.0)

    def fork(self) -> socket.socket | None:
        """Forks; returns the child's socket in the child, None in this process, also on failure."""
        self._begin()
        self.due = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.pid = os.fork()
        except OSError as error:
            self.status, self._failure = CANNOT_START, f"cannot fork: {error}"
            self.reason = self._failure
            return None
        if not self.pid:
            ours.close()
            return theirs
        theirs.close()
        self._peer = ours
        return None

    def fileno(self) -> int:
        """Readable when the child has sent a message or has ended. Call it while there is one."""
        assert self._peer is not None
        return self._peer.fileno()

    def close(self) -> None:
        """Closes the parent's end of the socket."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def receive(self) -> None:
        """Reads the child's messages."""
        for message in received(self._peer) if self._peer else ():
            if message == BEAT:
                self._beats = self._received = True
            elif message == READY:
                self._ready = self.was_ready = True
            else:
                self._failure = message[1:].decode(errors="replace")

    def wait(self) -> None:
        """Notices that the child has been stopped, continued or has ended."""
        while self.pid:
            found, wait_status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not found:
                return
            if os.WIFSTOPPED(wait_status) or os.WIFCONTINUED(wait_status):
                self._stopped = os.WIFSTOPPED(wait_status)
                continue
            self.receive()
            self.close()
            self.status = os.waitstatus_to_exitcode(wait_status)
            self.reason = self._failure or _describe(self.status)
            if self._killed:
                self.reason = f"it did not answer for {self._hang_timeout_s:g} s"
            self._last_pid, self.pid = self.pid, 0

    def check(self, may_kill: bool) -> None:
        """Kills the child after `BEATS` checks in a row in which it was silent or stopped."""
        if self._peer is None or self._killed:
            return
        send(self._peer, BEAT)
        hangs = not self._received if self._beats else self._stopped
        self._received = False
        self._silent = self._silent + 1 if hangs else 0
        self._ready |= not self._serves and not hangs
        if self._silent >= BEATS and may_kill:
            log.error("fork does not answer; killing it", pid=self.pid, serves=self._serves)
            os.kill(self.pid, signal.SIGKILL)
            self._killed = True

    def plan_next(self) -> None:
        """Schedules the next fork."""
        if self._ready:
            self._backoff.reset()
        pause_s = 0.0 if self._ready else self._backoff.next_s()
        self._ready = False
        self.restarts += 1
        self.due = time.monotonic() + pause_s
        log.error(
            "process died; restarting",
            pid=self._last_pid,
            exit_status=self.status,
            reason=self.reason,
            in_s=pause_s,
            serves=self._serves,
        )


def _describe(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
