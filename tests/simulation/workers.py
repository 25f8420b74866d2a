"""Workers behind a simulated transport: the sanitizer runs the steps, answers take time, and
connections break."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from weakref import WeakKeyDictionary

from scheduler_svc.core.sequence import Sequence, SequenceKey, Status
from scheduler_svc.core.step import DROPPED, Answer, Step
from scheduler_svc.engine import WorkersLostError
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from shared.pb import worker_pb2
from tests.sanitizer import Beside, Limits, Sanitizer
from tests.simulation.checked_scheduler import CheckedScheduler
from tests.simulation.knobs import Knobs
from tests.simulation.tier import SimulatedTier
from tests.step_columns import describe, steps_of

Pending = asyncio.Future[Answer | None]  # None if the workers were lost
_SHOWN_STEPS = 8
_COPIES_LOSS = 0.3  # that a step with copies loses the workers, if any may: such steps are rare


@dataclass
class _Running:
    """A step that has been sent, and when the first rank begins it."""

    step_id: int
    begins_at: float
    ends_at: list[float]  # by rank
    answer: Pending
    due: asyncio.TimerHandle  # sets `answer`, or breaks the workers


class SimulatedWorkers:
    """An `Executor`. `beside` returns what the scheduler knows when it sends a step, `is_poisoned`
    whether that step loses the workers."""

    def __init__(
        self,
        knobs: Knobs,
        rng: Random,
        scheduler: CheckedScheduler,
        beside: Callable[[Step], Beside],
        is_poisoned: Callable[[Step], bool],
        counts: Counter[str],
    ) -> None:
        self._scheduler = scheduler
        self._knobs = knobs
        self._rng = rng
        self._beside = beside
        self._is_poisoned = is_poisoned
        self._counts = counts
        self._num_ranks = knobs.ranks * knobs.stages
        self._loop = asyncio.get_running_loop()
        self._epoch = 0
        self._lost_epoch = self._poisoned_epoch = 0
        self.tier = SimulatedTier(knobs, lambda: scheduler.answered, self._lost, counts)
        self.digest = 0  # of all steps, to compare runs
        self._shown: deque[tuple[float, worker_pb2.StepRequest, list[str]]] = deque(
            maxlen=_SHOWN_STEPS
        )
        # Those in flight at a loss, with the tokens that they must have computed to be cleared.
        self._goals: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._configure()

    @property
    def max_run(self) -> int:
        return self._knobs.max_run

    async def send(self, run: Seq[Step]) -> None:
        paging, step = self._knobs.paging, run[0]
        request = encode_step(step, paging, self._epoch, self._step_id + 1, len(run))
        self._step_id += len(run)
        self._steps += run
        beside = self._beside(step)
        names = [owner.name for owner in beside.owners]
        self._shown.append((self._loop.time(), request, names))
        loss = self._knobs.loss
        if step.copies and loss:
            loss = max(loss, _COPIES_LOSS)
        loses = self._counts["losses"] < self._knobs.max_losses and self._happens(loss)
        if self._broken or (loses and self._happens(0.25)):
            raise self._lost("before a step was written")
        for each, message in zip(run, steps_of(request, paging), strict=True):
            self._run(each, message, beside)
        self.digest = zlib.crc32(request.SerializeToString(deterministic=True), self.digest)
        self._counts["runs"] += len(run) > 1
        if loses and self._happens(0.3):
            raise self._lost("after a step was written")
        if loses:
            delay = self._rng.uniform(0, 2 * (self._knobs.step_s + self._knobs.answer_s))
            self._loop.call_later(delay, self._break, self._epoch)
        await asyncio.sleep(self._rng.uniform(0, self._knobs.send_s))

    async def cut(self) -> None:
        await asyncio.sleep(self._rng.uniform(0, self._knobs.send_s))
        if self._broken:
            raise self._lost("before a cut was written")
        now = self._loop.time()
        begun = [each for each in self._running if each.begins_at <= now]
        dropped = self._running[len(begun) :]
        if not dropped:
            return
        self._counts["dropped steps"] += len(dropped)
        self._free_at = [*begun[-1].ends_at] if begun else [now] * self._num_ranks
        self._sanitizer.drop(dropped[0].step_id - 1)
        self._steps[-len(dropped) :] = [Step(0, [])] * len(dropped)
        for each in dropped:
            each.due.cancel()
            answered_at = now + self._rng.uniform(0, self._knobs.answer_s)
            self._loop.call_at(answered_at, _resolve, each.answer, DROPPED)
        self._running = begun

    def _run(self, step: Step, request: worker_pb2.StepRequest, beside: Beside) -> None:
        response = self._sanitizer.run(request, beside)
        self._counts["steps"] += 1
        num_stages, num_sent = self._knobs.stages, len(self._steps)
        in_flight = num_sent - self._scheduler.answered
        assert in_flight <= max(2, num_stages) or self._knobs.max_run > 1, "too many steps"
        self._counts["full pipelines"] += in_flight == num_stages > 1
        self._counts["tokens changed by the batch"] += self._sanitizer.num_changed
        self._counts["rows"] += len(step.rows)
        self._counts["rows mid-prompt"] += sum(not row.samples for row in step.rows)
        self._counts["tokens not known yet"] += sum(
            row.previous_row is not None for row in step.rows
        )
        answer: Pending = self._loop.create_future()
        self._answers.append(answer)
        self._unread.append(answer)
        begins_at = max(min(self._free_at), self._loop.time())
        answered_at = self._answered_at()
        if self._is_poisoned(step):
            due = self._loop.call_at(answered_at, self._break_of_poison, self._epoch)
        else:
            answered = read_answer(request, response)
            due = self._loop.call_at(answered_at, _resolve, answer, answered)
        self._running.append(_Running(request.step_id, begins_at, [*self._free_at], answer, due))

    async def receive(self) -> Answer:
        answer = await self._unread.popleft()
        if answer is None:
            raise self._lost("before an answer came")
        if answer is DROPPED:
            self._scheduler.answered += 1  # as far as the order of steps is concerned
        return answer

    async def watch(self) -> str:
        never: asyncio.Future[str] = self._loop.create_future()
        return await never  # a loss is noticed by the next step

    async def recover(self, *, keep: bool) -> bool:
        assert self._broken, "recovers, but nothing was lost"
        self._break(self._epoch)
        suspicious = self._find_suspects()
        assert not (keep and suspicious), f"keeps a cache that {suspicious} was lost with twice"
        await asyncio.sleep(self._rng.uniform(0, self._knobs.recover_s))
        survives = [self._happens(self._knobs.keeps) for _ in range(self._num_ranks)]
        kept = keep and all(survives)
        self._counts["kept caches"] += kept
        self._counts["copies made again"] += self._scheduler.num_copied_again if kept else 0
        self._counts["caches that some ranks lost"] += keep and any(survives) and not kept
        answered = self._scheduler.answered
        self._scheduler.recovered(kept=kept)
        self._configure(answered if kept else None)
        return kept

    def _find_suspects(self) -> list[SequenceKey]:
        """The sequences in flight that were in flight at an earlier loss, too, and have made no
        progress since."""
        answered, goals = self._scheduler.answered, self._goals
        for row in (row for step in self._steps[:answered] for row in step.rows):
            if row.draft is None and row.start + row.num_tokens >= goals.get(row.seq, 0):
                goals.pop(row.seq, None)
        ends = {
            row.seq: row.start + row.num_tokens
            for step in self._steps[answered:]
            for row in step.rows
            if row.seq.status is not Status.FINISHED and row.draft is None
        }
        found = [seq.key for seq in ends if seq in goals]
        for seq, end in ends.items():
            goals[seq] = max(end, goals.get(seq, 0))
        return found

    def last_steps(self) -> str:
        return "\n".join(
            f"at {time:.4f} s, {describe(request, names)}" for time, request, names in self._shown
        )

    def _configure(self, answered: int | None = None) -> None:
        """Begins an epoch, with an empty cache or with what `answered` steps have left."""
        knobs = self._knobs
        self._epoch += 1
        self._step_id = 0
        self._steps: list[Step] = []  # of this epoch
        self._broken = False
        self._answers: list[Pending] = []
        self._running: list[_Running] = []
        self._unread: deque[Pending] = deque()
        self._free_at = [0.0] * self._num_ranks
        if answered is None:
            limits = Limits(knobs.max_num_seqs, knobs.max_num_batched_tokens, knobs.max_model_len)
            by_batch = knobs.by_batch
            self._sanitizer = Sanitizer(
                limits, knobs.num_blocks, knobs.paging, self._epoch, by_batch=by_batch
            )
        else:
            self._sanitizer.keep(self._epoch, answered, self._rng)
        self.tier.configure(self._sanitizer.transfers)

    def _answered_at(self) -> float:
        """The time at which the last rank's answer arrives. A rank runs one step after another, and
        ranks do not wait for each other. A stage waits for the one before."""
        knobs, begins_at = self._knobs, self._loop.time()
        for first in range(0, self._num_ranks, knobs.ranks):
            ends_at = begins_at
            for rank in range(first, first + knobs.ranks):
                seconds = self._rng.uniform(0, knobs.step_s)
                self._free_at[rank] = max(self._free_at[rank], begins_at) + seconds
                ends_at = max(ends_at, self._free_at[rank])
            begins_at = ends_at
        return begins_at + self._rng.uniform(0, knobs.answer_s)

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _break_of_poison(self, epoch: int) -> None:
        self._poisoned_epoch = epoch
        self._break(epoch)

    def _break(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._broken = self.tier.broken = True
            for answer in self._answers:
                _resolve(answer, None)

    def _lost(self, when: str) -> WorkersLostError:
        self._broken = self.tier.broken = True
        self._scheduler.cache_is_kept = False
        if self._lost_epoch != self._epoch:  # sender and receiver may both notice
            self._lost_epoch = self._epoch
            kind = "poisonings" if self._poisoned_epoch == self._epoch else "losses"
            self._counts[kind] += 1
        return WorkersLostError(f"planted: {when}")


def _resolve(pending: Pending, answer: Answer | None) -> None:
    if not pending.done():
        pending.set_result(answer)
