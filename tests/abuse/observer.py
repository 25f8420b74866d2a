"""Runs honest clients in a process, and times their answers.

Sixteen streams of a plain gRPC client, one request after another, each with one right answer, two
of them with structured output; a health check every 10 ms on a connection of its own to the
frontend and to the scheduler, which shows how long an event loop stalls; and now and then a new
connection. It sends a message once it knows the answers. "begin" begins a window; "end" is answered
by its figures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.abuse.figures import Figures, Recorder

STREAMS = 16
_TOKENS = 48  # so few that each stream asks for several completions in a window
_SEEDED = 4  # of every that many, one; the others are greedy
_STRUCTURED = 2  # streams
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "hen"]},
        "legs": {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 20},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}
SERVING = health_pb2.HealthCheckResponse.SERVING
_CHECK_EVERY_S = 0.01
_CONNECT_EVERY_S = 0.2
_TIMEOUT_S = 60.0
_CHECK_TIMEOUT_S = 30.0
_STUCK_S = 60.0  # less than the campaign waits for figures
_AGAIN_AFTER_S = 0.05  # of an error
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


def is_structured(number: int) -> bool:
    return number >= STREAMS - _STRUCTURED


def honest_request(number: int, times: int) -> pb.GenerateRequest:
    """The request of stream `number`, with one right answer however many `times` it was made. If it
    has a schema, that has to be compiled each time: it has another title."""
    sampling = pb.SamplingParams(max_tokens=_TOKENS, temperature=0)
    if is_structured(number):
        schema = json.dumps(_SCHEMA | {"title": f"{number} {times}"})
        sampling.structured_output.json_schema = schema
    else:
        sampling.ignore_eos = True
    if number % _SEEDED == 0:
        sampling.temperature, sampling.seed = 1, number
    prompt = pb.TokenIds(ids=[(31 * number + 7 * i * i) % 1500 + 3 for i in range(24)])
    return pb.GenerateRequest(token_ids=prompt, sampling=sampling)


class Observer:
    """Honest clients of one frontend.

    Args:
        scheduler: the address of the scheduler behind it.
        token: the honest clients'; empty if none is asked for.
    """

    def __init__(self, address: str, scheduler: str, token: str) -> None:
        self._address = address
        self._scheduler = scheduler
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._recorder = Recorder()
        self._channel = aio.insecure_channel(address, options=_OPTIONS)
        self._stub = InferenceServiceStub(self._channel)
        self._chunks = [0] * STREAMS
        self._progress = asyncio.Event()  # a stream got a chunk
        self._expected: list[list[int]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Learns the right answers, then keeps asking for them."""
        self._expected = list(await asyncio.gather(*map(self._answer, range(STREAMS))))
        work = [self._stream(number) for number in range(STREAMS)]
        checks = [
            self._check("frontend", self._address),
            self._check("scheduler", self._scheduler),
            self._connect(),
        ]
        self._tasks = {asyncio.create_task(each) for each in (*work, *checks)}
        for task in self._tasks:
            task.add_done_callback(_fail_aloud)
        self.begin()

    def begin(self) -> None:
        self._recorder.begin()

    async def end(self) -> Figures:
        """Waits for one more chunk of each stream: pauses that began in the window belong to it."""
        before = list(self._chunks)

        def waiting() -> int:
            return sum(now == old for now, old in zip(self._chunks, before, strict=True))

        with suppress(TimeoutError):
            async with asyncio.timeout(_STUCK_S):
                while waiting():
                    self._progress.clear()
                    await self._progress.wait()
        return self._recorder.end(stuck=waiting())

    async def _answer(self, number: int) -> list[int]:
        return [token async for token_ids in self._ask(number, times=0) for token in token_ids]

    async def _ask(self, number: int, times: int) -> AsyncIterator[Sequence[int]]:
        how: dict[str, Any] = {"metadata": self._metadata, "timeout": _TIMEOUT_S}
        async for chunk in self._stub.GenerateStream(honest_request(number, times), **how):
            yield chunk.token_ids

    async def _stream(self, number: int) -> None:
        for times in itertools.count(1):
            last, tokens = 0.0, list[int]()
            try:
                async for token_ids in self._ask(number, times):
                    now = time.monotonic()
                    self._recorder.tokens(len(token_ids), now - last if last else None)
                    self._chunks[number] += 1
                    self._progress.set()
                    last = now
                    tokens += token_ids
            except aio.AioRpcError as error:
                self._recorder.harm(error.code().name)
                await asyncio.sleep(_AGAIN_AFTER_S)
            else:
                if tokens != self._expected[number]:
                    self._recorder.harm("wrong")

    async def _check(self, service: str, address: str) -> None:
        async with aio.insecure_channel(address, options=_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                began_at = time.monotonic()
                serving = await _health(stub) == SERVING
                self._recorder.health(service, time.monotonic() - began_at, serving=serving)
                await asyncio.sleep(_CHECK_EVERY_S)

    async def _connect(self) -> None:
        while True:
            began_at = time.monotonic()
            async with aio.insecure_channel(self._address, options=_OPTIONS) as channel:
                answered = await _health(health_pb2_grpc.HealthStub(channel)) is not None
            self._recorder.connect(time.monotonic() - began_at, answered=answered)
            await asyncio.sleep(_CONNECT_EVERY_S)


async def _health(stub: health_pb2_grpc.HealthStub) -> int | None:
    """The status that health answers; None: it does not answer."""
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CHECK_TIMEOUT_S)
    except grpc.RpcError:
        return None
    return int(answer.status)


def _fail_aloud(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise SystemExit(f"an honest client broke: {error!r}")


def observe(pipe: Connection, address: str, scheduler: str, token: str) -> None:
    asyncio.run(_observe(pipe, address, scheduler, token))


async def _observe(pipe: Connection, *addresses: str) -> None:
    observer = Observer(*addresses)
    await observer.start()
    pipe.send("ready")
    while True:
        if await asyncio.to_thread(pipe.recv) == "begin":
            observer.begin()
            pipe.send("begun")
        else:
            pipe.send(await observer.end())
