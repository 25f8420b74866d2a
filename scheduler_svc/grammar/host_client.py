"""The scheduler's side of the grammar host."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import structlog

from scheduler_svc.grammar.errors import HostLostError, VocabularyError
from scheduler_svc.grammar.host_link import (
    FAILED,
    FORK,
    LOAD,
    VOCABULARY,
    HostLink,
)

log = structlog.get_logger(__name__)

# Without an answer for this long, a host is killed; its parent starts another. A fork takes some
# 20 ms, loading some 4 s.
_ANSWER_S = 10.0
_LOAD_S = 120.0
_LOOK_EVERY_S = 0.5
_RETRY_S = 0.2


@dataclass(frozen=True)
class Forked:
    """A new process: a connection to it, and the host's news of its end."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    report: asyncio.StreamReader
    reporting: asyncio.StreamWriter


class HostClient:
    """Asks the grammar host for processes. Use it from one event loop only."""

    def __init__(self, link: HostLink) -> None:
        self._link = link

    async def load(self) -> None:
        """Returns once the host has loaded xgrammar and the vocabulary, however long that takes and
        however many hosts.

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
        """
        Raises:
            VocabularyError: the model's tokenizer cannot be used.
            HostLostError: the host could not do it, or died.
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
        """Returns the value that the host answers with, and the rest of its report."""
        reader, writer, theirs = await _stream_pair()
        try:
            with theirs:
                await self._send(demand, [theirs, *sockets])
            for each in sockets:  # else nobody would see the host's process close it
                each.close()
            line = await self._answer(reader)
        except BaseException:
            writer.transport.abort()
            raise
        word, _, value = line.decode().rstrip("\n").partition(" ")
        if word not in (VOCABULARY, FAILED):
            return value, reader, writer
        writer.transport.abort()
        if word == VOCABULARY:
            raise VocabularyError(value)
        raise HostLostError(value)

    async def _send(self, demand: bytes, sockets: list[socket.socket]) -> None:
        patience = _Patience(self._link)
        while True:
            try:
                socket.send_fds(self._link.scheduler, [demand], [s.fileno() for s in sockets])
            except BlockingIOError:
                await asyncio.sleep(_LOOK_EVERY_S)
                patience.look()
            else:
                return

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        """The first line of a report."""
        patience = _Patience(self._link)
        reading = asyncio.ensure_future(reader.readline())
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=_LOOK_EVERY_S)
                patience.look()
            try:
                line = reading.result()
            except OSError as error:
                raise HostLostError(str(error)) from error
        finally:
            reading.cancel()
        if not line:
            raise HostLostError("the grammar host died")
        return line


async def _stream_pair() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
    """A stream, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    try:
        return *await asyncio.open_connection(sock=ours), theirs
    except BaseException:  # cancelled
        ours.close()
        theirs.close()
        raise


class _Patience:
    """Kills a host that has not answered for too long."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._state = link.get_state()
        self._since = time.monotonic()

    def look(self) -> None:
        state, now = self._link.get_state(), time.monotonic()
        if state != self._state:
            self._state, self._since = state, now
        pid, loading = state
        if pid and now - self._since > (_LOAD_S if loading else _ANSWER_S):
            log.error("kills the grammar host, which does not answer", pid=pid)
            self._since = now
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
