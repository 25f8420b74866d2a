"""A fork's connection to its parent process (`parent_process`): it sends that it is ready, why it
cannot start and, again and again, that it is alive."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress

import structlog

log = structlog.get_logger(__name__)

# Beats per `hang_timeout_s`, and as many without one are a hang.
BEATS = 6
READY, BEAT, FAILURE = b"+", b".", b"!"
_MAX_REASON_BYTES = 1000


def received(peer: socket.socket) -> list[bytes]:
    """Returns the messages that have arrived, without waiting for any."""
    messages = []
    with suppress(OSError):  # there is nothing more, or the other side is gone
        while message := peer.recv(4 + _MAX_REASON_BYTES, socket.MSG_DONTWAIT):
            messages.append(message)
    return messages


def send(peer: socket.socket, message: bytes) -> None:
    """Sends a message, unless the other side is gone or has too many to read."""
    with suppress(OSError):
        peer.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Heartbeat:
    """The fork's side.

    Args:
        parent: the parent's process id.
        hang_timeout_s: a side that the other does not hear for this long is killed.
        restarts: how many forks of this parent process died before this one.
    """

    def __init__(
        self, peer: socket.socket, parent: int, hang_timeout_s: float, restarts: int = 0
    ) -> None:
        self.restarts = restarts
        self.interval_s = hang_timeout_s / BEATS
        self._peer = peer
        self._parent = parent
        self._is_ready = False

    def ready(self) -> None:
        """Says that this fork serves: from now on, whatever ends it, another takes its place."""
        self._is_ready = True
        send(self._peer, READY)

    def beat(self) -> None:
        """Says that this fork is alive. Once it has, the parent kills it if it falls silent."""
        send(self._peer, BEAT)

    def fail(self, reason: str) -> None:
        """Says why this fork cannot start."""
        send(self._peer, FAILURE + reason.encode(errors="replace")[:_MAX_REASON_BYTES])

    async def exchange(self) -> None:
        """Beats for ever, once the fork is ready, and kills a parent that falls silent: with it
        this process ends, and whoever watches the parent starts both.

        Like the parent, it counts its own turns instead of reading a clock: time in which all
        processes were stopped, or this one got no processor, is nobody's fault.
        """
        silent = 0
        while True:
            await asyncio.sleep(self.interval_s)
            if self._is_ready:
                self.beat()
            silent = 0 if received(self._peer) else silent + 1
            if silent == BEATS and os.getppid() == self._parent:
                log.error("kills its parent, which does not answer", pid=self._parent)
                with suppress(ProcessLookupError):
                    os.kill(self._parent, signal.SIGKILL)
                    # The first process of a container cannot be killed from within; one that was
                    # only stopped goes on.
                    os.kill(self._parent, signal.SIGCONT)
