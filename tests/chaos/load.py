"""Mixed load: clients that send one request after another and check the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from nano_vllm_grpc import AsyncLLM
from nano_vllm_grpc.errors import LLMError
from nano_vllm_grpc.types import Chunk
from tests.chaos.workload import Request
from tests.faults.transcript import Damage, Transcript
from tests.waiting import WAIT_S

# What a client may do with a request, by weight.
_WAYS = {"stream": 70, "cancelled": 20, "read slowly": 10}
_SLOW_READ_S = 0.05  # after each chunk
_FIRST = -1  # a priority; streams of another one may wait for these, whatever happens
_PRIORITIES = (_FIRST, _FIRST, _FIRST, 0, 1)


@dataclass(eq=False)
class Flow:
    """The arrival times of an open stream's tokens: `time.monotonic` of the last ones, and the
    longest pause, in seconds, that ended after `watched_from`."""

    last_token_at: float
    watched_from: float = 0.0
    pause_s: float | None = None  # None if there was no token since


@dataclass
class Outcome:
    """The outcome of all requests so far."""

    requests: Counter[str] = field(default_factory=Counter)  # by what the client did
    tokens: int = 0
    damage: Damage = field(default_factory=Damage)
    failures: list[str] = field(default_factory=list)  # descriptions of what differed or went wrong

    def note(self, way: str, request: Request, found: Transcript, damage: Damage) -> None:
        self.requests[way] += 1
        self.tokens += found.num_tokens
        self.damage += damage
        self.failures += [f"{request.name} ({way}): {each}" for each in damage.differences]


class Load:
    """The load of clients that each have one connection, with one request open at a time.

    Args:
        expected: the transcript that each request must get, by its name.
    """

    def __init__(
        self, address: str, requests: Sequence[Request], expected: Mapping[str, Transcript]
    ) -> None:
        self._address = address
        self._requests = requests
        self._expected = expected
        self._flows: set[Flow] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._moved = asyncio.Event()  # a stream got a token, or ended
        self.outcome = Outcome()

    def start(self, clients: int, seed: int) -> None:
        for number in range(clients):
            rng = random.Random(f"{seed} client {number}")
            self._tasks.append(asyncio.create_task(self._send_requests(rng)))

    async def stop(self) -> None:
        """Stops sending; returns once all open requests have ended."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def watch(self) -> list[Flow]:
        """Returns the timed streams that are getting tokens; their pauses count from now on."""
        now = time.monotonic()
        for flow in self._flows:
            flow.watched_from, flow.pause_s = now, None
        return list(self._flows)

    async def wait_for_tokens(self, flows: Sequence[Flow]) -> None:
        """Returns once each of these streams has had a token since `watch`, or has ended.

        Raises:
            TimeoutError: one of them has done neither.
        """
        async with asyncio.timeout(WAIT_S):
            while any(flow.pause_s is None and flow in self._flows for flow in flows):
                self._moved.clear()
                await self._moved.wait()

    async def _send_requests(self, rng: random.Random) -> None:
        async with AsyncLLM(self._address) as client:
            while not self._stopping:
                request = rng.choice(self._requests)
                (way,) = rng.choices(list(_WAYS), list(_WAYS.values()))
                try:
                    await self._send(client, request, way, rng)
                except LLMError as error:
                    self.outcome.failures.append(f"{request.name} ({way}): {error}")

    async def _send(self, client: AsyncLLM, request: Request, way: str, rng: random.Random) -> None:
        priority = rng.choice(_PRIORITIES)
        expected = self._expected[request.name]
        most = rng.randint(0, expected.num_tokens) if way == "cancelled" else None
        pause_s = _SLOW_READ_S if way == "read slowly" else 0.0
        found = await self._read(
            client.stream(request.prompt, request.params, priority=priority),
            most,
            pause_s,
            timed=priority == _FIRST and not pause_s,
        )
        self.outcome.note(way, request, found, found.compare(expected, cut=most is not None))

    async def _read(
        self, chunks: AsyncGenerator[Chunk, None], most: int | None, pause_s: float, *, timed: bool
    ) -> Transcript:
        """Follows a stream to its end, or cancels it after `most` tokens; waits `pause_s` seconds
        after each chunk. `timed`: whether its pauses count."""
        transcript, flow = Transcript(), None
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    transcript.add(chunk)
                    if most is not None and transcript.num_tokens >= most:
                        break
                    await asyncio.sleep(pause_s)
                    if timed and chunk.token_ids:
                        flow = self._flowed(flow)
        finally:
            if flow is not None:
                self._flows.discard(flow)
                self._moved.set()
        return transcript

    def _flowed(self, flow: Flow | None) -> Flow:
        now = time.monotonic()
        self._moved.set()
        if flow is None:
            flow = Flow(now)
            self._flows.add(flow)
            return flow
        pause_s = now - max(flow.last_token_at, flow.watched_from)
        if flow.watched_from:
            flow.pause_s = max(flow.pause_s or 0.0, pause_s)
        flow.last_token_at = now
        return flow
