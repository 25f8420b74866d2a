"""The scheduler's side of a grammar's process."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import suppress

from scheduler_svc.core.sampling import GrammarKind
from scheduler_svc.grammar import wire
from scheduler_svc.grammar.errors import Death, GrammarError, ProcessDiedError
from scheduler_svc.grammar.host_link import ENDED, Forked, HostLink
from scheduler_svc.grammar.wire import Answer

# A process that is within its limit of processor time may be stopped, or get no processor.
ANSWER_S = 20.0
_REPORT_S = 5.0
_READ_BYTES = 1 << 20
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# A mask, None if the completion is complete and nothing can follow, or the sequence's error.
Outcome = bytes | None | GrammarError


class GrammarProcess:
    """A process, from its fork to its end. Make one request at a time: nothing tells two apart.

    `is_usable` becomes false when the process has died or was killed.
    """

    def __init__(self, forked: Forked, pidfd: int) -> None:
        self.pid = forked.pid
        self.is_usable = True
        self._pidfd = pidfd
        self._reader, self._writer = forked.reader, forked.writer
        self._report = forked.report
        self._reporting = forked.reporting
        self._kind = GrammarKind.JSON
        self._received = b""
        self._num_read = 0  # bytes of these

    @classmethod
    async def start(cls, link: HostLink) -> GrammarProcess:
        """Starts a process as a fork of the host.

        Raises:
            VocabularyError: the model's tokenizer cannot be used.
            HostLostError: the host could not fork, or died.
            ProcessDiedError: the process has ended already.
        """
        forked = await link.fork()
        try:
            return cls(forked, os.pidfd_open(forked.pid))
        except OSError as error:  # it has ended, or there are no descriptors
            forked.writer.transport.abort()
            forked.reporting.transport.abort()
            raise ProcessDiedError(Death.KILLED) from error

    async def compile(self, kind: GrammarKind, text: str, timeout_s: float) -> int:
        """Compiles the process's grammar. Returns the process's private memory in bytes.

        Raises:
            GrammarError: the grammar cannot be used.
            ProcessDiedError: the process died, or did not answer for `timeout_s`.
        """
        self._kind = kind
        self._write(wire.compile_request(kind, text))
        answer, contents = await self._read(timeout_s)
        try:
            if answer != Answer.ERROR:
                return wire.read_size(contents)
            reason = contents.decode()
        except (UnicodeDecodeError, struct.error) as error:
            self.close()
            raise ProcessDiedError(Death.CRASHED) from error
        raise GrammarError(kind, reason)

    async def masks(
        self, rows: Seq[wire.Row], closed: Seq[int], *, careful: bool
    ) -> AsyncIterator[Outcome]:
        """Yields the outcome of each row, in order.

        Args:
            closed: matchers to drop first.
            careful: whether the process must send each answer before it begins the next.

        Raises:
            ProcessDiedError: the process died, or did not answer for `ANSWER_S`.
        """
        self._write(wire.batch_request(rows, closed, careful=careful))
        masks: list[bytes | None] = []
        for _ in rows:
            answer, contents = await self._read(ANSWER_S)
            try:
                outcome = self._outcome(answer, contents, masks)
            except (IndexError, ValueError, struct.error) as error:
                self.close()
                raise ProcessDiedError(Death.CRASHED) from error
            masks.append(outcome if isinstance(outcome, bytes) else None)
            yield outcome

    def close(self) -> None:
        """Kills the process."""
        if self.is_usable:
            self.is_usable = False
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._writer.transport.abort()
            self._reporting.transport.abort()

    def _outcome(self, answer: int, contents: bytes, masks: Seq[bytes | None]) -> Outcome:
        """Decodes the answer to a row.

        Args:
            masks: the masks of the previous rows.

        Raises:
            IndexError, ValueError, struct.error: it is not a valid answer.
        """
        match Answer(answer):
            case Answer.ERROR:
                return GrammarError(self._kind, contents.decode())
            case Answer.MASK:
                return contents
            case Answer.SAME_MASK:
                return masks[wire.read_index(contents)]
            case Answer.COMPLETE:
                return None
        raise ValueError("not an answer to this")

    def _write(self, data: bytes) -> None:
        """Sends a request. Its answer must be read before another request is sent."""
        self._writer.write(data)

    async def _read(self, timeout_s: float) -> tuple[int, bytes]:
        """The next answer's type and contents."""
        while True:
            received, first = self._received, self._num_read + wire.HEADER.size
            if first <= len(received):
                size, answer = wire.HEADER.unpack_from(received, self._num_read)
                if size > _READ_BYTES:  # more than the mask of eight million tokens
                    self.close()
                    raise ProcessDiedError(Death.CRASHED)
                if first + size <= len(received):
                    self._num_read = first + size
                    return answer, received[first : self._num_read]
            more = await self._receive(timeout_s)
            self._received, self._num_read = received[self._num_read :] + more, 0

    async def _receive(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                if more := await self._reader.read(_READ_BYTES):
                    return more
        except TimeoutError:
            self.close()
            raise ProcessDiedError(Death.SILENT) from None
        except OSError:
            pass
        except BaseException:  # cancelled: the next request would read this answer
            self.close()
            raise
        death = await self._death()
        self.close()
        raise ProcessDiedError(death)

    async def _death(self) -> Death:
        """How the process died, by the host's report. There is no report if the host died, too."""
        line = b""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_REPORT_S):
                line = await self._report.readline()
        word, _, value = line.decode().partition(" ")
        status = int(value) if word == ENDED else -signal.SIGKILL
        if status in (-signal.SIGPROF, wire.OUT_OF_MEMORY):
            return Death.AT_LIMIT
        return Death.KILLED if -status in _FROM_OUTSIDE else Death.CRASHED
