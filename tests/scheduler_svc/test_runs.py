"""Runs of decodes: when they are planned, and what follows when one is cut."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import DROPPED, Answer, Output, Step, StepTiming
from scheduler_svc.engine import Engine, WorkersLostError
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from shared.paging import Paging
from shared.sampling_params import Grammar, GrammarKind
from tests import sanitizer
from tests.oracle import completion
from tests.scheduler_svc import schedulers
from tests.scheduler_svc.schedulers import make
from tests.step_columns import steps_of

PROMPT = [1, 2, 3]
SIZE = 4  # tokens of a block


def make_scheduler(num_blocks: int = 32, max_num_seqs: int = 8, step_s: float = 0.001) -> Scheduler:
    """A scheduler that knows how long a decode takes."""
    scheduler = schedulers.make_scheduler(num_blocks, SIZE, max_num_seqs=max_num_seqs)
    step = Step(0, [Row(make(0, PROMPT), 3, 1, True)], num_decodes=1)
    scheduler.step_times.step_answered(step, StepTiming(step_s, 0.0, 0.0))
    return scheduler


def begin(scheduler: Scheduler, *seqs: Sequence) -> None:
    """Computes the prompts of these sequences, which all fit into a step."""
    for seq in seqs:
        scheduler.add(seq)
    (step,) = scheduler.schedule_run(max_steps=4)
    scheduler.apply(step, Answer([7] * len(seqs)))


def test_decodes_are_planned_together_while_nothing_waits() -> None:
    scheduler = make_scheduler()
    first, second = make(1, PROMPT, 12), make(2, PROMPT, 12)
    begin(scheduler, first, second)
    run = scheduler.schedule_run(max_steps=4)
    assert [[(row.seq, row.start) for row in step.rows] for step in run] == [
        [(first, start), (second, start)] for start in (3, 4, 5, 6)
    ]
    request = encode_step(run[0], Paging(SIZE), 1, 5, len(run))
    assert (request.step_id, request.num_steps) == (5, 4)
    scheduler.add(make(3, PROMPT, 12))
    assert scheduler.run_is_useless
    assert len(scheduler.schedule_run(max_steps=4)) == 1  # with the prompt of the third


@pytest.mark.parametrize(
    ("params", "step_s", "lengths"),
    [
        ({"max_tokens": 12}, 0.006, [3, 3, 3, 2]),  # 0.02 s
        ({"max_tokens": 4}, 0.001, [3]),  # its last token is not computed
        # An end token is banned in some steps only.
        ({"max_tokens": 9, "min_tokens": 3, "eos_token_ids": {9}}, 0.001, [1, 1, 4, 2]),
        ({"max_tokens": 12}, 0.1, [1] * 11),
    ],
)
def test_lengths_of_runs(params: dict[str, Any], step_s: float, lengths: list[int]) -> None:
    scheduler = make_scheduler(step_s=step_s)
    begin(scheduler, Sequence((0, 1), PROMPT, SamplingParams(**params)))
    for length in lengths:
        run = scheduler.schedule_run(max_steps=4)
        assert len(run) == length
        for step in run:
            scheduler.apply(step, Answer([7]))
    assert not scheduler.num_running


@pytest.mark.parametrize(
    "needing", [{"grammar": Grammar(GrammarKind.REGEX, "a+")}, {"bad_words": ((8, 9),)}]
)
def test_no_runs_of_what_needs_the_scheduler_between_tokens(needing: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=12, **needing)
    begin(scheduler, make(1, PROMPT, 12), Sequence((0, 2), PROMPT, params))
    assert len(scheduler.schedule_run(max_steps=4)) == 1


def test_a_run_ends_where_blocks_end() -> None:
    scheduler = make_scheduler(num_blocks=2)
    begin(scheduler, make(1, PROMPT, 5))
    assert len(scheduler.schedule_run(max_steps=4)) == 4  # at the positions 3 to 6, of 8
    scheduler = make_scheduler(num_blocks=3)
    begin(scheduler, make(1, PROMPT, 9), make(2, PROMPT, 9))
    run = scheduler.schedule_run(max_steps=4)
    assert [len(step.rows) for step in run] == [2]  # at position 3; both need a block for the next
    scheduler.check_integrity()


class Workers:
    """Run steps when they are told to. A cut drops the steps but the oldest."""

    max_run = 4

    def __init__(self) -> None:
        self.waiting: deque[tuple[Step, Answer | None]] = deque()
        self.messages: list[int] = []  # the steps of each message
        self.cuts = 0
        self.recovered = asyncio.Event()
        self._news = asyncio.Event()
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self.begin()

    def begin(self) -> None:
        limits = sanitizer.Limits(8, 32, 64)
        self._sanitizer = sanitizer.Sanitizer(limits, 32, Paging(SIZE), 1)
        self._step_id = 0

    async def send(self, run: Seq[Step]) -> None:
        request = encode_step(run[0], Paging(SIZE), 1, self._step_id + 1, len(run))
        self._step_id += len(run)
        self.messages.append(len(run))
        for step, message in zip(run, steps_of(request, Paging(SIZE)), strict=True):
            self.waiting.append((step, read_answer(message, self._sanitizer.run(message))))
        self._news.set()

    async def cut(self) -> None:
        self.cuts += 1
        num_dropped = len(self.waiting) - 1
        self._sanitizer.drop(self._step_id - num_dropped)
        oldest, *dropped = self.waiting
        self.waiting = deque([oldest, *((step, DROPPED) for step, _ in dropped)])

    async def answer(self, count: int = 1) -> None:
        """Answers the oldest steps, one after another."""
        for _ in range(count):
            while not self.waiting:
                self._news.clear()
                await self._news.wait()
            self._answers.put_nowait(self.waiting.popleft()[1])
            for _ in range(20):  # the engine applies it, and sends what it then may
                await asyncio.sleep(0)

    async def lose(self) -> None:
        """Loses the steps in flight; those sent after that are answered again."""
        self.recovered.clear()
        self._answers.put_nowait(None)
        await self.recovered.wait()

    async def receive(self) -> Answer:
        if (answer := await self._answers.get()) is None:
            raise WorkersLostError("planted")
        return answer

    async def watch(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def recover(self, *, keep: bool) -> bool:
        self.waiting.clear()
        self.begin()
        self.recovered.set()
        return False


class Rig:
    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.workers = Workers()
        self.scheduler = make_scheduler()
        self.engine = Engine(self.scheduler, self.workers, self.outputs.extend, lambda: 0.0)
        self._running = asyncio.ensure_future(self.engine.run())

    async def begin(self, *seqs: Sequence) -> None:
        """Computes prompts. The run after them has been sent."""
        for seq in seqs:
            self.engine.submit(seq)
        await self.workers.answer()

    async def finish(self) -> None:
        """Answers everything."""
        while self.scheduler.num_running or self.scheduler.num_waiting:
            await self.workers.answer()
        await self.engine.rest()
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_free_blocks == self.scheduler.blocks.num_blocks
        self._running.cancel()

    def tokens(self, seq: Sequence) -> list[int]:
        return [o.token for o in self.outputs if o.seq is seq and o.token is not None]


async def test_a_run_is_one_message_and_each_token_an_answer() -> None:
    rig, seq = Rig(), make(1, PROMPT, 20)
    await rig.begin(seq)
    assert rig.workers.messages == [1, 4]
    for number in range(2, 5):
        await rig.workers.answer()
        assert len(rig.tokens(seq)) == number
    await rig.finish()
    assert rig.tokens(seq) == completion(PROMPT, 20)
    assert max(rig.workers.messages) == 4
    assert not rig.workers.cuts


@pytest.mark.parametrize("answered", [0, 1, 2])
async def test_a_new_request_waits_for_two_steps_not_for_the_run(answered: int) -> None:
    rig, seq, new = Rig(), make(1, PROMPT, 20), make(2, [4, 5], 6)
    await rig.begin(seq)
    await rig.workers.answer(answered)
    rig.engine.submit(new)
    num_messages = len(rig.workers.messages)
    await rig.workers.answer(1)  # that of the step that runs
    assert rig.workers.cuts == (answered < 2)  # else, a step is left in flight
    while len(rig.workers.messages) == num_messages:
        await rig.workers.answer()
    assert len(rig.tokens(seq)) <= 1 + answered + 2
    await rig.finish()
    assert rig.tokens(seq) == completion(PROMPT, 20)
    assert rig.tokens(new) == completion([4, 5], 6)


async def test_a_run_that_serves_nobody_is_cut() -> None:
    rig, seq, later = Rig(), make(1, PROMPT, 20), make(2, PROMPT, 5)
    await rig.begin(seq)
    rig.engine.abort(seq.key)
    await rig.workers.answer()
    assert rig.workers.cuts == 1
    rig.engine.submit(later)
    await rig.finish()
    assert rig.tokens(later) == completion(PROMPT, 5)


async def test_a_run_that_was_cut_and_lost_is_computed_again() -> None:
    rig, seq = Rig(), make(1, PROMPT, 20)
    await rig.begin(seq)
    rig.engine.submit(make(2, PROMPT, 3))
    await rig.workers.answer()
    assert rig.workers.cuts
    await rig.workers.lose()
    await rig.finish()
    assert rig.tokens(seq) == completion(PROMPT, 20)
