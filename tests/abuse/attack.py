"""The frame of all attacks: their list, and the means by which one plays and counts what it got."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from grpc import aio

from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.http2 import RawConnection, connect

SERVICE = "nanovllm.v1.InferenceService"
HEALTH = "/grpc.health.v1.Health"
_CALL_TIMEOUT_S = 60.0
_CONNECTIONS_AT_ONCE = 32  # being opened


@dataclass
class Gains:
    """The gains of an attacker: answers by status or kind, their tokens, and what was sent."""

    answers: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


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
        self.gains = Gains()
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

    async def flood(self, send: Callable[[], Awaitable[object]], at_once: int) -> None:
        """Begins the attack: until it is over, `at_once` tasks call `send` again and again."""

        async def again() -> None:
            while self.left_s > 0:
                await send()
                await asyncio.sleep(0)  # a send that never waits leaves the loop to others, too

        await self._run(again, at_once)

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
        answer: bytes | None = None
        with self.counted():
            answer = await call(message, metadata=metadata, timeout=_CALL_TIMEOUT_S)
        return answer

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a call and its status; raises no error of it."""
        self.gains.sent["calls"] += 1
        try:
            yield
            self.gains.answers["OK"] += 1
        except aio.AioRpcError as error:
            self.gains.answers[error.code().name] += 1
        except asyncio.CancelledError:
            self.gains.answers["unfinished"] += 1
            raise

    async def generate(self, channel: aio.Channel, request: pb.GenerateRequest) -> None:
        """Reads a stream to its end, and counts its tokens."""
        stub: Any = InferenceServiceStub(channel)
        call = stub.GenerateStream(request, metadata=self.metadata, timeout=_CALL_TIMEOUT_S)
        try:
            with self.counted():
                async for chunk in call:
                    self.gains.answers["tokens"] += len(chunk.token_ids)
        finally:
            call.cancel()

    async def max_model_len(self) -> int:
        async with self.channel() as channel:
            answer = await self.ask(channel, "GetModel", b"")
        if answer is None:
            raise AssertionError("the attacker's own token is refused")
        self.gains.sent.clear()
        self.gains.answers.clear()
        return pb.GetModelResponse.FromString(answer).max_model_len

    @asynccontextmanager
    async def raw(self, **how: Any) -> AsyncIterator[RawConnection]:
        """A connection for frames by hand, whose answers are counted at its end; `how`: as for
        `connect`."""
        async with connect(self.address, counts=self.gains.answers, **how) as connection:
            self.gains.sent["connections"] += 1
            try:
                yield connection
            finally:
                self.gains.answers["connections closed"] += connection.closed

    async def hold_connections(
        self,
        count: int,
        use: Callable[[RawConnection], Awaitable[object]] | None = None,
        **how: Any,
    ) -> None:
        """Begins the attack: opens connections, as many as the server takes, uses each, and keeps
        all to the end."""
        opening = asyncio.Semaphore(_CONNECTIONS_AT_ONCE)

        async def one() -> None:
            async with AsyncExitStack() as held:
                async with opening:
                    connection = await held.enter_async_context(self.raw(**how))
                if use is not None:
                    await use(connection)
                await asyncio.sleep(self._seconds)

        await self._run(one, count)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
        """Runs `count` tasks until the attack is over; connections that fail are counted."""
        await self._ready()
        self._ends_at = time.monotonic() + self._seconds
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        try:
            await asyncio.sleep(self._seconds)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, OSError):
                self.gains.answers[type(result).__name__] += 1
            elif isinstance(result, Exception):
                raise result


Play = Callable[[Target], Awaitable[None]]
Interface = Literal["grpc", "reflection", "http", "dashboard"]


@dataclass(frozen=True)
class Attack:
    """An attack on one of a stack's interfaces. `kills` names a service, of which a process is
    killed halfway through it."""

    name: str
    play: Play
    kills: str = ""
    interface: Interface = "grpc"

    @property
    def anonymous(self) -> bool:
        """Whether it needs a stack that asks for no tokens: only such a one has reflection and a
        chat, and takes these attackers' requests over HTTP."""
        return self.interface in ("reflection", "http", "dashboard")


ATTACKS: dict[str, Attack] = {}  # by name, in the order of `tests.abuse.attacks`


def attack(kills: str = "", interface: Interface = "grpc") -> Callable[[Play], Play]:
    """Lists a function as an attack, by its name with hyphens."""

    def add(play: Play) -> Play:
        name = getattr(play, "__name__", "").replace("_", "-")
        ATTACKS[name] = Attack(name, play, kills, interface)
        return play

    return add
