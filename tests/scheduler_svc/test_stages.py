"""Steps for workers in pipeline stages: as many in flight as stages, of disjoint sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import Answer, Step
from shared.pb import worker_pb2
from tests.fake_worker import Context, FakeWorker
from tests.scheduler_svc import schedulers
from tests.scheduler_svc.schedulers import make
from tests.scheduler_svc.stacks import stack_of


def make_scheduler(num_stages: int, num_blocks: int = 64) -> Scheduler:
    scheduler = schedulers.make_scheduler(num_blocks, 4, max_num_seqs=16)
    scheduler.num_stages = num_stages
    return scheduler


def answer(scheduler: Scheduler, step: Step) -> None:
    scheduler.apply(step, Answer([7] * len(step.rows)))


def numbers(step: Step | None) -> list[int]:
    """The numbers of a step's sequences."""
    assert step
    return [row.seq.key.number for row in step.rows]


@pytest.mark.parametrize(
    ("num_seqs", "num_stages", "sizes"),
    [(6, 2, [3, 3]), (7, 3, [3, 3, 1]), (5, 4, [2, 2, 1]), (1, 3, [1]), (3, 8, [1, 1, 1])],
)
def test_each_step_has_a_stages_share_of_the_decodes(
    num_seqs: int, num_stages: int, sizes: list[int]
) -> None:
    scheduler = make_scheduler(num_stages)
    for number in range(num_seqs):
        scheduler.add(make(number, [1, 2, 3], 20))
    prompts = scheduler.schedule()
    assert numbers(prompts) == [*range(num_seqs)]
    assert scheduler.schedule() is None  # all sequences are in flight
    assert prompts
    answer(scheduler, prompts)
    steps = [scheduler.schedule() for _ in sizes]
    assert [len(numbers(step)) for step in steps] == sizes
    assert sorted(number for step in steps for number in numbers(step)) == [*range(num_seqs)]
    assert scheduler.schedule() is None
    for _ in range(3):  # the same sequences again, whose tokens are known
        step = steps.pop(0)
        assert step
        answer(scheduler, step)
        steps.append(scheduler.schedule())
        assert numbers(steps[-1]) == numbers(step)
        assert all(row.previous_row is None for row in step.rows)


def test_those_that_waited_longest_come_first() -> None:
    scheduler = make_scheduler(2)
    for number in range(4):
        scheduler.add(make(number, [1, 2, 3], 2 if number == 1 else 20))
    prompts = scheduler.schedule()
    assert prompts
    answer(scheduler, prompts)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (numbers(first), numbers(second)) == ([0, 1], [2, 3])
    assert first
    answer(scheduler, first)  # sequence 1 ends
    scheduler.add(make(4, [1, 2], 20))
    assert numbers(scheduler.schedule()) == [0, 4]


def test_chunks_of_a_prompt_are_not_in_flight_together() -> None:
    scheduler = make_scheduler(2)
    scheduler.add(make(0, [*range(100)], 5))
    chunk = scheduler.schedule()
    assert chunk
    assert not chunk.rows[0].samples
    assert scheduler.schedule() is None
    answer(scheduler, chunk)
    assert scheduler.schedule()


def test_one_sequence_is_preempted_if_the_others_fill_the_cache() -> None:
    """The step is planned from the others, though their share was not chosen at first."""
    scheduler = make_scheduler(2, num_blocks=4)
    for number in range(2):
        scheduler.add(make(number, [1, 2, 3], 9))
    step = scheduler.schedule()
    steps: list[Step] = []
    while scheduler.num_running:
        if not step:
            step = steps.pop(0)
            answer(scheduler, step)
        else:
            steps.append(step)
        step = scheduler.schedule()
    assert scheduler.stats.preemptions
    scheduler.check_integrity()


class FirstStage(FakeWorker):
    """Knows no tokens."""

    async def _answer(
        self, step: worker_pb2.StepRequest, context: Context
    ) -> worker_pb2.StepResponse:
        await super()._answer(step, context)
        return worker_pb2.StepResponse(step_id=step.step_id)


async def test_the_last_stage_has_the_tokens(tmp_path: Path) -> None:
    ranks = [
        (FakeWorker if rank == 2 else FirstStage)(rank=rank, world_size=4, num_stages=2)
        for rank in range(4)
    ]
    async with stack_of(tmp_path, *ranks) as stack:
        frontend = await stack.frontend()
        info = frontend.info
        assert (info.tensor_parallel_size, info.pipeline_parallel_size) == (2, 2)
        for number in range(1, 6):
            await frontend.submit(number, [number, 2, 3], 20)
        for number in range(1, 6):
            await frontend.expect(number, [number, 2, 3], 20)
        load = await stack.load()
        assert load.num_stages == 2
        assert load.draft_tokens == 0
    for worker in ranks:
        assert not worker.violations
        ids = [np.frombuffer(step.input_ids, "<i4") for step in worker.steps]
        assert min(each.min() for each in ids) >= 0  # none refers to the step before
