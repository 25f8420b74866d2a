"""A tally of the answers to hostile messages, and of those that must never be given."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from shared.pb.scheduler_pb2 import GetLoadResponse
from tests.fuzz.corpus import Case
from tests.fuzz.values import CANARY

DEADLINE_S = 60.0  # per call; a service that has not answered by then hangs

# These mean that the service did not understand a message or expect it: never acceptable.
_NEVER = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
}
# grpc.aio's client reports this, not the server's status, if a stream ends while it writes.
_OWN_DETAILS = "Internal error from Core"
# Traces of exceptions, source files, object addresses and other clients' prompts.
_INTERNAL_TEXT = re.compile(
    r"Traceback|[a-z]Error\b|Exception|\.(py|cc|cpp|so)\b|/(tmp|home|usr|work)/|site-packages"
    r"|0x[0-9a-f]{6}|<\w+ object|grpc_aio|" + CANARY
)
_SHOWN = 300  # characters of a harmful message


@dataclass
class Tally:
    """Counts answers by kind, and keeps a line for each that must not be given; `harmful` are the
    cases that got these, if it was one case each, with what it did."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    harmful: list[tuple[str, Case]] = field(default_factory=list)

    def status(self, sent: object, error: aio.AioRpcError | None) -> None:
        """Records that a call that sent `sent` ended well, or with `error`."""
        code = grpc.StatusCode.OK if error is None else error.code()
        details = "" if error is None else str(error.details())
        if details == _OWN_DETAILS:
            self.counts["cut short"] += 1
            return
        self.counts[code.name] += 1
        if code in _NEVER:
            self.problem(f"{code.name}: {details}", sent)
        self.text(details, sent)
        for key, value in (error.trailing_metadata() or ()) if error is not None else ():
            shown = value if isinstance(value, str) else value.decode(errors="replace")
            self.text(f"{key}: {shown}", sent)

    def text(self, text: str, sent: object) -> None:
        """Checks a text that a client reads."""
        if found := _INTERNAL_TEXT.search(text):
            self.problem(f"internal text {found.group()!r} in {text!r}", sent)

    def problem(self, what: str, sent: object) -> None:
        if isinstance(sent, Case):
            self.harmful.append((what, sent))
        shown = sent.hex() if isinstance(sent, bytes) else str(sent)
        self.problems.append(f"{what}\n    after {shown[:_SHOWN]}")

    def summary(self) -> str:
        """The counts, as in `12 OK, 3 INVALID_ARGUMENT`."""
        return ", ".join(f"{count:,} {name}" for name, count in self.counts.most_common())


async def at_rest(load: Callable[[], Awaitable[GetLoadResponse]]) -> None:
    """Returns once the scheduler holds no sequence and no block."""
    async with asyncio.timeout(DEADLINE_S):
        while (now := await load()).running or now.waiting or now.blocks_used:
            pass


async def unary(channel: aio.Channel, method: str, message: bytes, **options: Any) -> bytes:
    """Sends bytes as they are.

    Raises:
        AioRpcError: with the status that the server sent.
    """
    call = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
    answer: bytes = await call(message, timeout=DEADLINE_S, **options)
    return answer
