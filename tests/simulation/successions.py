"""Schedulers that die, one after another, and the frontends that outlive them, in virtual time.

The scheduler's service, engine and core and the frontend's client are the real ones; messages
between them take a random time, arrive in order, and may be lost with the scheduler.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from grpc import aio

from frontend.engines.engine import Engine as FrontendEngine
from frontend.engines.token_stream import TokenStream
from frontend.request import Request, Sampling
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence as EngineSequence
from scheduler_svc.core.step import Answer, Output, Step
from scheduler_svc.engine import Engine, WorkersLostError
from scheduler_svc.rpc.servicer import SchedulerServicer
from shared.errors import ServiceError, UnavailableError
from shared.pb import scheduler_pb2 as pb
from tests.oracle import VOCAB_SIZE, next_token

# Prompts that begin with one of these kill the scheduler while they are read, when they are first
# scheduled, or with their fifth token; the last kills the workers whenever it is computed.
READ, STEP, TOKEN, WORKERS = range(901, 905)
DEADLY = (READ, STEP, TOKEN)
DEADLY_TOKEN = 5

_LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    max_waiting=1000,
    vocab_size=VOCAB_SIZE,
)


class _DiedError(Exception):
    """Ends whatever a scheduler was doing when it died. Later it does nothing of effect."""


class _MortalScheduler(Scheduler):
    def __init__(self, die: Callable[[], None]) -> None:
        super().__init__(_LIMITS, BlockManager(256, 4))
        self._die = die

    def add(self, seq: EngineSequence, n: int = 1) -> Any:
        self._meet(seq, READ)
        return super().add(seq, n)

    def schedule(self, now: float = 0.0) -> Step | None:
        step = super().schedule(now)
        for row in step.rows if step else ():
            self._meet(row.seq, STEP)
        return step

    def apply(self, step: Step, answer: Answer) -> list[Output]:
        for row in step.rows:
            if row.seq.num_generated_tokens == DEADLY_TOKEN - 1 and row.samples:
                self._meet(row.seq, TOKEN)
        return super().apply(step, answer)

    def _meet(self, seq: EngineSequence, kind: int) -> None:
        if seq.tokens[0] == kind:
            self._die()
            raise _DiedError


class _Workers:
    """An `Executor` for an engine that sends one step at a time."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._steps: deque[Step] = deque()

    async def send(self, step: Step) -> None:
        self._steps.append(step)

    async def receive(self) -> Answer:
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        step = self._steps.popleft()
        if any(row.seq.tokens[0] == WORKERS for row in step.rows):
            raise WorkersLostError("poisoned")
        return Answer([next_token(row.seq.tokens) if row.samples else 0 for row in step.rows])

    async def watch(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def recover(self) -> None:
        self._steps.clear()
        await asyncio.sleep(self._rng.uniform(0, 0.2))


class _Pipe:
    """One direction of a connection: whatever is put in arrives in order, some time later."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._arrives_at = 0.0
        self._cut = False
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: Any) -> None:
        delay = self._rng.choice([0.0, 0.001, 0.05]) * self._rng.random()
        self._arrives_at = max(self._arrives_at, self._loop.time() + delay) + 1e-6
        self._loop.call_at(self._arrives_at, self._arrive, item)

    def cut(self, error: Exception) -> None:
        """Ends with `error`; what is on the way arrives before it, or not at all."""
        if self._rng.random() < 0.5:
            self.put(error)
        else:
            self._arrive(error)
            self._cut = True

    async def get(self) -> Any:
        item = await self._arrived.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _arrive(self, item: Any) -> None:
        if not self._cut:
            self._arrived.put_nowait(item)


class _Call:
    """A `Connect` call, as its client sees it."""

    def __init__(self, world: World, requests: AsyncIterator[pb.FrontendMessage]) -> None:
        self._up, self.down = _Pipe(world.rng), _Pipe(world.rng)
        self._tasks = [world.start(self._send(requests))]
        if world.scheduler is None:
            self.down.cut(_lost())
        else:
            self._tasks.append(world.start(self._serve(world.scheduler)))
            world.scheduler.calls.append(self)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def interrupt(self) -> None:
        """Has the server end the call in an orderly way."""
        self._tasks[1].cancel()

    async def __aiter__(self) -> AsyncIterator[pb.SchedulerMessage]:
        while True:
            yield await self.down.get()

    async def _send(self, requests: AsyncIterator[pb.FrontendMessage]) -> None:
        async for message in requests:
            self._up.put(message)

    async def _received(self) -> AsyncIterator[pb.FrontendMessage]:
        while True:
            yield await self._up.get()

    async def _serve(self, scheduler: _Process) -> None:
        class Context:
            @staticmethod
            async def write(message: pb.SchedulerMessage) -> None:
                if scheduler.alive:
                    self.down.put(message)

        context: Any = Context()
        try:
            await scheduler.servicer.Connect(self._received(), context)
        except ServiceError as error:
            if scheduler.alive:
                self.down.cut(_status(error.code, error.trailing_metadata()))
        except asyncio.CancelledError:  # before it was let in
            if scheduler.alive:
                self.down.cut(_lost())
            raise


class _Process:
    """A scheduler until it dies."""

    def __init__(self, world: World) -> None:
        self.alive = True
        self.calls: list[_Call] = []
        self.servicer = SchedulerServicer()
        self.engine = Engine(
            _MortalScheduler(world.die),
            _Workers(world.rng),
            self.servicer.emit,
            asyncio.get_running_loop().time,
            sync=True,
        )
        info = pb.EngineInfo(max_model_len=64, vocab_size=VOCAB_SIZE)
        self.tasks = [
            world.start(self.servicer.run(self.engine, info)),
            world.start(self.engine.run()),
        ]


class World:
    """Schedulers in succession, and their frontends."""

    def __init__(self, rng: Random, frontends: int) -> None:
        self.rng = rng
        self.deaths = 0  # of a request
        self.scheduler: _Process | None = None
        self._loop = asyncio.get_running_loop()
        self._failures: list[BaseException] = []
        self._up = asyncio.Event()
        self._start()
        dialer: Any = self
        self.clients = [FrontendEngine("", _ignore, dialer=dialer) for _ in range(frontends)]
        self._tasks = [self.start(client.connection.run()) for client in self.clients]

    def die(self) -> None:
        """Ends the scheduler, for which a request is to blame."""
        self.deaths += 1
        self.kill()

    def kill(self) -> None:
        """Ends the scheduler, for which no request is to blame."""
        process = self._end()
        if process is not None:
            for call in process.calls:
                call.down.cut(_lost())

    def restart(self) -> None:
        """Ends the scheduler in an orderly way."""
        process = self._end()
        if process is not None:
            process.alive = True
            for call in process.calls:
                call.interrupt()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that may end with a scheduler, but must not fail otherwise."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, _DiedError):
            self._failures.append(error)

    async def close(self) -> None:
        """Ends everything, and raises what has failed."""
        self._end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failures:
            raise self._failures[0]

    @asynccontextmanager
    async def open(self, _: str) -> AsyncIterator[Any]:
        """Plays the dialer, and the channel that it opens."""
        yield self

    async def channel_ready(self) -> None:
        await self._up.wait()
        await asyncio.sleep(self.rng.uniform(0, 0.1))

    def stream_stream(self, *_: object, **__: object) -> Callable[..., _Call]:
        return lambda requests: _Call(self, requests)

    def unary_unary(self, *_: object, **__: object) -> None:
        pass

    unary_stream = unary_unary

    def _start(self) -> None:
        self.scheduler = _Process(self)
        self._up.set()

    def _end(self) -> _Process | None:
        process, self.scheduler = self.scheduler, None
        self._up.clear()
        if process is not None:
            process.alive = False
            for task in process.tasks:
                task.cancel()
            self._loop.call_later(self.rng.uniform(0.01, 0.5), self._start)
        return process


async def submit(client: FrontendEngine, prompt: Sequence[int], max_tokens: int) -> TokenStream:
    """Submits a greedy request as soon as its frontend is connected."""
    sampling = Sampling(
        seed=0, max_tokens=max_tokens, eos_token_ids=(), stop_token_ids=(), stop=(), temperature=0
    )
    request = Request(f"begins with {prompt[0]}", prompt, sampling, None)
    while True:
        try:
            streams = client.streams.open(request)
            client.submit(streams)
        except UnavailableError:
            await asyncio.sleep(0.01)
        else:
            return streams[0]


async def ends(client: FrontendEngine, stream: TokenStream) -> ServiceError | None:
    """Waits for a stream's end and returns the error that it came with, if any."""
    while not stream.ended:
        await stream.waiter.wait(False)
    client.close(stream)
    return stream.error


async def _ignore(_: object, ready: bool) -> None:
    pass


def _lost() -> aio.AioRpcError:
    return _status(grpc.StatusCode.UNAVAILABLE, ())


def _status(code: grpc.StatusCode, trailers: Sequence[tuple[str, str | bytes]]) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailers))
