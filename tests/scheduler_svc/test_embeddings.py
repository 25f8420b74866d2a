"""Embeddings and scores of prompts, from hidden states that can be computed by hand.

See `tests.sanitizer`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from shared.pb import scheduler_pb2, worker_pb2
from tests.fake_worker import FakeWorker
from tests.scheduler_svc.stacks import Frontend, stack_of

LAST, MEAN = scheduler_pb2.POOLING_LAST, scheduler_pb2.POOLING_MEAN
SCORE = scheduler_pb2.POOLING_SCORE
YES, NO = 5, 3
Pooling = scheduler_pb2.Pooling.ValueType


def expected(prompt: list[int], pooling: Pooling) -> list[float]:
    if pooling == SCORE:
        return [(YES - NO) * prompt[-1]]
    if pooling == LAST:
        return [prompt[-1], len(prompt) - 1]
    return [float(np.float32(sum(prompt) / len(prompt))), (len(prompt) - 1) / 2]


async def embed(frontend: Frontend, prompts: dict[int, list[int]], pooling: Pooling) -> None:
    """Checks the embeddings or scores of prompts, by request."""
    sampling = scheduler_pb2.TokenSampling(max_tokens=1, pooling=pooling, yes_id=YES, no_id=NO)
    for request, prompt in prompts.items():
        await frontend.submit(request, prompt, sampling=sampling)
    await frontend.read_until_finished(*prompts)
    for request, prompt in prompts.items():
        assert frontend.embeddings[request] == expected(prompt, pooling)
        assert frontend.finished[request].cause == scheduler_pb2.FINISH_CAUSE_LENGTH


def texts(first: int, lengths: list[int]) -> dict[int, list[int]]:
    return {first + i: [first + i, *range(1, length)] for i, length in enumerate(lengths)}


@pytest.mark.parametrize("pooling", [LAST, MEAN, SCORE])
async def test_prompts_in_chunks_beside_completions(tmp_path: Path, pooling: Pooling) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker, max_num_batched_tokens=8) as stack:
        frontend = await stack.frontend()
        await frontend.submit(100, [7, 8, 9], 30)
        await embed(frontend, texts(1, [1, 30, 5, 17, 8]), pooling)
        await frontend.expect(100, [7, 8, 9], 30)
    assert not worker.violations
    sums = [list(step.pooling.sums) for step in worker.steps if step.HasField("pooling")]
    assert {value for each in sums for value in each} == {int(pooling == MEAN)}
    assert (len(sums) > 5) == (pooling == MEAN)  # each chunk is summed


async def test_only_the_last_token_need_not_be_cached(tmp_path: Path) -> None:
    """Its hidden state is needed. A mean needs those of all tokens."""
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        prompt = [*range(1, 18)]
        await frontend.complete(1, prompt, 1)
        await embed(frontend, {2: prompt}, LAST)
        await embed(frontend, {3: prompt}, MEAN)
        cached = [frontend.started[number].cached_prompt_tokens for number in (2, 3)]
        assert cached == [16, 0]


@pytest.mark.parametrize("pooling", [LAST, MEAN, SCORE])
@pytest.mark.parametrize("loses_cache", [False, True])
async def test_lost_workers(tmp_path: Path, pooling: Pooling, loses_cache: bool) -> None:
    """Chunks that were answered count once, whether their cache is kept or computed again."""
    worker = FakeWorker()

    def fails(step: worker_pb2.StepRequest) -> bool:
        if (step.epoch, step.step_id) not in ((1, 2), (2, 3)):
            return False
        if loses_cache:
            worker.lose_cache()
        return True

    worker.fails = fails
    async with stack_of(tmp_path, worker, max_num_batched_tokens=8) as stack:
        frontend = await stack.frontend()
        await asyncio.wait_for(embed(frontend, texts(1, [30, 12]), pooling), 60)
    assert [bool(each.keep_cache_id) for each in worker.configured[1:]] == [not loses_cache] * 2


async def test_embeddings_and_scores_share_a_step(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        kinds = {1: SCORE, 2: LAST, 3: SCORE, 4: MEAN}
        for request, pooling in kinds.items():
            sampling = scheduler_pb2.TokenSampling(
                max_tokens=1, pooling=pooling, yes_id=YES, no_id=NO
            )
            await frontend.submit(request, [request, 7, 9], sampling=sampling)
        await frontend.read_until_finished(*kinds)
        for request, pooling in kinds.items():
            assert frontend.embeddings[request] == expected([request, 7, 9], pooling)


@pytest.mark.parametrize(("yes", "no"), [(-1, 3), (1000, 3), (5, -1), (5, 1000)])
async def test_tokens_of_a_score_are_checked(tmp_path: Path, yes: int, no: int) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        sampling = scheduler_pb2.TokenSampling(max_tokens=1, pooling=SCORE, yes_id=yes, no_id=no)
        await frontend.submit(1, [1, 2], sampling=sampling)
        await frontend.read_until_finished(1)
        assert frontend.finished[1].cause == scheduler_pb2.FINISH_CAUSE_INVALID
        assert frontend.finished[1].field == "sampling.pooling"


async def test_a_preempted_prompt_is_summed_anew(tmp_path: Path) -> None:
    """Its first chunks are computed again, once completions have taken its blocks."""
    worker = FakeWorker(num_blocks=7)
    worker.gate.clear()
    async with stack_of(tmp_path, worker, max_num_batched_tokens=4) as stack:
        frontend = await stack.frontend()
        await frontend.submit(100, [7, 8, 9], 25)
        await worker.step_arrived.wait()
        summing = asyncio.create_task(embed(frontend, texts(1, [19]), MEAN))
        await stack.until(lambda load: load.running + load.waiting == 2)
        worker.gate.set()
        await summing
        await frontend.expect(100, [7, 8, 9], 25)
        load = await stack.stub.GetLoad(scheduler_pb2.GetLoadRequest())
        assert load.preemptions > 0


async def test_an_unknown_way_to_pool_is_refused(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        sampling = scheduler_pb2.TokenSampling(max_tokens=1)
        sampling.pooling = 7  # type: ignore[assignment]
        await frontend.submit(1, [1, 2], sampling=sampling)
        assert "submit.sampling.pooling: 7 is unknown" in str((await frontend.failure()).details())
