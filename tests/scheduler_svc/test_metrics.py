"""An engine's metrics of its steps, by a clock that only the workers move."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as Seq

import pytest

from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Output, Step
from scheduler_svc.engine import Engine, WorkersLostError
from scheduler_svc.metrics import EngineMetrics
from tests.scheduler_svc.schedulers import make_scheduler

STEP_S, GAP_S, RECOVERY_S = 0.2, 0.03, 4.0


class Workers:
    """Take as long as they are told to; the third answer is lost with them."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sent: deque[Step] = deque()
        self._num_answers = 0

    max_run = 1

    async def send(self, run: Seq[Step]) -> None:
        self._sent += run

    async def cut(self) -> None:
        raise AssertionError

    async def receive(self) -> Answer:
        self._num_answers += 1
        if self._num_answers == 3:
            raise WorkersLostError("killed")
        self.now += STEP_S
        return Answer([7 for _ in self._sent.popleft().rows])

    async def watch(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def recover(self, *, keep: bool) -> bool:
        self._sent.clear()
        self.now += RECOVERY_S
        return False


async def test_steps_gaps_and_a_recovery_are_measured() -> None:
    workers, metrics = Workers(), EngineMetrics("/models/tiny")

    def emit(_: list[Output]) -> None:
        workers.now += GAP_S  # what the scheduler does while no step is there

    scheduler = make_scheduler(8)
    engine = Engine(scheduler, workers, emit, lambda: workers.now, sync=True, metrics=metrics)
    running = asyncio.create_task(engine.run())
    engine.submit(Sequence((0, 0), range(9), SamplingParams(max_tokens=4)))
    await engine.rest()
    workers.now += 1000  # idle, which is no gap
    engine.submit(Sequence((0, 1), range(9), SamplingParams(max_tokens=1)))
    await asyncio.sleep(0)
    await engine.rest()
    running.cancel()

    found = {
        sample.name.removeprefix("nanovllm:"): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if "le" not in sample.labels
    }
    # The prompt, a decode, after the loss both tokens again with the prompt, a decode; the other.
    assert found["step_time_seconds_count"] == 5
    assert found["step_time_seconds_sum"] == pytest.approx(5 * STEP_S)
    assert found["step_gap_seconds_sum"] == pytest.approx(2 * GAP_S)
    assert found["iteration_tokens_total_sum"] == 9 + 1 + 11 + 1 + (9 - 8)
    assert found["step_sequences_sum"] == 5
    assert found["recovery_seconds_sum"] == RECOVERY_S
    assert found["num_preemptions_total"] == 1
    assert found["generation_tokens_total"] == 5
    assert found["prefix_cache_queries_total"] == 18
    assert found["kv_cache_usage_perc"] == found["num_requests_running"] == 0
    assert {
        sample.labels["model_name"] for family in metrics.collect() for sample in family.samples
    } == {"tiny"}


def test_waiting_sequences_and_their_tokens_are_counted() -> None:
    metrics = EngineMetrics()
    metrics.scheduler = make_scheduler(8)
    for index, tokens in enumerate((9, 5)):
        metrics.scheduler.add(Sequence((0, index), range(tokens), SamplingParams(max_tokens=1)))
    found = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert found["nanovllm:num_requests_waiting"] == 2
    assert found["nanovllm:num_tokens_waiting"] == 14
