"""How long pipeline stages wait, with the step times of a GPU, in virtual time.

    python -m tests.simulation.bubbles

Prints the share of time in which stages wait, by stages and streams. All streams decode, and stages
are equal. The engine and the scheduler are the real ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Output, Step
from scheduler_svc.engine import Engine
from shared.paging import Paging
from tests.simulation import virtual_time

# Decodes of Qwen3-0.6B on an H200 at contexts of 600 tokens, by rows; see bench/results.
_ROWS = (1, 8, 16, 32, 64, 96, 128, 256)
_STEP_MS = (1.117, 1.273, 1.434, 1.801, 2.34, 2.879, 3.406, 5.531)
# From a stage to the next, and from the last stage by the scheduler to the first.
_HOP_S, _ANSWER_S = 0.02e-3, 0.25e-3
_TOKENS, _WARM_UP = 100, 10  # of a stream; of these, before the measurement
STAGES, STREAMS, SCALES = (1, 2, 3, 4, 6, 8), (1, 32, 256), (1, 8)


class StagedWorkers:
    """An `Executor` whose steps take as long as on a GPU, `scale` times."""

    max_run = 1

    def __init__(self, num_stages: int, scale: int) -> None:
        self._num_stages = num_stages
        self._scale = scale
        self._loop = asyncio.get_running_loop()
        self._free_at = [0.0] * num_stages
        self._due: deque[tuple[float, int]] = deque()
        self.busy_s = 0.0  # of all stages

    async def send(self, run: Seq[Step]) -> None:
        (step,) = run
        rows = len(step.rows)
        stage_s = 1e-3 * self._scale * float(np.interp(rows, _ROWS, _STEP_MS)) / self._num_stages
        ready_at = self._loop.time() + _ANSWER_S / 2
        for stage, free_at in enumerate(self._free_at):
            self._free_at[stage] = max(ready_at, free_at) + stage_s
            ready_at = self._free_at[stage] + _HOP_S
            self.busy_s += stage_s
        self._due.append((self._free_at[-1] + _ANSWER_S / 2, rows))

    async def receive(self) -> Answer:
        due, rows = self._due.popleft()
        await asyncio.sleep(due - self._loop.time())
        return Answer([1] * rows)

    async def cut(self) -> None:
        raise AssertionError("there are no runs")

    async def watch(self) -> str:
        never: asyncio.Future[str] = self._loop.create_future()
        return await never

    async def recover(self, *, keep: bool) -> bool:
        raise AssertionError("nothing is lost")


def idle_share(num_stages: int, num_streams: int, scale: int = 1) -> float:
    """The share of time in which stages wait."""
    return virtual_time.run(_measure(num_stages, num_streams, scale))


async def _measure(num_stages: int, num_streams: int, scale: int) -> float:
    limits = Limits(
        max_num_seqs=num_streams,
        max_num_batched_tokens=num_streams,
        max_model_len=2 * _TOKENS,
        max_waiting=num_streams,
        vocab_size=10,
    )
    blocks = BlockManager(num_streams * _TOKENS, Paging(16))
    scheduler = Scheduler(limits, blocks, num_stages=num_stages)
    workers, loop = StagedWorkers(num_stages, scale), asyncio.get_running_loop()
    marks: list[tuple[float, float]] = []  # times, and how long stages had worked

    def emit(outputs: list[Output]) -> None:
        wanted = _TOKENS - _WARM_UP if marks else _WARM_UP
        if len(marks) < 2 and scheduler.stats.sampled_tokens >= wanted * num_streams:
            marks.append((loop.time(), workers.busy_s))

    engine = Engine(scheduler, workers, emit, loop.time)
    for number in range(num_streams):
        engine.submit(Sequence((0, number), [2], SamplingParams(_TOKENS)))
    running = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0)
    await engine.rest()
    running.cancel()
    (began_at, before_s), (ended_at, busy_s) = marks
    return max(1 - (busy_s - before_s) / (num_stages * (ended_at - began_at)), 0.0)


def main() -> None:
    for scale in SCALES:
        print(f"steps {scale} times as long as those of Qwen3-0.6B on an H200\n")
        print("| stages |", *(f"{streams} streams |" for streams in STREAMS))
        print("|--:|" + "--:|" * len(STREAMS))
        for stages in STAGES:
            shares = (f"{idle_share(stages, streams, scale):.0%} |" for streams in STREAMS)
            print(f"| {stages} |", *shares)
        print()


if __name__ == "__main__":
    main()
