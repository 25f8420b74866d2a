"""The engine loop: schedule a step, have it run, apply its answer, tell the frontends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import structlog

from scheduler_svc.scheduler import Output, Scheduler, Step
from scheduler_svc.sequence import Sequence, SequenceKey

log = structlog.get_logger(__name__)

# A step that fails this often in a row is at fault itself: its sequences end.
MAX_STEP_FAILURES = 3


class WorkersLostError(Exception):
    """A worker is gone, and the cache with it."""


class Executor(Protocol):
    """Runs steps: over gRPC in the service, in process in the benchmark."""

    async def execute(self, step: Step) -> Seq[int]:
        """One sampled id per row, anything for rows that sample nothing.

        Raises:
            WorkersLostError: the step's answer will never come.
        """

    async def recover(self) -> None:
        """Returns once steps can be run again, with an empty cache of the same size."""


class Engine:
    """Owns the scheduler: all its methods are to be called from the loop that runs `run`.

    `emit` is called after each step with what is new. The loop is synchronous: a step is planned
    when the answer to the one before has been applied.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        emit: Callable[[list[Output]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._executor = executor
        self._emit = emit
        self._wake = asyncio.Event()
        self._failures = 0

    def submit(self, seq: Sequence) -> None:
        refused = self.scheduler.add(seq)
        if refused:
            self._emit([refused])
        self._wake.set()

    def abort(self, key: SequenceKey) -> None:
        self.scheduler.abort(key)

    def abort_connection(self, connection: int) -> None:
        """Ends all sequences that came from one frontend's stream."""
        for key in self.scheduler.open_sequences():
            if key[0] == connection:
                self.scheduler.abort(key)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._wake.clear()
            if expired := self.scheduler.expire(self.clock()):
                self._emit(expired)
            step = self.scheduler.schedule(self.clock())
            if step is None:
                await self._wake.wait()
            else:
                await self._run_step(step)

    async def _run_step(self, step: Step) -> None:
        try:
            token_ids = await self._executor.execute(step)
        except WorkersLostError as error:
            await self._recover(step, str(error))
        else:
            self._failures = 0
            self._emit(self.scheduler.apply(step, token_ids))

    async def _recover(self, step: Step, reason: str) -> None:
        self._failures += 1
        log.warning("step failed", reason=reason, sequences=len(step.rows), failures=self._failures)
        if self._failures >= MAX_STEP_FAILURES:
            self._failures = 0
            self._emit(self.scheduler.fail(step, "internal error"))
        self.scheduler.requeue_all()
        await self._executor.recover()
