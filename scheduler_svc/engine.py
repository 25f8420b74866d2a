"""The engine loop: schedule a step, have it run, apply its answer, tell the frontends.

One step ahead: while the workers run step N, step N + 1 is already with them, so that they never
wait for what happens here."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from scheduler_svc.constraints import Constraints
from scheduler_svc.grammar_compiler import Grammars
from scheduler_svc.load import Load
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import FinishCause, Sequence, SequenceKey
from scheduler_svc.step import Answer, End, Output, Step

log = structlog.get_logger(__name__)

# A step that fails this often in a row is at fault itself: its sequences end.
MAX_STEP_FAILURES = 3


class WorkersLostError(Exception):
    """A worker is gone, and the cache with it."""


class Executor(Protocol):
    """Runs steps: over gRPC in the service, in process in the benchmark."""

    async def send(self, step: Step) -> None:
        """Has `step` run after those that were sent before.

        Raises:
            WorkersLostError: it will never be answered.
        """

    async def receive(self) -> Answer:
        """The answer to the oldest step that `receive` has not been called for.

        Raises:
            WorkersLostError: the answer will never come.
        """

    async def recover(self) -> None:
        """Returns once steps can be run again, with an empty cache of the same size; what was sent
        is forgotten."""


class Engine:
    """Owns the scheduler: all its methods are to be called from the loop that runs `run`.

    `emit` is called after each step with what is new. With `sync` a step is planned only when the
    answer to the one before has been applied; the tokens are the same. Without `grammars`, requests
    for structured output are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        emit: Callable[[list[Output]], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        sync: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.load = Load(scheduler, clock())
        self._executor = executor
        self.emit = emit
        self._most_in_flight = 1 if sync else 2
        self._in_flight: deque[tuple[Step, float]] = deque()  # and when it was sent; oldest first
        self._last_answer = 0.0
        self._answer: asyncio.Future[Answer] | None = None  # to the oldest of them
        self._wake = asyncio.Event()
        self._failures = 0
        self._constraints = Constraints(grammars, self) if grammars else None

    def submit(self, seq: Sequence, n: int = 1) -> None:
        """With the other n - 1 completions of its prompt. A refusal comes once, for all of them."""
        if seq.params.grammar is None:
            self.queue(seq, n)
        elif self._constraints:
            self._constraints.begin(seq, n)
        else:
            message = "sampling.structured_output: not available here"
            self.emit([End(seq, finished=FinishCause.INVALID, message=message)])

    def queue(self, seq: Sequence, n: int) -> None:
        """As `submit`, of what may be scheduled at once."""
        refused = self.scheduler.add(seq, n)
        if refused:
            self.refuse(refused)
        self.wake()

    def refuse(self, refused: End) -> None:
        """Tells a frontend that a sequence is not accepted."""
        if refused.finished is FinishCause.QUEUE_FULL:
            refused.retry_after_s = self.load.retry_after_s(self.clock())
        self.emit([refused])

    def wake(self) -> None:
        """There may be something new to schedule."""
        self._wake.set()

    def abort(self, key: SequenceKey) -> None:
        if self._constraints:
            self._constraints.abort(key)
        self.scheduler.abort(key)

    def abort_connection(self, connection: int) -> None:
        """Ends all sequences that came from one frontend's stream."""
        if self._constraints:
            self._constraints.abort_connection(connection)
        for key in self.scheduler.open_sequences():
            if key[0] == connection:
                self.scheduler.abort(key)

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                try:
                    await self._turn()
                except WorkersLostError as error:
                    await self._recover(str(error))
        finally:
            self._forget_steps()
            if self._constraints:
                self._constraints.close()

    async def _turn(self) -> None:
        """Sends what can be sent, then waits for an answer or for something new to send."""
        self._wake.clear()
        if expired := self.scheduler.expire(self.clock()):
            self.emit(expired)
        while len(self._in_flight) < self._most_in_flight:
            step = self.scheduler.schedule(self.clock())
            if step is None:
                break
            self._in_flight.append((step, self.clock()))  # first: if it cannot be sent, it failed
            await self._executor.send(step)
        if not self._in_flight:
            await self._wake.wait()
        elif await self._answered():
            assert self._answer is not None
            answer, self._answer = self._answer.result(), None
            self._failures = 0
            step, sent = self._in_flight.popleft()
            outputs = self.scheduler.apply(step, answer)
            self.emit(outputs)
            if step.asks and self._constraints:
                self._constraints.advance(outputs)
            now = self.clock()
            self.load.update(now - max(sent, self._last_answer), now)
            self._last_answer = now

    async def _answered(self) -> bool:
        """Waits for the answer to the oldest step; false if there is news first, while another
        step could be sent."""
        if self._answer is None:
            self._answer = asyncio.ensure_future(self._executor.receive())
        if len(self._in_flight) == self._most_in_flight:
            await asyncio.wait([self._answer])
            return True
        answer: asyncio.Future[Any] = self._answer
        news = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait([answer, news], return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        return answer.done()

    async def _recover(self, reason: str) -> None:
        self._failures += 1
        step, _ = self._in_flight[0]
        log.warning("step failed", reason=reason, sequences=len(step.rows), failures=self._failures)
        if self._failures >= MAX_STEP_FAILURES:
            self._failures = 0
            self.emit(self.scheduler.fail(step, "internal error"))
        self._forget_steps()
        self.scheduler.requeue_all()
        await self._executor.recover()

    def _forget_steps(self) -> None:
        self._in_flight.clear()
        if self._answer is not None:
            if not self._answer.cancel() and not self._answer.cancelled():
                self._answer.exception()  # nobody else will ask for it
            self._answer = None
