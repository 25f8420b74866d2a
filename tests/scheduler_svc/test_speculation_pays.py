"""Speculation never makes an engine slower, whatever its seats and its machine, and makes it faster
where drafts hold and seats are free. In virtual time, with the step times of several machines."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import pytest

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import Answer, Step, StepTiming
from shared.paging import Paging

PLAN_S, SEND_S = 1.2e-3, 0.2e-3  # of the scheduler for a step, and on the way to the workers
VOCAB_SIZE = 10_000
_rng = random.Random(1)
NOISE = [_rng.randrange(VOCAB_SIZE) for _ in range(100_003)]
TEXT = NOISE[:50]  # repeated by those that repeat themselves

Curve = Callable[[int], float]  # seconds of a step with so many rows
MACHINES: dict[str, Curve] = {
    "H200": lambda rows: 1.1e-3 + 17.3e-6 * rows,
    "CPU": lambda rows: 20e-3 + 5e-3 * rows,
    "flat": lambda rows: 10e-3,
    "cliffs": lambda rows: 2e-3 * (1 + rows // 48),
    "worse by rows": lambda rows: 5e-3 * (1 + (rows / 40) ** 2),
}


class Run(NamedTuple):
    tokens_per_s: float
    waited: int  # times that no step was planned ahead
    drafts: int


def sampled(row: Row, kind: str) -> int:
    """The token that a row samples: a function of its sequence and position."""
    number, place = row.seq.key.number, row.start + row.num_tokens
    noise = NOISE[(number * 7919 + place) % len(NOISE)]
    repeats = {
        "never repeats": False,
        "repeats": True,
        "half repeats": noise % 2 == 0,
        "half of the sequences repeat": number % 2 == 0,
    }
    if repeats[kind]:
        return TEXT[place % len(TEXT)]
    return TEXT[noise % len(TEXT)] if kind == "half repeats" else noise


class Engine:
    """Runs one step ahead, as the real engine does, and learns how long steps take."""

    def __init__(self, num_seqs: int, seats: int, kind: str, *, drafts: bool, steps: int) -> None:
        speculation = Speculation() if drafts else None
        limits = Limits(seats, 8192, 8192, max_waiting=1000, vocab_size=VOCAB_SIZE)
        self.scheduler = Scheduler(limits, BlockManager(20_000, Paging(128)), speculation)
        self._kind, self._steps = kind, steps
        self._in_flight: deque[tuple[Step, float]] = deque()
        self._now = self._free_since = 0.0
        for number in range(num_seqs):
            prompt = [NOISE[-1 - number], *TEXT] if kind != "never repeats" else [number]
            seq = Sequence((0, number), prompt, SamplingParams(steps * 20, seed=number))
            assert self.scheduler.add(seq) is None

    def run(self, curve: Curve) -> Run:
        waited = 0
        for _ in range(self._steps):
            while len(self._in_flight) < 2:
                step = self.scheduler.schedule(self._now)
                if step is None:
                    waited += 1
                    break
                self._now += PLAN_S / 2
                self._in_flight.append((step, self._now))
            self._answer(*self._in_flight.popleft(), curve)
        stats = self.scheduler.stats
        return Run(stats.sampled_tokens / self._now, waited, stats.draft_tokens)

    def _answer(self, step: Step, sent: float, curve: Curve) -> None:
        free, rows = self._free_since, step.rows
        begun = max(free, sent + SEND_S)
        self._free_since = self._now = now = max(self._now, begun + curve(len(rows)))
        tokens = [sampled(row, self._kind) if row.samples else -1 for row in rows]
        self.scheduler.apply(step, Answer(tokens))
        timing = StepTiming(now - max(sent, free), max(0.0, sent - free), now)
        self.scheduler.step_times.step_answered(step, timing)
        self._now += PLAN_S / 2


def compare(
    num_seqs: int, seats: int, kind: str, machine: str, steps: int = 300
) -> tuple[Run, float]:
    """The run with speculation, and how many times as fast it is as the one without."""
    without, run = (
        Engine(num_seqs, seats, kind, drafts=drafts, steps=steps).run(MACHINES[machine])
        for drafts in (False, True)
    )
    return run, run.tokens_per_s / without.tokens_per_s


KINDS = ["never repeats", "half repeats", "half of the sequences repeat", "repeats"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seats", [1, 8, 32, 64, 256])
def test_nothing_waits_where_all_seats_are_taken(seats: int, kind: str) -> None:
    run, ratio = compare(seats, seats, kind, "H200", steps=100)
    assert (run.waited, run.drafts, ratio) == (0, 0, 1.0)


ON_A_GPU = [(1, 2), (1, 256), (8, 64), (31, 32), (33, 64), (60, 64), (250, 256)]
ELSEWHERE = [(1, 8), (7, 8), (8, 64), (24, 32)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("machine", "num_seqs", "seats"),
    [
        (machine, *sizes)
        for machine in MACHINES
        for sizes in (ON_A_GPU if machine == "H200" else ELSEWHERE)
    ],
)
def test_no_case_is_slower(num_seqs: int, seats: int, machine: str, kind: str) -> None:
    """The first drafts are an experiment, which takes two of the 300 steps."""
    _, ratio = compare(num_seqs, seats, kind, machine)
    assert ratio >= 0.99


@pytest.mark.parametrize(
    ("num_seqs", "seats", "machine", "expected"),
    [
        (1, 256, "H200", 6),
        (8, 64, "H200", 2.5),
        (32, 256, "H200", 1.7),
        (1, 32, "CPU", 2.5),
        (8, 64, "flat", 5),
        (24, 32, "flat", 1.1),
        (16, 64, "cliffs", 1.4),
    ],
)
def test_drafts_that_hold_are_faster(
    num_seqs: int, seats: int, machine: str, expected: float
) -> None:
    _, ratio = compare(num_seqs, seats, "repeats", machine)
    assert ratio > expected


@pytest.mark.parametrize(("num_seqs", "seats"), [(1, 8), (8, 16), (16, 32)])
def test_steps_that_are_slow_at_first_do_not_mislead(num_seqs: int, seats: int) -> None:
    """Drafts seem to pay then, until decodes without drafts are measured again."""
    speeds = []
    for drafts in (False, True):
        calls = count(1)

        def slow_at_first(rows: int, calls: count[int] = calls) -> float:
            return MACHINES["CPU"](rows) * (3 if next(calls) <= 4 else 1)

        engine = Engine(num_seqs, seats, "half repeats", drafts=drafts, steps=300)
        speeds.append(engine.run(slow_at_first).tokens_per_s)
    assert speeds[1] > 0.95 * speeds[0]
