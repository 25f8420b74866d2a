"""The scheduler's link to the grammar host.

The host listens on no address. Only processes that inherited the link can reach it.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass

from scheduler_svc.grammar.errors import HostLostError, VocabularyError

# Demands, each with the descriptors named here.
LOAD = b"load"  # [report]: import xgrammar and read the vocabulary, if that is not done yet
FORK = b"fork"  # [report, scheduler]: load, and give a new process the second descriptor

# Lines that the host sends through `report`: a word and its value.
LOADED = "loaded"
STARTED = "started"  # pid
VOCABULARY = "vocabulary"  # the text of a VocabularyError
FAILED = "failed"  # reason
ENDED = "ended"  # exit status; negative for a signal

_RETRY_S = 0.2


@dataclass(frozen=True)
class Forked:
    """A new process, with a connection to it and the host's report of its end."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    report: asyncio.StreamReader
    reporting: asyncio.StreamWriter


@dataclass(frozen=True)
class HostLink:
    """Both ends of a pair of sockets that preserve messages. The parent process of scheduler and
    host makes the link, so that it outlives either. All three processes have both ends, so neither
    end is ever closed. A demand that a host dies without taking waits for the next host.

    The scheduler calls `load` and `fork`, from one event loop only.
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

    async def load(self) -> None:
        """Waits until the host has loaded xgrammar and the vocabulary, however long that takes and
        however many hosts die meanwhile.

        Raises:
            VocabularyError: the model's tokenizer cannot be used.
        """
        while True:
            with suppress(HostLostError):
                _, _, writer = await self._demand(LOAD, [])
                writer.transport.abort()
                return
            await asyncio.sleep(_RETRY_S)

    async def fork(self) -> Forked:
        """Makes the host fork a process for a grammar.

        Raises:
            VocabularyError: the model's tokenizer cannot be used.
            HostLostError: the host could not fork, or died.
        """
        reader, writer, theirs = await _stream_pair()
        try:
            with theirs:
                pid, report, reporting = await self._demand(FORK, [theirs])
        except BaseException:
            writer.transport.abort()
            raise
        return Forked(int(pid), reader, writer, report, reporting)

    async def _demand(
        self, demand: bytes, sockets: list[socket.socket]
    ) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a demand, and returns the value of the host's answer and the rest of its report."""
        reader, writer, theirs = await _stream_pair()
        try:
            with theirs:
                await self._send(demand, [theirs, *sockets])
            for each in sockets:  # else the end of the host's process would not close it
                each.close()
            line = b""
            with suppress(OSError):
                line = await reader.readline()
        except BaseException:
            writer.transport.abort()
            raise
        word, _, value = line.decode().rstrip("\n").partition(" ")
        if word in (LOADED, STARTED):
            return value, reader, writer
        writer.transport.abort()
        if word == VOCABULARY:
            raise VocabularyError(value)
        raise HostLostError(value or "the grammar host died")

    async def _send(self, demand: bytes, sockets: list[socket.socket]) -> None:
        while True:
            try:
                socket.send_fds(self.scheduler, [demand], [each.fileno() for each in sockets])
                return
            except BlockingIOError:  # there is no host, or it is slow
                await asyncio.sleep(_RETRY_S)


async def _stream_pair() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
    """A stream, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    try:
        return *await asyncio.open_connection(sock=ours), theirs
    except BaseException:  # cancelled
        ours.close()
        theirs.close()
        raise
