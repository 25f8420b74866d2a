"""The scheduler's link to the grammar host.

The host listens on no address. Only processes that inherited the link can reach it.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from scheduler_svc.grammar.errors import VocabularyError

# The host's first line through a connection: a word and its value.
STARTED = "started"  # pid
VOCABULARY = "vocabulary"  # the text of a VocabularyError
FAILED = "failed"  # reason

_MAX_LINE_BYTES = 16 << 10
_RETRY_S = 0.2


@dataclass(frozen=True)
class HostLink:
    """Both ends of a pair of sockets that preserve messages. The parent process of scheduler and
    host makes the link, so that it outlives either. All three processes have both ends, so neither
    end is ever closed. A demand that a host dies without taking waits for the next host.

    The scheduler calls `fork`, from one event loop only.
    """

    scheduler: socket.socket
    host: socket.socket

    @classmethod
    def create(cls) -> HostLink:
        scheduler, host = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        scheduler.setblocking(False)
        return cls(scheduler, host)

    def close(self) -> None:
        self.scheduler.close()
        self.host.close()

    async def fork(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Makes the host fork a process for a grammar, however long the host takes to load and
        however many hosts die meanwhile.

        Returns:
            The process's id, and the connection to it.

        Raises:
            VocabularyError: the model's tokenizer cannot be used.
        """
        while True:
            ours, theirs = socket.socketpair()
            try:
                word, value = await self._ask(ours, theirs)
                if word == STARTED:
                    return int(value), *await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            ours.close()
            if word == VOCABULARY:
                raise VocabularyError(value)
            await asyncio.sleep(_RETRY_S)  # the host died, or could not fork

    async def _ask(self, ours: socket.socket, theirs: socket.socket) -> tuple[str, str]:
        """Gives the host one end of a connection; returns what it says through the other, which is
        nothing if it dies."""
        ours.setblocking(False)
        with theirs:
            while True:
                try:
                    socket.send_fds(self.scheduler, [b"fork"], [theirs.fileno()])
                    break
                except BlockingIOError:  # there is no host, or it is slow
                    await asyncio.sleep(_RETRY_S)
        received = await asyncio.get_running_loop().sock_recv(ours, _MAX_LINE_BYTES)
        line, _, _ = received.decode().partition("\n")  # a `Death` may follow already
        word, _, value = line.partition(" ")
        return word, value
