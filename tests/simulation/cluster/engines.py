"""Engines: the real scheduler over workers of a modelled pace, whose tokens are the oracle's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Row, Sequence
from scheduler_svc.core.step import DROPPED, Answer, End, Output, Step
from scheduler_svc.engine import Engine, WorkersLostError
from scheduler_svc.rpc.servicer import SchedulerServicer
from shared.paging import Paging
from shared.pb import scheduler_pb2 as pb
from tests.oracle import EMPTY, completion, extend, sample
from tests.simulation.cluster.network import Call, DiedError
from tests.simulation.drafting import MAX_DRAFTS, NO_DRAFTS, Chances, SimulatedSpeculation

if TYPE_CHECKING:
    from tests.simulation.cluster.hosts import Host

# Prompts that begin with one of these kill the scheduler when they are first scheduled, or with
# their fifth token; WORKERS kills the workers whenever it is computed, FAILURE ends the scheduler
# with an error when it is first scheduled, READ kills it when it is queued.
STEP, TOKEN, WORKERS, FAILURE = POISONS = range(901, 905)
READ = 905
DEADLY_TOKEN = 5
_SALT = 331  # between models' tokens
_MAX_RUN = 4  # steps
_KEEPS = 0.5  # that workers keep their cache, if they may


@dataclass(frozen=True)
class Shape:
    """An engine's limits and pace; times are in seconds."""

    limits: Limits
    num_blocks: int
    block_size: int
    step_s: float
    prompt_token_s: float
    decode_s: float
    drafting: Chances = NO_DRAFTS


class Owner(NamedTuple):
    """The numbers of a request and of one of its completions, from a sequence's tokens."""

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


class _Workers:
    """An `Executor`, whose steps take the time that the engine's shape says."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._process = process
        self._loop = asyncio.get_running_loop()
        # With the times at which they begin and end; None: it was dropped.
        self._steps: deque[tuple[Step | None, float, float]] = deque()
        self._free_at = 0.0
        self._states: WeakKeyDictionary[Sequence, tuple[int, int]] = WeakKeyDictionary()
        self._back_at = 0.0
        self._lost: asyncio.Future[None] = self._loop.create_future()

    def lose(self, seconds: float) -> None:
        """Loses the workers, which are back after so long."""
        self._back_at = max(self._back_at, self._loop.time() + seconds)
        if not self._lost.done():
            self._lost.set_result(None)
            rows = (row for step, _, _ in self._steps if step for row in step.rows)
            tokens = dict.fromkeys(map(owner_of, self._host.sequences()), 0)  # progress aside
            running = {owner_of(row.seq) for row in rows}
            self._host.world.losses.add(self._process, tokens, running)

    @property
    def max_run(self) -> int:
        return _MAX_RUN

    async def send(self, run: Seq[Step]) -> None:
        if self._lost.done():
            raise WorkersLostError("lost")
        shape = self._host.shape
        for step in run:
            num_prompt_tokens = step.num_tokens - step.num_decodes
            begins_at = max(self._free_at, self._loop.time())
            self._free_at = begins_at + shape.step_s + shape.decode_s * step.num_decodes
            self._free_at += shape.prompt_token_s * num_prompt_tokens
            self._steps.append((step, begins_at, self._free_at))

    async def cut(self) -> None:
        now = self._loop.time()
        if self._lost.done():
            raise WorkersLostError("lost")
        for place, (_, begins_at, _) in enumerate(self._steps):
            if begins_at > now:
                self._steps[place] = (None, now, now)
        self._free_at = max((ends_at for _, _, ends_at in self._steps), default=now)

    async def receive(self) -> Answer:
        step, _, at = self._steps[0]
        wait_s = max(at - self._loop.time(), 0.0)
        await asyncio.wait([self._lost], timeout=wait_s)
        for row in step.rows if step else ():
            if row.seq.tokens[0] == WORKERS and not self._lost.done():
                self._host.poisoned(self._process, row.seq)
        if self._lost.done():
            raise WorkersLostError("lost")
        self._steps.popleft()
        if step is None:
            return DROPPED
        tokens, state = [0] * len(step.rows), EMPTY
        for i, row in enumerate(step.rows):
            if row.samples:
                state = self._state(row) if row.draft is None else extend(state, row.draft)
                tokens[i] = sample(state, row.seq.params.seed + salt_of(self._process.model))
        return Answer(tokens)

    async def watch(self) -> str:
        await asyncio.shield(self._lost)
        return "lost"

    async def recover(self, *, keep: bool) -> bool:
        while self._lost.done():
            await asyncio.sleep(max(self._back_at - self._loop.time(), 0.0))
            if self._back_at <= self._loop.time():
                self._lost = self._loop.create_future()
        self._steps.clear()
        self._free_at = 0.0
        return keep and self._host.world.rng.random() < _KEEPS

    def _state(self, row: Row) -> int:
        """The state after the row's last token, which is known."""
        seq, end = row.seq, row.start + row.num_tokens
        length, state = self._states.get(seq, (0, EMPTY))
        for token in seq.tokens[length:end]:
            state = extend(state, token)
        self._states[seq] = end, state
        return state


class _Scheduler(Scheduler):
    """Dies of what its host finds poisonous."""

    def __init__(self, host: Host, process: Process) -> None:
        shape = host.shape
        speculation = SimulatedSpeculation(shape.drafting, host.world.rng, self._next_tokens)
        blocks = BlockManager(shape.num_blocks, Paging(shape.block_size))
        super().__init__(shape.limits, blocks, speculation)
        self._host = host
        self._process = process

    def add(self, seq: Sequence, n: int = 1) -> End | None:
        if seq.tokens[0] == READ:
            self._die_of(seq)
        return super().add(seq, n)

    def schedule(self, now: float = 0.0) -> Step | None:
        step = super().schedule(now)
        for row in step.rows if step else ():
            if row.seq.tokens[0] in (STEP, FAILURE):
                self._die_of(row.seq)
        return step

    def apply(self, step: Step, answer: Answer) -> list[Output]:
        for row in step.rows:
            seq = row.seq
            if seq.tokens[0] == TOKEN and seq.num_generated_tokens == DEADLY_TOKEN - 1:
                self._die_of(seq)
        return super().apply(step, answer)

    def _next_tokens(self, seq: Sequence) -> list[int]:
        if seq.tokens[0] in POISONS:
            return []  # so that it gets its tokens one by one
        seed = seq.params.seed + salt_of(self._process.model)
        return completion(seq.tokens, MAX_DRAFTS, seed)

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
        self.held: set[Owner] = set()  # when it died
        self.servicer = SchedulerServicer()
        self.workers = _Workers(host, self)
        self.scheduler = _Scheduler(host, self)
        self.serving = True
        self._host = host
        self._task: asyncio.Task[None] | None = None

    def start(self, info: pb.EngineInfo) -> None:
        clock = asyncio.get_running_loop().time
        engine = Engine(
            self.scheduler, self.workers, self._emit, clock, on_serving=self._on_serving
        )
        self.servicer.start(engine, info)
        self._task = asyncio.ensure_future(engine.run())
        self._task.add_done_callback(self._ended)

    async def left(self, timeout_s: float) -> None:
        """Returns once no frontend is connected any more, or after so long. Polls."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.calls and self.alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    def end(self) -> None:
        """Ends it without a word."""
        self.alive = self.accepts = False
        self.held |= {owner_of(seq) for seq in self.scheduler._sequences.values()}
        for call in [*self.calls]:
            call.lose()
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DiedError):
            raise error  # to the loop's exception handler

    def _emit(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.end and output.end.cause is FinishCause.QUEUE_FULL:
                self._host.world.refuse(owner_of(output.seq).request, self._host)
        self.servicer.emit(outputs)

    async def _on_serving(self, serving: bool) -> None:
        self.serving = serving
        self._host.changed()
        self.servicer.set_serving(serving)
