"""The frame of all attacks: their list, and the means by which one plays and counts what it got."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from grpc import aio

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.http2 import RawConnection, connect

SERVICE = "nanovllm.v1.InferenceService"
HEALTH = "/grpc.health.v1.Health"
_CALL_TIMEOUT_S = 60.0
_CONNECTIONS_AT_ONCE = 32  # being opened


@dataclass
class Loot:
    """The gains of an attacker: answers by status or kind, tokens, and what was sent."""

    answers: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


class Target:
    """A stack's interface under attack, as its attacker sees it.

    Args:
        token: the attacker's own; empty if the frontend asks for none.
        ready: called once the attack is prepared; the attack begins when it returns.
    """

    def __init__(
        self, address: str, token: str, seconds: float, ready: Callable[[], Awaitable[object]]
    ) -> None:
        self.address = address
        self.token = token
        self.loot = Loot()
        self._seconds = seconds
        self._ready = ready
        self._ends_at = 0.0

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def left_s(self) -> float:
        """The seconds that are left of the attack; not positive once it is over."""
        return self._ends_at - time.monotonic()

    async def begin(self) -> None:
        """Marks the end of the attack's preparations."""
        await self._ready()
        self._ends_at = time.monotonic() + self._seconds

    async def hold(self) -> None:
        """Does nothing until the attack is over."""
        await asyncio.sleep(max(0.0, self.left_s))

    async def flood(self, send: Callable[[], Awaitable[object]], at_once: int) -> None:
        """Has `at_once` tasks call `send` again and again until the attack is over."""

        async def again() -> None:
            while self.left_s > 0:
                await send()
                await asyncio.sleep(0)  # a send that never waits leaves the loop to others, too

        await self._run([asyncio.create_task(again()) for _ in range(at_once)])

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[aio.Channel]:
        """A connection of its own, which may send messages of any size."""
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_metadata_size", 1 << 24),
            ("grpc.absolute_max_metadata_size", 1 << 24),
        )
        async with aio.insecure_channel(self.address, options=options) as channel:
            yield channel

    async def ask(
        self,
        channel: aio.Channel,
        method: str,
        message: bytes,
        metadata: Sequence[tuple[str, str]] | None = None,
    ) -> bytes | None:
        """Calls a unary method with bytes as they are, and counts the status; None if refused."""
        metadata = self.metadata if metadata is None else metadata
        path = method if method.startswith("/") else f"/{SERVICE}/{method}"
        call: Any = channel.unary_unary(path)
        self.loot.sent["calls"] += 1
        try:
            answer: bytes = await call(message, metadata=metadata, timeout=_CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            self.loot.answers[error.code().name] += 1
            return None
        except asyncio.CancelledError:
            self.loot.answers["unanswered"] += 1
            raise
        self.loot.answers["OK"] += 1
        return answer

    async def generate(self, channel: aio.Channel, request: pb.GenerateRequest | bytes) -> None:
        """Reads a stream to its end, and counts its tokens and its status."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        call: Any = channel.unary_stream(
            f"/{SERVICE}/GenerateStream",
            response_deserializer=pb.GenerateStreamResponse.FromString,
        )(data, metadata=self.metadata, timeout=_CALL_TIMEOUT_S)
        self.loot.sent["calls"] += 1
        try:
            async for chunk in call:
                self.loot.tokens += len(chunk.token_ids)
            self.loot.answers["OK"] += 1
        except aio.AioRpcError as error:
            self.loot.answers[error.code().name] += 1
        except asyncio.CancelledError:
            self.loot.answers["unfinished"] += 1
            raise
        finally:
            call.cancel()

    async def max_model_len(self) -> int:
        async with self.channel() as channel:
            answer = await self.ask(channel, "GetModel", b"")
        if answer is None:
            raise AssertionError("the attacker's own token is refused")
        self.loot.sent.clear()
        self.loot.answers.clear()
        return pb.GetModelResponse.FromString(answer).max_model_len

    @asynccontextmanager
    async def raw(self, **how: Any) -> AsyncIterator[RawConnection]:
        """A connection for frames by hand, whose answers are counted at its end; `how`: as for
        `connect`."""
        async with connect(self.address, counts=self.loot.answers, **how) as connection:
            self.loot.sent["connections"] += 1
            try:
                yield connection
            finally:
                self.loot.answers["connections closed"] += connection.closed

    async def hold_connections(
        self, count: int, use: Callable[[RawConnection], Awaitable[object]], **how: Any
    ) -> None:
        """Opens connections, as many as the server takes, uses each, and keeps all to the end."""
        opening = asyncio.Semaphore(_CONNECTIONS_AT_ONCE)

        async def one() -> None:
            async with opening:
                held = self.raw(**how)
                connection = await held.__aenter__()
            try:
                await use(connection)
                await self.hold()
            finally:
                await held.__aexit__(None, None, None)

        await self._run([asyncio.create_task(one()) for _ in range(count)])

    async def _run(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Runs tasks until the attack is over; connections that fail are counted."""
        try:
            await self.hold()
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, OSError):
                self.loot.answers[type(result).__name__] += 1
            elif isinstance(result, Exception):
                raise result


Play = Callable[[Target], Awaitable[None]]
Interface = Literal["grpc", "engine", "events", "http", "page", "open"]  # open: without tokens


@dataclass(frozen=True)
class Attack:
    """An attack on one of a stack's interfaces. `kills` names a service, of which a process is
    killed halfway through it."""

    name: str
    about: str
    play: Play
    kills: str = ""
    interface: Interface = "grpc"

    @property
    def anonymous(self) -> bool:
        """Whether it needs a stack that asks for no tokens: only such a one serves HTTP, and the
        cache's events to all of the host."""
        return self.interface in ("events", "http", "page")


ATTACKS: dict[str, Attack] = {}  # by name, in the order of `tests.abuse.attacks`


def attack(kills: str = "", interface: Interface = "grpc") -> Callable[[Play], Play]:
    """Lists a function as an attack: its name with hyphens, its docstring."""

    def add(play: Play) -> Play:
        name = getattr(play, "__name__", "").replace("_", "-")
        about = " ".join((play.__doc__ or "").split())
        ATTACKS[name] = Attack(name, about, play, kills, interface)
        return play

    return add
