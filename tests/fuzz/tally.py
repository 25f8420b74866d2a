"""A tally of the answers to hostile messages, and of those that must never be given."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nano_vllm_grpc.pb import frontend_pb2
from shared.pb.scheduler_pb2 import GetLoadResponse
from tests.fuzz.corpus import Case
from tests.fuzz.values import CANARY

# Greedy: its answer is known once it was asked for.
VALID = frontend_pb2.GenerateRequest(
    token_ids=frontend_pb2.TokenIds(ids=[5, 6, 7]),
    sampling=frontend_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
)
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

    @contextmanager
    def call(self, sent: object) -> Iterator[None]:
        """Records how a call ends that sent `sent`."""
        try:
            yield
        except aio.AioRpcError as error:
            self.status(sent, error)
        else:
            self.status(sent, None)

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


async def wait_serving(channel: aio.Channel, service: str) -> None:
    request = health_pb2.HealthCheckRequest(service=service)
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
    async for response in watch:
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()


async def send(
    channel: aio.Channel, path: str, message: bytes, tally: Tally, sent: object, **options: Any
) -> None:
    """Sends bytes as they are, reads all answers, and records that the call ended after `sent`."""
    with tally.call(sent):
        async for _ in channel.unary_stream(path)(message, timeout=DEADLINE_S, **options):
            pass
