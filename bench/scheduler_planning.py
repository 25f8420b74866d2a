"""Measures the time to plan a step, encode it and apply its answer, in this process."""

from __future__ import annotations

import gc
import itertools
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.errors import BenchError
from bench.instant_worker import VOCAB_SIZE
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Step
from scheduler_svc.rpc.step_encoding import encode_step

_BLOCK_SIZE = 64
_WAITING_PROMPT = 16  # tokens
_WARM_UP = 20  # steps


@dataclass(frozen=True)
class Planning:
    """Wall time per step, in milliseconds, while all sequences decode one step ahead."""

    num_seqs: int
    waiting: int
    context: int  # tokens, halfway through the measurement
    plan_ms_p50: float
    apply_ms_p50: float
    plan_and_apply_ms_p50: float  # of each step's sum of both times
    plan_and_apply_ms_p99: float
    encode_ms_p50: float
    step_bytes: int  # size of the last step's message


def measure_planning(
    cases: Seq[tuple[int, int]], num_seqs: int, steps: int, rounds: int
) -> list[Planning]:
    """Measures `rounds` times `steps` steps of each case (waiting sequences, context). The cases
    take turns, so that other work on the machine affects all of them."""
    samples: list[list[tuple[float, float, float]]] = [[] for _ in cases]
    sizes = [0 for _ in cases]
    for _ in range(rounds):
        for number, (waiting, context) in enumerate(cases):
            batch = _DecodingBatch(num_seqs, waiting, context, steps)
            samples[number] += batch.run(steps)
            sizes[number] = batch.step_bytes
    return [
        _summary(num_seqs, *case, size, np.array(collected))
        for case, size, collected in zip(cases, sizes, samples, strict=True)
    ]


class _DecodingBatch:
    """A scheduler with `num_seqs` sequences past their prompts, and `waiting` in the queue."""

    def __init__(self, num_seqs: int, waiting: int, context: int, steps: int) -> None:
        prompt_len = max(context - steps // 2, 1)
        max_tokens = 2 * steps + prompt_len + 10 * _WARM_UP  # more than a run makes
        blocks_each = (prompt_len + max_tokens) // _BLOCK_SIZE + 1
        limits = Limits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(2048, 2 * num_seqs),
            max_model_len=blocks_each * _BLOCK_SIZE,
            max_waiting=num_seqs + waiting,
            vocab_size=VOCAB_SIZE,
        )
        self._scheduler = Scheduler(limits, BlockManager(num_seqs * blocks_each, _BLOCK_SIZE))
        self.step_bytes = 0
        self._in_flight: deque[Step] = deque()
        self._step_ids = itertools.count(1)
        rng = np.random.default_rng(0)
        shared = rng.integers(VOCAB_SIZE, size=prompt_len - 1)
        for number in range(num_seqs):
            # Prompts differ in one token. The rest is in the cache, so that all start together.
            prompt = [*shared.tolist(), number % VOCAB_SIZE]
            self._add(number, prompt, max_tokens)
            if number == 0:
                while not self._scheduler.stats.sampled_tokens:
                    self._step()
        while self._scheduler.num_running < num_seqs:
            self._step()
        for number in range(waiting):
            prompt = rng.integers(VOCAB_SIZE, size=_WAITING_PROMPT).tolist()
            self._add(num_seqs + number, prompt, max_tokens)
        for _ in range(_WARM_UP):
            self._step()

    def run(self, steps: int) -> list[tuple[float, float, float]]:
        """Returns the seconds to plan, encode and apply each step.

        Raises:
            BenchError: a step was not a decode of all sequences.
        """
        gc.collect()
        before = self._scheduler.stats.step_tokens
        samples = [self._step() for _ in range(steps)]
        done = self._scheduler.stats.step_tokens - before
        if done != steps * self._scheduler.limits.max_num_seqs:
            raise BenchError(f"{steps} steps had {done} tokens; not all sequences decoded")
        return samples

    def _step(self) -> tuple[float, float, float]:
        """Plans a step, then applies the answer to the previous one."""
        began = time.perf_counter()
        step = self._scheduler.schedule(began)
        planned = time.perf_counter()
        encoded = planned
        if step is not None:
            message = encode_step(step, _BLOCK_SIZE, 1, next(self._step_ids))
            encoded = time.perf_counter()
            self.step_bytes = message.ByteSize()
            self._in_flight.append(step)
        if len(self._in_flight) < 2 and step is not None:
            return planned - began, encoded - planned, 0.0
        oldest = self._in_flight.popleft()
        answer = Answer([7] * len(oldest.rows))
        received = time.perf_counter()
        self._scheduler.apply(oldest, answer)
        return planned - began, encoded - planned, time.perf_counter() - received

    def _add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens, temperature=0.6, seed=number)
        end = self._scheduler.add(Sequence((0, number), prompt, params))
        if end is not None:
            raise BenchError(f"sequence {number} was rejected: {end.message}")


def _summary(
    num_seqs: int, waiting: int, context: int, step_bytes: int, seconds: npt.NDArray[np.float64]
) -> Planning:
    """Computes the figures from `seconds` [steps, 3], the times to plan, encode and apply."""
    plan, encode, apply = 1e3 * seconds.T
    both_p50, both_p99 = np.percentile(plan + apply, (50, 99)).tolist()
    return Planning(
        num_seqs,
        waiting,
        context,
        plan_ms_p50=float(np.median(plan)),
        apply_ms_p50=float(np.median(apply)),
        plan_and_apply_ms_p50=both_p50,
        plan_and_apply_ms_p99=both_p99,
        encode_ms_p50=float(np.median(encode)),
        step_bytes=step_bytes,
    )
