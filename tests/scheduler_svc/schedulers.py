"""Schedulers, and sequences whose tokens the oracle knows."""

from __future__ import annotations

from collections import deque

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence
from scheduler_svc.core.step import Answer, End, Output, Step
from shared.paging import Paging
from tests.fake_worker import VOCAB_SIZE, next_token


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    speculation: Speculation | None = None,
    paging: Paging | None = None,
    **limits: int,
) -> Scheduler:
    values = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": min(128, num_blocks * block_size),
        "max_waiting": 100,
        "vocab_size": VOCAB_SIZE,
        **limits,
    }
    blocks = BlockManager(num_blocks, paging or Paging(block_size))
    return Scheduler(Limits(**values), blocks, speculation)


def make(
    number: int,
    prompt: list[int],
    max_tokens: int = 5,
    eos: frozenset[int] = frozenset(),
    stop: frozenset[int] = frozenset(),
    deadline: float | None = None,
    generated: tuple[int, ...] = (),
) -> Sequence:
    params = SamplingParams(max_tokens, eos_token_ids=eos, stop_token_ids=stop)
    return Sequence(
        (0, number), prompt, params, Request(deadline=deadline), generated_ids=generated
    )


def refused(end: End | None, cause: FinishCause = FinishCause.QUEUE_FULL) -> End:
    """The end with which `Scheduler.add` refused a request, for that cause."""
    assert end is not None
    assert end.cause is cause
    return end


def sample(step: Step) -> Answer:
    """The answer to the oldest step in flight, whose inputs are all known."""
    return Answer(
        [next_token(r.seq.tokens[: r.start + r.num_tokens]) if r.samples else -1 for r in step.rows]
    )


def planned(scheduler: Scheduler) -> Step:
    """The next step, which there must be."""
    step = scheduler.schedule()
    assert step is not None
    return step


def answered(scheduler: Scheduler) -> Step | None:
    """Plans a step, applies its answer, and returns it."""
    step = scheduler.schedule()
    if step is not None:
        scheduler.apply(step, sample(step))
    scheduler.check_integrity()
    return step


def run(scheduler: Scheduler, max_steps: int = 10_000, ahead: int = 0) -> list[Output]:
    """Runs until nothing is left to do, with up to `ahead` steps sent before an answer arrives."""
    outputs: list[Output] = []
    in_flight: deque[Step] = deque()
    for _ in range(max_steps):
        while len(in_flight) <= ahead and (step := scheduler.schedule()):
            check_limits(scheduler, step)
            in_flight.append(step)
        if not in_flight:
            scheduler.check_integrity()
            assert not scheduler.open_sequences()
            assert scheduler.num_waiting == scheduler.num_running == 0
            assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
            return outputs
        step = in_flight.popleft()
        outputs += scheduler.apply(step, sample(step))
        scheduler.check_integrity()
    raise AssertionError("does not finish")


def check_limits(scheduler: Scheduler, step: Step) -> None:
    assert 0 < len(step.rows) <= scheduler.limits.max_num_seqs
    assert sum(r.num_tokens for r in step.rows) <= scheduler.limits.max_num_batched_tokens
    assert len({r.seq.key for r in step.rows}) == len(step.rows)
    for row in step.rows:
        held = row.seq.blocks.capacity
        assert row.num_tokens > 0
        assert row.start + row.num_tokens <= held


def generated(seq: Sequence) -> list[int]:
    return seq.tokens[seq.num_prompt_tokens :].tolist()
