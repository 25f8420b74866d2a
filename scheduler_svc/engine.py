"""The engine loop: schedules a step, has it run, applies its answer and informs the frontends.

The loop runs one step ahead. While the workers run step N, they already hold step N + 1, so that
they never wait for the scheduler. Pipeline stages get a step each. While nothing waits, step N + 1
may begin a run of decodes, which are sent at once. If something arrives, the run is cut: workers
drop the steps that have not begun, and the scheduler plans them again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import structlog

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Sequence, SequenceKey, Status
from scheduler_svc.core.step import (
    DROPPED,
    Answer,
    End,
    Output,
    Step,
    StepObserver,
    StepTiming,
)
from scheduler_svc.core.swaps import Copier, TransferAnswer
from scheduler_svc.grammar.constraints import Constraints
from scheduler_svc.grammar.grammars import Grammars
from scheduler_svc.load import Load
from scheduler_svc.metrics import EngineMetrics
from scheduler_svc.step_traces import StepTraces
from scheduler_svc.suspects import Suspects

log = structlog.get_logger(__name__)

_MAX_SWAPPING_S = 0.02  # between two checks of deadlines while sequences are only read
_SHARE_FOR_MASKS = 0.5  # of a step's time; the rest is for planning and sending the next step


class WorkersLostError(Exception):
    """A worker is lost, and with it the steps in flight and perhaps the cache."""


class Executor(Protocol):
    """Runs steps: over gRPC in the service, in the same process in the benchmark."""

    @property
    def max_run(self) -> int:
        """The maximum number of steps of a run. With 1, it is never asked to cut one."""

    async def send(self, run: Seq[Step]) -> None:
        """Queues a step, or a run of decodes of the same sequences, behind those sent before.

        Raises:
            WorkersLostError: the steps will never be answered.
        """

    async def cut(self) -> None:
        """Drops the steps that have not begun.

        Raises:
            WorkersLostError: as `send` does.
        """

    async def receive(self) -> Answer:
        """Returns the answer to the oldest step that `receive` has not been called for, or DROPPED.

        Raises:
            WorkersLostError: the answer will never come.
        """

    async def watch(self) -> str:
        """Waits until the workers are lost, and returns the reason. `receive` then raises if steps
        are in flight."""

    async def recover(self, *, keep: bool) -> bool:
        """Waits until the workers can run steps again, on a cache of unchanged size. Steps sent
        earlier are forgotten. While workers cannot run any step, this waits for them.

        Args:
            keep: whether to keep what answered steps wrote, if all ranks still have their caches.

        Returns:
            Whether it is kept.
        """


class Engine:
    """Owns the scheduler. Call its methods only from the event loop that runs `run`.

    `emit` receives the outputs of each step. With `sync`, a step is planned only once the answer to
    the previous step has been applied; the tokens do not change. Without `grammars`, requests for
    structured output are rejected. `on_serving` is called with False when requests start to wait
    for lost workers or for the trial of suspects. It is called with True when they stop waiting.
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
        on_serving: Callable[[bool], Awaitable[None]] | None = None,
        metrics: EngineMetrics | None = None,
        traces: StepTraces | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = metrics or EngineMetrics()
        self.metrics.scheduler = scheduler
        self._traces = traces or StepTraces(None)
        self.clock = clock
        self.load = Load(scheduler, clock())
        self._observers: list[StepObserver] = [
            self.metrics,
            self.load,
            scheduler.step_times,
            self._traces,
        ]
        self._executor = executor
        self._copier: Copier | None = None
        self.emit = emit
        self._on_serving = on_serving
        self._serving = True
        self._max_steps = 1 if sync else max(2, scheduler.num_stages)
        self._max_in_flight = self._max_steps  # when steps are sent; a run may exceed it
        self._max_run = 1 if sync else executor.max_run
        self._runs = False  # whether a run was sent last
        self._is_cut = False
        self._in_flight: deque[tuple[Step, float]] = deque()  # and its send time; oldest first
        self._free_since = clock()  # when the workers could have begun the next step
        self._answer: asyncio.Future[Answer] | None = None  # to the oldest step in flight
        self._wake = asyncio.Event()
        self._at_rest = asyncio.Event()
        self._suspects: Suspects[Sequence] = Suspects()
        self._trying = False
        self._watching: asyncio.Future[str] | None = None
        self._copying: list[asyncio.Future[None]] = []
        self._constraints = Constraints(grammars, self) if grammars else None

    def submit(self, seq: Sequence, n: int = 1) -> None:
        """Accepts or rejects a sequence and the other n - 1 completions of its prompt. A rejection
        is emitted once for all of them."""
        if seq.params.grammar is None:
            self.queue(seq, n)
        elif self._constraints:
            self._constraints.begin(seq, n)
        else:
            message = "sampling.structured_output: not available here"
            self.refuse(seq, End(FinishCause.INVALID, message))

    def queue(self, seq: Sequence, n: int) -> None:
        """Queues a sequence that may be scheduled at once, or emits its rejection."""
        if end := self.scheduler.add(seq, n):
            self.refuse(seq, end)
        else:
            self._traces.add(seq)
        self.wake()

    def refuse(self, seq: Sequence, end: End) -> None:
        """Emits the end of a sequence that was not accepted."""
        seq.status = Status.FINISHED
        if end.cause is FinishCause.QUEUE_FULL and not end.retry_after_s:
            end = replace(end, retry_after_s=self.load.retry_after_s(self.clock()))
        self.emit([Output(seq, end=end)])

    def wake(self) -> None:
        """Makes the loop look for work to schedule."""
        self._wake.set()

    def abort(self, key: SequenceKey) -> None:
        if self._constraints:
            self._constraints.abort(key)
        self.scheduler.abort(key)
        self.wake()  # other sequences may have waited for this one only

    def abort_connection(self, connection: int, limit: int | None = None) -> bool:
        """Aborts all sequences that came from one frontend's stream, or up to `limit` of them.
        Returns whether there may be more."""
        constraints = self._constraints
        more = constraints is not None and constraints.abort_connection(connection, limit)
        keys = [key for key in self.scheduler.open_sequences() if key.connection == connection]
        for key in keys[:limit]:
            self.scheduler.abort(key)
        self.wake()
        return more or (limit is not None and len(keys) > limit)

    async def rest(self) -> None:
        """Waits until there is nothing to do and no step is in flight."""
        await self._at_rest.wait()

    async def run(self, copier: Copier | None = None) -> None:
        """Runs until cancelled. Without a copier, there is no tier under the cache."""
        self._copier = copier
        self._watch()
        try:
            while True:
                try:
                    await self._iterate()
                except WorkersLostError as error:
                    await self._recover(str(error))
        finally:
            self._forget_steps()
            self._stop_watching()
            if self._constraints:
                self._constraints.close()

    async def _iterate(self) -> None:
        """Sends the steps that may be sent, then waits for an answer or for new work."""
        self._wake.clear()
        if self._watching and self._watching.done():
            raise WorkersLostError(self._watching.result())
        if expired := self.scheduler.expire(self.clock()):
            self.emit(expired)
        if self._suspects or self._trying:
            await self._try_suspects()
        if self._runs and len(self._in_flight) > 1 and self.scheduler.run_is_useless:
            await self._cut()
        wait_s = await self._send_steps()
        if self._copier:
            num_swapped = self.scheduler.swaps.num_swapped
            for transfer in self.scheduler.swaps.take():
                await self._copier.send_transfer(transfer)
            if self.scheduler.swaps.num_swapped < num_swapped:  # some are not read after all
                self.wake()
        if not self._in_flight:
            check_s = _MAX_SWAPPING_S if self.scheduler.swaps.num_swapped else None
            if not check_s:
                self._at_rest.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), check_s)
            self._at_rest.clear()
            self._free_since = self.clock()
        elif answer := await self._next_answer(wait_s):
            self._apply_answer(answer)

    async def _send_steps(self) -> float:
        """Sends as many steps as may be in flight. Returns the seconds that the next step must wait
        for masks; 0 if it need not wait, or if there is no next step."""
        while len(self._in_flight) < self._max_in_flight and not self._is_cut:
            if wait_s := self._masks_wait_s():
                return wait_s
            # Sequences are tried as they were when the workers were lost, or simpler.
            self.scheduler.may_draft = not self._suspects
            max_run = 1 if self._suspects or self._traces.active else self._max_run
            run = self.scheduler.schedule_run(self.clock(), max_run)
            if not run:
                break
            self._traces.begin(run[0])
            now = self.clock()
            self._in_flight.extend((step, now) for step in run)  # first: what cannot be sent fails
            self._runs = len(run) > 1
            await self._executor.send(run)
        return 0.0

    async def _cut(self) -> None:
        """Has the workers drop the steps that have not begun. No step is sent before all steps in
        flight are answered."""
        if not self._is_cut:
            self._is_cut = True
            await self._executor.cut()

    def _apply_answer(self, answer: Answer) -> None:
        """Applies the answer to the oldest step, and informs frontends and observers."""
        step, sent_at = self._in_flight.popleft()
        if self._is_cut and not self._in_flight:
            self._is_cut = False
            if answer is DROPPED:
                self.scheduler.rewind_all()
        if answer is DROPPED:
            return
        now, free_since = self.clock(), self._free_since
        self._free_since = now
        outputs = self.scheduler.apply(step, answer)
        self.emit(outputs)
        if step.has_features and self._constraints:
            self._constraints.advance(outputs)
        if self._suspects:
            for row in step.rows:
                if row.draft is None:
                    self._suspects.passed(row.seq, row.start + row.num_tokens)
        timing = StepTiming(now - max(sent_at, free_since), max(0.0, sent_at - free_since), now)
        for observer in self._observers:
            observer.step_answered(step, timing)

    async def _next_answer(self, wait_s: float) -> Answer | None:
        """Waits for the answer to the oldest step. If another step may be sent, returns None when
        new work arrives first or `wait_s` seconds pass (0: no limit)."""
        if len(self._in_flight) < self._max_in_flight:
            answer = self._answer = self._answer or asyncio.ensure_future(self._executor.receive())
            news = asyncio.ensure_future(self._wake.wait())
            both: list[asyncio.Future[Any]] = [answer, news]
            await asyncio.wait(both, timeout=wait_s or None, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            if not answer.done():
                return None
        begun, self._answer = self._answer, None
        return await (begun or self._executor.receive())  # a task would take loop iterations

    def _masks_wait_s(self) -> float:
        """The seconds that the next step waits for masks, so that it includes their sequences. The
        workers are busy with the previous step for longer than that; a first stage is not."""
        due = self._constraints is not None and self._constraints.are_due
        if not due or not self._in_flight or self.scheduler.num_stages > 1:
            return 0.0
        wait_s = _SHARE_FOR_MASKS * self.scheduler.step_times.seconds_of(self._in_flight[-1][0])
        return max(0.0, self._free_since + wait_s - self.clock())

    async def _recover(self, reason: str) -> None:
        lost_at = self.clock()
        in_flight = {
            row.seq: row.start + row.num_tokens
            for step, _ in self._in_flight
            for row in step.rows
            if row.seq.status is not Status.FINISHED and row.draft is None
        }
        log.warning("workers lost; recovering", reason=reason, sequences=len(in_flight))
        self._stop_watching()
        if culprit := self._suspects.lost(in_flight):
            log.error("a request makes the workers fail; ending it", request=culprit.key)
            self.emit(self.scheduler.fail(culprit, "internal error"))
        self._forget_steps()
        self._traces.lost(reason)
        self.scheduler.swaps.lost()
        # The cache may be the reason if the same sequences make the workers fail again.
        keep = culprit is None and not self._suspects.on_trial
        if keep:
            self.scheduler.rewind_all()
        else:
            self.scheduler.requeue_all()
        await self._serve(False)
        kept = await self._executor.recover(keep=keep)
        if keep and not kept:
            self.scheduler.requeue_all()
        log.info("workers recovered", cache_kept=kept)
        self._free_since = self.clock()
        self.metrics.recovery.observe(self._free_since - lost_at)
        self._traces.recovered(lost_at)
        await self._try_suspects()
        self._watch()

    async def _try_suspects(self) -> None:
        """Makes sure that nothing runs alongside the suspects on trial."""
        for seq in self._suspects:
            if seq.status is Status.FINISHED:
                self._suspects.forget(seq)
        group = self._suspects.on_trial
        self._trying = bool(group)
        self._max_in_flight = 1 if group else self._max_steps
        if not group:
            self.scheduler.restrict(None)
        elif not self._in_flight:
            self.scheduler.restrict(group)
        await self._serve(not group)

    async def _serve(self, serving: bool) -> None:
        changed, self._serving = serving != self._serving, serving
        if changed and self._on_serving:
            await self._on_serving(serving)

    def _watch(self) -> None:
        self._watching = asyncio.ensure_future(self._executor.watch())
        self._watching.add_done_callback(lambda _: self.wake())
        if copier := self._copier:
            receiving = (self._receive_transfers(copier, loads) for loads in (False, True))
            self._copying = [asyncio.ensure_future(each) for each in receiving]

    async def _receive_transfers(self, copier: Copier, loads: bool) -> None:
        """Applies the answers to transfers. A loss is noticed elsewhere, too."""
        with suppress(WorkersLostError):
            while True:
                answer = await copier.receive_transfer(loads=loads)
                if isinstance(answer, TransferAnswer):
                    self.scheduler.swaps.apply(answer)
                elif not loads:  # both begin with the contents
                    self.scheduler.swaps.open(answer)
                self.wake()

    def _stop_watching(self) -> None:
        if self._watching:
            self._watching.cancel()
            self._watching = None
        for each in self._copying:
            each.cancel()

    def _forget_steps(self) -> None:
        self._is_cut = False
        self._in_flight.clear()
        if self._answer is not None:
            if not self._answer.cancel() and not self._answer.cancelled():
                self._answer.exception()  # nobody else will ask for it
            self._answer = None
