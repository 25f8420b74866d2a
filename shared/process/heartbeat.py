"""Connects a fork to its parent process (`parent_process`). The fork reports that it is ready, why
it cannot start and, at intervals, that it is alive."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress

import structlog

log = structlog.get_logger(__name__)

# Beats per `hang_timeout_s`; a side that misses as many in a row hangs.
BEATS = 6
READY, BEAT, FAILURE = b"+", b".", b"!"
_MAX_REASON_BYTES = 1000


def received(peer: socket.socket) -> list[bytes]:
    """Returns the messages that have arrived, without waiting for any."""
    messages = []
    with suppress(OSError):  # no more messages, or the other side has closed
        while message := peer.recv(4 + _MAX_REASON_BYTES, socket.MSG_DONTWAIT):
            messages.append(message)
    return messages


def send(peer: socket.socket, message: bytes) -> None:
    """Sends a message, unless the other side has closed or its buffer is full."""
    with suppress(OSError):
        peer.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Heartbeat:
    """The fork's side of the connection.

    Args:
        parent: the parent's process id.
        hang_timeout_s: each side kills the other if it is silent for this long.
        restarts: how many forks of this parent process died before this one.
        was_ready: whether any fork has been ready before this one, also of a predecessor.
    """

    def __init__(
        self,
        peer: socket.socket,
        parent: int,
        hang_timeout_s: float,
        restarts: int = 0,
        was_ready: bool = False,
    ) -> None:
        self.restarts = restarts
        self.was_ready = was_ready
        self.interval_s = hang_timeout_s / BEATS
        self._peer = peer
        self._parent = parent
        self._is_ready = False

    def ready(self) -> None:
        """Reports that this fork serves, or a sidecar that it is of use. From now on, whatever ends
        it, the parent forks again."""
        if not self._is_ready:
            self._is_ready = True
            send(self._peer, READY)

    def beat(self) -> None:
        """Reports that this fork is alive. After a first beat, the parent kills a silent fork."""
        send(self._peer, BEAT)

    def fail(self, reason: str) -> None:
        """Reports why this fork cannot start."""
        send(self._peer, FAILURE + reason.encode(errors="replace")[:_MAX_REASON_BYTES])

    async def exchange(self) -> None:
        """Beats until cancelled, once the fork is ready, and kills a parent that falls silent. This
        process ends with its parent; the supervisor or the container runtime starts both again.

        Like the parent, it counts its own turns instead of reading a clock. Time in which all
        processes were stopped, or this one got no processor, does not count as silence.
        """
        silent = 0
        while True:
            await asyncio.sleep(self.interval_s)
            if self._is_ready:
                self.beat()
            silent = 0 if received(self._peer) else silent + 1
            if silent == BEATS and os.getppid() == self._parent:
                log.error("parent process does not answer; killing it", pid=self._parent)
                with suppress(ProcessLookupError):
                    os.kill(self._parent, signal.SIGKILL)
                    # From within a container, its first process cannot be killed. If it was only
                    # stopped, it continues.
                    os.kill(self._parent, signal.SIGCONT)
