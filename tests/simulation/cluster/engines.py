"""Hosts, each for one engine after another: the real scheduler over workers of a modelled pace,
whose tokens are the oracle's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

from scheduler_svc.admission import Limits
from scheduler_svc.block_manager import BlockManager
from scheduler_svc.engine import Engine, WorkersLostError
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import FinishCause, Sequence
from scheduler_svc.server import SchedulerServicer
from scheduler_svc.step import Answer, Output, Row, Step
from shared.pb import scheduler_pb2 as pb
from tests.oracle import EMPTY, VOCAB_SIZE, extend, sample
from tests.simulation.cluster.network import Call

# Prompts that begin with one of these kill the scheduler when they are first scheduled, or with
# their fifth token; the last kills the workers whenever it is computed.
STEP, TOKEN, WORKERS = POISONS = range(901, 904)
DEADLY_TOKEN = 5
_SALT = 331  # between models' tokens


@dataclass(frozen=True)
class Shape:
    """An engine's limits and pace; times are in seconds."""

    limits: Limits
    num_blocks: int
    block_size: int
    step_s: float
    prompt_token_s: float
    decode_s: float


class Owner(NamedTuple):
    """A request's number and one of its completions', as a sequence's tokens tell."""

    request: int
    completion: int


def marked(number: int) -> list[int]:
    """The last tokens of the prompt of request `number`, whose seed is its number as well."""
    return list(divmod(number, 900))


def owner_of(seq: Sequence) -> Owner:
    high, low = seq.tokens[seq.num_prompt_tokens - 2 : seq.num_prompt_tokens]
    number = 900 * high + low
    return Owner(number, seq.params.seed - number)


def salt_of(model: int) -> int:
    return _SALT * model


class DiedError(Exception):
    """Ends what a scheduler was doing when it died."""


class _Workers:
    """An `Executor`, whose steps take the time that the engine's shape says."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._steps: deque[tuple[Step, float]] = deque()
        self._free_at = 0.0
        self._states: WeakKeyDictionary[Sequence, tuple[int, int]] = WeakKeyDictionary()
        self._back_at = 0.0
        self._lost: asyncio.Future[None] = self._loop.create_future()

    def lose(self, seconds: float) -> None:
        """They are gone, and back after so long."""
        self._back_at = max(self._back_at, self._loop.time() + seconds)
        if not self._lost.done():
            self._lost.set_result(None)

    async def send(self, step: Step) -> None:
        if self._lost.done():
            raise WorkersLostError("lost")
        shape = self._host.shape
        num_prompt_tokens = step.num_tokens - step.num_decodes
        seconds = shape.step_s + shape.decode_s * step.num_decodes
        self._free_at = max(self._free_at, self._loop.time()) + seconds
        self._free_at += shape.prompt_token_s * num_prompt_tokens
        self._steps.append((step, self._free_at))

    async def receive(self) -> Answer:
        step, at = self._steps[0]
        wait_s = max(at - self._loop.time(), 0.0)
        await asyncio.wait([self._lost], timeout=wait_s)
        for row in step.rows:
            if row.seq.tokens[0] == WORKERS and not self._lost.done():
                self._host.poisoned(self._process, row.seq)
        if self._lost.done():
            raise WorkersLostError("lost")
        self._steps.popleft()
        return Answer([self._sample(row) if row.samples else 0 for row in step.rows])

    async def watch(self) -> str:
        await asyncio.shield(self._lost)
        return "lost"

    async def recover(self) -> None:
        while self._lost.done():
            await asyncio.sleep(max(self._back_at - self._loop.time(), 0.0))
            if self._back_at <= self._loop.time():
                self._lost = self._loop.create_future()
        self._steps.clear()
        self._free_at = 0.0

    def _sample(self, row: Row) -> int:
        seq, end = row.seq, row.start + row.num_tokens
        length, state = self._states.get(seq, (0, EMPTY))
        for token in seq.tokens[length:end]:
            state = extend(state, token)
        self._states[seq] = end, state
        return sample(state, seq.params.seed + salt_of(self._process.model))


class _Scheduler(Scheduler):
    """Dies of what its host finds poisonous."""

    def __init__(self, host: Host, process: Process) -> None:
        shape = host.shape
        super().__init__(shape.limits, BlockManager(shape.num_blocks, shape.block_size))
        self._host = host
        self._process = process

    def schedule(self, now: float = 0.0) -> Step | None:
        step = super().schedule(now)
        for row in step.rows if step else ():
            if row.seq.tokens[0] == STEP:
                self._die_of(row.seq)
        return step

    def apply(self, step: Step, answer: Answer) -> list[Output]:
        for row in step.rows:
            seq = row.seq
            if seq.tokens[0] == TOKEN and seq.num_generated_tokens == DEADLY_TOKEN - 1:
                self._die_of(seq)
        return super().apply(step, answer)

    def _die_of(self, seq: Sequence) -> None:
        self._host.poisoned(self._process, seq)
        raise DiedError


class Process:
    """An engine from its start to its end."""

    def __init__(self, host: Host) -> None:
        self.alive = True
        self.accepts = True
        self.model = host.model
        self.calls: dict[Call, None] = {}
        self.servicer = SchedulerServicer()
        self.workers = _Workers(host, self)
        self.scheduler = _Scheduler(host, self)
        self.serving = True
        self._host = host
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, info: pb.EngineInfo) -> None:
        clock = asyncio.get_running_loop().time
        engine = Engine(
            self.scheduler, self.workers, self._emit, clock, on_serving=self._on_serving
        )
        works = self.servicer.run(engine, info), engine.run()
        self._tasks = [asyncio.ensure_future(work) for work in works]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def left(self, timeout_s: float) -> None:
        """Returns once no frontend is connected any more, or after so long. Polls."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.calls and self.alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    def end(self) -> None:
        """Ends it without a word."""
        self.alive = self.accepts = False
        for call in [*self.calls]:
            call.lose()
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DiedError):
            raise error  # to the loop's exception handler

    def _emit(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.end and output.end.cause is FinishCause.QUEUE_FULL:
                self._host.on_refused(owner_of(output.seq).request, self._host)
        self.servicer.emit(outputs)

    async def _on_serving(self, serving: bool) -> None:
        self.serving = serving
        self._host.changed()
        self.servicer.set_serving(serving)


class Host:
    """Has an engine, or none, with one model or another."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        model: int,
        *,
        on_poisoned: Callable[[int, int, Host], float],
        on_refused: Callable[[int, Host], None],
    ) -> None:
        """Args:
        on_poisoned: is told of a request, of one of `POISONS`, that takes down this host's workers
            or scheduler, and returns the seconds until those are back.
        on_refused: is told of a request for which the engine has no room.
        """
        self.name = self.address = name
        self.shape = shape
        self.model = model  # that the next engine has
        self.process: Process | None = None
        self.listed = False
        self.changed_at = 0.0  # whether it serves, is listed or is reachable
        self.cut_at = -inf  # when a link to it was last cut, or healed
        self._on_poisoned = on_poisoned
        self.on_refused = on_refused
        self._up = asyncio.Event()

    @property
    def serving(self) -> bool:
        process = self.process
        return process is not None and process.accepts and process.serving and self.listed

    @property
    def served_model(self) -> int | None:
        return self.process.model if self.process else None

    def changed(self) -> None:
        self.changed_at = asyncio.get_running_loop().time()

    async def listens(self) -> Process:
        while self.process is None or not self.process.accepts:
            self._up.clear()
            await self._up.wait()
        return self.process

    def start(self) -> None:
        """Starts an engine, unless there is one."""
        if self.process is not None:
            return
        self.changed()
        limits = self.shape.limits
        self.process = Process(self)
        self.process.start(
            pb.EngineInfo(
                max_model_len=limits.max_model_len,
                vocab_size=VOCAB_SIZE,
                num_blocks=self.shape.num_blocks,
                block_size=self.shape.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_waiting=limits.max_waiting,
                name=self.name,
                model_fingerprint=f"model {self.model}",
            )
        )
        self._up.set()

    def kill(self, back_s: float | None = None) -> None:
        """Ends the engine at once; it is started again after so long."""
        process, self.process = self.process, None
        if process is not None:
            self.changed()
            process.end()
        if back_s is not None:
            asyncio.get_running_loop().call_later(back_s, self.start)

    async def stop(self, drain_s: float) -> None:
        """Ends the engine as SIGTERM does: it tells frontends and stays for their streams."""
        process = self.process
        if process is None:
            return
        self.changed()
        process.accepts = False
        process.servicer.drain()
        await process.left(drain_s)
        if process.alive:
            for call in [*process.calls]:
                call.interrupt()
            await process.left(1.0)
            self.kill()

    def poisoned(self, process: Process, seq: Sequence) -> None:
        """Takes down what a poisonous sequence takes down."""
        if process is not self.process:
            return
        back_s = self._on_poisoned(owner_of(seq).request, seq.tokens[0], self)
        if seq.tokens[0] == WORKERS:
            process.workers.lose(back_s)
        else:
            self.kill(back_s)

    def lose_workers(self, seconds: float) -> None:
        if self.process is not None:
            self.process.workers.lose(seconds)

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return [*self.process.scheduler._sequences.values()] if self.process else []
