"""The scheduler's side of a grammar's process."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path

from scheduler_svc.grammar import wire
from scheduler_svc.grammar.errors import Death, GrammarError, ProcessDiedError
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.grammar.wire import AnswerType
from shared.sampling_params import GrammarKind

# A process that is within its limit of processor time may be stopped, or get no processor.
ANSWER_S = 20.0
_MAX_ANSWER_BYTES = 1 << 20  # the mask of eight million tokens

# A mask, a draft with its masks, None if the completion is complete and nothing can follow, or the
# sequence's error.
Outcome = bytes | wire.MaskedDraft | None | GrammarError


class GrammarProcess:
    """A process, from its fork to its end. Make one request at a time: nothing tells two apart.

    `is_usable` becomes false when the process has died or was killed.
    """

    def __init__(
        self, pid: int, pidfd: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self.is_usable = True
        self._pidfd = pidfd
        self._reader, self._writer = reader, writer
        self._kind = GrammarKind.JSON
        self._received = bytearray()

    @classmethod
    async def start(cls, link: HostLink) -> GrammarProcess:
        """Starts a process as a fork of the host.

        Raises:
            VocabularyError: the model's tokenizer cannot be used.
            ProcessDiedError: the process has ended already.
        """
        pid, reader, writer = await link.fork()
        try:
            return cls(pid, os.pidfd_open(pid), reader, writer)
        except OSError as error:  # it has ended, or there are no descriptors
            writer.transport.abort()
            raise ProcessDiedError(Death.KILLED) from error

    async def compile(self, kind: GrammarKind, text: str, timeout_s: float) -> int:
        """Compiles the process's grammar. Returns the process's private memory in bytes.

        Raises:
            GrammarError: the grammar cannot be used.
            ProcessDiedError: the process died, or did not answer for `timeout_s`.
        """
        self._kind = kind
        self._writer.write(wire.compile_request(kind, text))
        outcome = await self._outcome([], timeout_s)
        if isinstance(outcome, GrammarError):
            raise outcome
        try:
            return await asyncio.to_thread(_private_bytes, self.pid)
        except OSError:
            raise self._end(Death.KILLED) from None

    async def masks(
        self,
        rows: Seq[wire.MaskRow],
        closed: Seq[int],
        outcomes: list[Outcome],
        *,
        careful: bool,
    ) -> None:
        """Appends the outcome of each row to `outcomes`, in order.

        Args:
            closed: matchers to drop first.
            careful: whether the process must send each answer before it begins the next.

        Raises:
            ProcessDiedError: the process died, or did not answer for `ANSWER_S`.
        """
        self._writer.write(wire.batch_request(rows, closed, careful=careful))
        batch: list[Outcome] = []
        for _ in rows:
            batch.append(await self._outcome(batch, ANSWER_S))
            outcomes.append(batch[-1])

    def close(self) -> None:
        """Kills the process."""
        if self.is_usable:
            self.is_usable = False
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._writer.transport.abort()

    async def _outcome(self, batch: Seq[Outcome], timeout_s: float) -> Outcome:
        """Reads the answer to a row. `batch`: the outcomes of the previous rows."""
        kind, contents = await self._read(timeout_s)
        try:
            match AnswerType(kind):
                case AnswerType.ERROR:
                    return GrammarError(self._kind, contents.decode())
                case AnswerType.MASK:
                    return contents
                case AnswerType.SAME_MASK:
                    (index,) = wire.INDEX.unpack(contents)
                    return batch[int(index)]
                case AnswerType.DRAFT:
                    return wire.read_draft(contents)
                case AnswerType.DONE:
                    return None
        except (IndexError, ValueError, struct.error):
            raise self._end(Death.CRASHED) from None

    async def _read(self, timeout_s: float) -> tuple[int, bytes]:
        """The next answer's type and contents."""
        received = self._received
        while len(received) <= (end := self._contents_end()):
            received += await self._receive(timeout_s)
        contents, kind = bytes(received[wire.LENGTH.size : end]), received[end]
        del received[: end + 1]
        return kind, contents

    def _contents_end(self) -> int:
        """The index of the type of the answer that is being received, as far as that is known."""
        if len(self._received) < wire.LENGTH.size:
            return wire.LENGTH.size
        (size,) = wire.LENGTH.unpack_from(self._received)
        if size > _MAX_ANSWER_BYTES:
            raise self._end(Death.CRASHED)
        return wire.LENGTH.size + int(size)

    async def _receive(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                if more := await self._reader.read(_MAX_ANSWER_BYTES):
                    return more
        except TimeoutError:
            raise self._end(Death.SILENT) from None
        except OSError:
            pass
        except BaseException:  # cancelled: the next request would read this answer
            self.close()
            raise
        last = self._received[-1] if self._received else 0
        # The host says nothing if it died, too.
        raise self._end(Death(last) if last in {*Death} else Death.KILLED)

    def _end(self, death: Death) -> ProcessDiedError:
        """Kills the process, if it still runs; returns the error to raise."""
        self.close()
        return ProcessDiedError(death)


def _private_bytes(pid: int) -> int:
    """The bytes of memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = dict(line.split(":", 1) for line in lines)
    return sum(int(found[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) << 10
