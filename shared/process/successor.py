"""Starts the program of a parent process again beside it, to replace it without a long pause.

Most of a start is spent on imports. A successor runs the same command, inherits the memory files
and sockets (`kept`), imports everything, and then waits. It serves once its predecessor lets it, or
once the predecessor and its service forks have ended, whatever ended them. So no other process
writes to the memory by then.

Predecessor and successor are connected by a pair of sockets. Service forks inherit the end of the
predecessor, so the successor finds the connection closed only after the last of them has ended.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import suppress

from shared.backoff import Backoff
from shared.process.kept import kept_descriptors, own_command

# In the environment of a successor: a descriptor, the predecessor's process id, and the id of its
# parent process. Older and newer releases read it.
PREDECESSOR = "NANOVLLM_PREDECESSOR"
_SIDECAR = "NANOVLLM_SIDECAR"  # that of the predecessor was ready; or unset
_SERVE = b"!"
_MAX_BYTES = 1000  # of a message
START_S = 80.0  # for imports, and for what a sidecar loads
_SETTLE_S = 2.0  # Imports would slow down the recovery from a death.
# Pause before a spare is started after one that failed, doubled after each.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 600.0


class Successor:
    """The successor of this process: none, one that starts, waits or serves."""

    def __init__(self) -> None:
        self.is_waiting = False  # until this process lets it serve or ends
        self.serves = False  # this process has let it
        self.remark = ""  # what it says about itself when it begins to wait
        self.failure = ""  # why the last one ended
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._with_sidecar = False
        self._deadline = self._due = 0.0  # by the monotonic clock
        self._backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)

    def fileno(self) -> int:
        """Readable when the successor begins to wait."""
        return self._ours.fileno()

    def start(self, parent: int, with_sidecar: bool) -> None:
        """Starts a successor, and ends an earlier one.

        Args:
            parent: the id of this process's own parent process, which will be the successor's.
            with_sidecar: whether the successor's sidecar shall be ready when the successor waits.
        """
        self.end()
        self._with_sidecar = with_sidecar
        number = self._theirs.fileno()
        given = {**os.environ, PREDECESSOR: f"{number} {os.getpid()} {parent}"}
        if with_sidecar:
            given[_SIDECAR] = "1"
        self._deadline = time.monotonic() + START_S
        try:
            self._process = subprocess.Popen(
                own_command(),
                env=given,
                pass_fds=[number, *kept_descriptors()],
                process_group=0,
            )
        except OSError as error:
            self._fail(str(error))

    def start_spare(self, parent: int, with_sidecar: bool) -> float:
        """Calls `start` a while after the first call, unless there is such a successor or the last
        one has just failed -> when to call this again."""
        now = time.monotonic()
        self._due = self._due or now + _SETTLE_S
        is_there = self._process and self._with_sidecar >= with_sidecar
        if not is_there and now >= self._due:
            self.start(parent, with_sidecar)
        return self._due if not self._process else float("inf")

    def check(self) -> None:
        """Notices that the successor waits, has ended, or takes too long."""
        if not self._process:
            return
        with suppress(BlockingIOError):
            self.remark = self._ours.recv(_MAX_BYTES, socket.MSG_DONTWAIT)[1:].decode()
            self.is_waiting = True
            self._backoff.reset()
        if (status := self._process.poll()) is not None:
            self._fail(f"exit status {status}")
        elif not self.is_waiting and time.monotonic() > self._deadline:
            self._fail(f"it did not start within {START_S:.0f} s")

    def _fail(self, reason: str) -> None:
        self.end()
        self.failure = reason
        self._due = time.monotonic() + self._backoff.next_s()

    def let_serve(self) -> None:
        """Lets the successor serve before this process ends."""
        self.serves = True
        with suppress(OSError):  # it has just died
            self._ours.send(_SERVE)

    def signal(self, number: int) -> None:
        if self._process:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kills the successor, if there is one."""
        if self._process:
            self._process.kill()
            self._process.wait()
        with suppress(BlockingIOError):
            self._ours.recv(_MAX_BYTES, socket.MSG_DONTWAIT)
        self._process, self.is_waiting, self.remark, self.failure = None, False, "", ""

    def close_in_fork(self, serves: bool) -> None:
        """Closes what a fork of this process does not need. A successor waits only for forks that
        serve, because others do not write to the memory."""
        self._theirs.close()
        if not serves:
            self._ours.close()


class Predecessor:
    """The process of which this one is the successor."""

    def __init__(self, peer: socket.socket, pid: int, parent: int, had_sidecar: bool) -> None:
        self.pid = pid
        self.parent = parent  # the id of its parent process
        self.had_sidecar = had_sidecar  # one that was ready
        self.has_ended = False  # its service forks, too
        self.lets_serve = False
        self._peer = peer

    @classmethod
    def find(cls) -> Predecessor | None:
        """Returns None for a program that was started by other means."""
        if not (value := os.environ.pop(PREDECESSOR, "")):
            return None
        number, pid, parent = map(int, value.split())
        os.set_inheritable(number, False)
        had_sidecar = bool(os.environ.pop(_SIDECAR, ""))
        return cls(socket.socket(fileno=number), pid, parent, had_sidecar)

    def fileno(self) -> int:
        """Readable when `check` would find something."""
        return self._peer.fileno()

    def wait(self, remark: str) -> None:
        """Tells the predecessor that this process waits."""
        with suppress(OSError):
            self._peer.send(b"+" + remark.encode())

    def check(self) -> None:
        """Notices that the predecessor lets this process serve, or has ended."""
        try:
            self.has_ended = not self._peer.recv(_MAX_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:  # it ended before it had read that this process waits
            self.has_ended = True
        self.lets_serve = True
