"""One client's prompts beside another's streams, on a machine whose times are known."""

from __future__ import annotations

from random import Random

import pytest

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.client import Client
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Request, Sequence
from scheduler_svc.core.step import Answer, Step, StepTiming
from shared.paging import Paging

STREAMS, PROMPTS = Client("streams"), Client("prompts")
_LONG = 20_000  # tokens


class Machine:
    """Steps take a time of their own, and as much again for every 1,000 tokens of context."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.step_s = rng.uniform(0.02, 0.1)
        self.token_s = 10 ** rng.uniform(-6, -4)
        self._number = 0
        self._now = 0.0
        limits = Limits(256, 2048, 40_960, 1000, vocab_size=1000, max_num_prefill_tokens=1024)
        self.scheduler = Scheduler(limits, BlockManager(20_000, Paging(16)))

    def add(self, client: Client, length: int, max_tokens: int) -> Sequence:
        self._number += 1
        prompt = [self._number] * length
        seq = Sequence(
            (0, self._number), prompt, SamplingParams(max_tokens), Request(client=client)
        )
        assert self.scheduler.add(seq) is None
        return seq

    def step(self) -> float:
        """Runs a step, and returns its seconds."""
        step = self.scheduler.schedule(self._now)
        assert step is not None
        seconds = self._seconds(step) * self._rng.uniform(0.9, 1.1)
        self.scheduler.apply(step, Answer([5] * len(step.rows)))
        self.scheduler.step_times.step_answered(step, StepTiming(seconds, 0.0, self._now))
        self.scheduler.check_integrity()
        self._now += seconds
        return seconds

    def _seconds(self, step: Step) -> float:
        prompts = [row for row in step.rows if row.num_tokens > 1]
        num_decodes = len(step.rows) - len(prompts)
        return (self.step_s if num_decodes else 0.0) + self.token_s * sum(
            row.num_tokens * (1 + (row.start + row.num_tokens / 2) / 1000) for row in prompts
        )


@pytest.fixture
def machine() -> Machine:
    machine = Machine(Random(1))
    machine.add(STREAMS, 8, 30_000)
    for _ in range(20):
        machine.step()
    return machine


def test_another_clients_prompts_take_no_more_of_a_step_than_streams_do(machine: Machine) -> None:
    machine.add(PROMPTS, 1024, 1)  # from which it learns what such tokens take
    machine.step()
    longs = [machine.add(PROMPTS, _LONG, 1) for _ in range(3)]
    times = []
    while not all(len(seq.tokens) > _LONG for seq in longs):
        times.append(machine.step())
    assert max(times) < 4 * machine.step_s  # while it learns
    assert sorted(times)[len(times) * 95 // 100] < 2.5 * machine.step_s


def test_the_time_of_decodes_is_known_while_prompts_never_end(machine: Machine) -> None:
    machine.token_s = 3e-5
    machine.step_s *= 4
    for _ in range(50):
        machine.step()
    machine.step_s /= 4
    times: list[float] = []
    while len(times) < 500:
        long = machine.add(PROMPTS, _LONG, 1)
        while len(long.tokens) == _LONG:
            times.append(machine.step())
    assert sorted(times[400:500])[95] < 3 * machine.step_s


def test_a_step_with_many_more_decodes_than_any_before_has_no_prompts(machine: Machine) -> None:
    machine.add(PROMPTS, 1024, 1)
    machine.step()
    streams = [machine.add(STREAMS, 2, 30_000) for _ in range(8)]
    while not all(len(seq.tokens) > 2 for seq in streams):
        machine.step()
    machine.add(PROMPTS, _LONG, 1)
    steps = [machine.scheduler.schedule(0.0), machine.scheduler.schedule(0.0)]
    assert [step and (step.num_decodes, len(step.rows)) for step in steps] == [(9, 9), (9, 9)]


def test_a_lone_clients_prompts_are_limited_in_tokens_only(machine: Machine) -> None:
    long = machine.add(STREAMS, _LONG, 1)
    steps = 0
    while len(long.tokens) == _LONG:
        machine.step()
        steps += 1
    assert steps == -(-_LONG // 1024)


def test_a_short_prompt_does_not_wait_for_another_clients_long_one(machine: Machine) -> None:
    for _ in range(3):
        machine.add(PROMPTS, _LONG, 1)
    for _ in range(30):
        machine.step()
    short = machine.add(STREAMS, 20, 5)
    machine.step()
    assert len(short.tokens) == 21


def test_a_pause_of_the_machine_is_forgotten(machine: Machine) -> None:
    machine.token_s = 1e-5
    machine.add(PROMPTS, 1024, 1)
    machine.step()
    long = machine.add(PROMPTS, _LONG, 1)
    step = machine.scheduler.schedule()
    assert step is not None
    machine.scheduler.apply(step, Answer([5] * len(step.rows)))
    machine.scheduler.step_times.step_answered(step, StepTiming(60.0, 0.0, 0.0))
    steps = 0
    while len(long.tokens) == _LONG:
        machine.step()
        steps += 1
    # Its last tokens take 0.2 ms: nearly 50 to a step, were it not for the pause; else it is 16.
    assert steps < _LONG / 16 / 2


def test_prompts_stay_short_of_a_long_step_while_another_is_between_requests(
    machine: Machine,
) -> None:
    machine.add(PROMPTS, 1024, 1)
    machine.step()
    for key in machine.scheduler.open_sequences():
        machine.scheduler.abort(key)
    machine.add(PROMPTS, _LONG, 1)
    times = []
    while sum(times) < 9:
        times.append(machine.step())
        if not machine.scheduler.num_running:
            machine.add(PROMPTS, _LONG, 1)
    assert sorted(times)[len(times) * 95 // 100] < 0.1
