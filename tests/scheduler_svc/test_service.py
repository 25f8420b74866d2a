"""Requests from frontends, over real gRPC, with fake workers below."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from grpc import aio

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.settings import SchedulerSettings
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.fake_worker import FakeWorker, completion
from tests.oracle import logprobs, states
from tests.scheduler_svc.stacks import Frontend, stack_of


async def test_mixed_requests_get_the_tokens_of_the_oracle(tmp_path: Path) -> None:
    prompts = {n: [n, *range(n * 3)] for n in range(1, 12)}
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        for number, prompt in prompts.items():
            await frontend.submit(number, prompt, max_tokens=number + 3)
        await frontend.read_until_finished(*prompts)
        for number, prompt in prompts.items():
            assert frontend.tokens[number] == completion(prompt, number + 3)
            assert frontend.finished[number].cause == scheduler_pb2.FINISH_CAUSE_LENGTH
        load = await stack.load()
        assert load.running == load.waiting == load.blocks_used == load.waiting_tokens == 0
        assert load.blocks_free + load.blocks_cached == load.blocks == 64
        assert load.sampled_tokens == sum(n + 3 for n in prompts)
        assert load.prompt_tokens == sum(map(len, prompts.values()))
        assert (load.frontends, load.admissions) == (1, len(prompts))
        assert load.tokens_per_s > 0
        assert load.step_time_s > 0


async def test_all_ranks_get_every_step_and_the_smallest_cache_counts(tmp_path: Path) -> None:
    ranks = [
        FakeWorker(num_blocks=7 - r, block_size=8, max_model_len=100, rank=r, world_size=2)
        for r in range(2)
    ]
    async with stack_of(tmp_path, *ranks, max_waiting=7) as stack:
        frontend = await stack.frontend()
        info = frontend.info
        assert (info.num_blocks, info.block_size, info.max_waiting) == (6, 8, 7)
        assert info.max_model_len == 48  # the cache holds less than the model could
        assert info.tensor_parallel_size == 2
        await frontend.complete(1, [1, 2, 3], 6)
        assert ranks[0].steps == ranks[1].steps


async def test_abort_and_a_lost_connection_free_the_blocks(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontend, other = await stack.frontend(), await stack.frontend()
        worker.gate.clear()
        await frontend.submit(1, range(9), 100)
        await frontend.submit(2, range(9), 100)
        await other.submit(1, range(5), 8)
        await stack.until(lambda load: load.running + load.waiting == 3)
        await frontend.abort(1)
        await stack.until(lambda load: load.running + load.waiting == 2)
        frontend.close()
        await stack.until(lambda load: load.running + load.waiting == 1)
        worker.gate.set()
        await other.expect(1, range(5), 8)
        load = await stack.load()
        assert load.blocks_free + load.blocks_cached == load.blocks


@pytest.mark.parametrize(("prefill", "beside_decodes"), [("auto", 6), (2, 2)])
async def test_steps_are_as_large_as_the_workers_say(
    tmp_path: Path, prefill: object, beside_decodes: int
) -> None:
    """The smallest of the ranks' limits applies; prompts beside decodes get half of a step."""
    workers = [FakeWorker(rank=rank, world_size=2) for rank in range(2)]
    workers[0].info.max_num_batched_tokens = 20
    workers[1].info.max_num_batched_tokens = 12
    limits = {"max_num_batched_tokens": "auto", "max_num_prefill_tokens": prefill}
    async with stack_of(tmp_path, *workers, **limits) as stack:
        frontend = await stack.frontend()
        assert frontend.info.max_num_batched_tokens == 12
        await frontend.submit(1, list(range(30)), max_tokens=20)
        while not frontend.tokens.get(1):
            await frontend.read()
        for worker in workers:
            worker.gate.clear()
        await frontend.submit(2, list(range(30, 60)), max_tokens=1)
        await stack.until(lambda load: load.running + load.waiting == 2)
        for worker in workers:
            worker.gate.set()
        await frontend.read_until_finished(1, 2)
    lens = [np.frombuffer(step.query_lens, "<i4").tolist() for step in workers[0].steps]
    assert [12] in lens
    assert max(sum(each) - 1 for each in lens if len(each) == 2) == beside_decodes


async def test_a_frontend_that_does_not_read_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.connection._MAX_UNREAD", 1000)
    sampling = scheduler_pb2.TokenSampling(max_tokens=400, logprobs=20)
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 64}
    worker = FakeWorker(num_blocks=32 * 110, max_model_len=1000)
    window_stays_small = [("grpc.http2.bdp_probe", 0)]  # 64 KB
    async with (
        stack_of(tmp_path, worker, **limits) as stack,
        aio.insecure_channel(stack.address, options=window_stays_small) as channel,
    ):
        stuck, other = Frontend(SchedulerServiceStub(channel)), await stack.frontend()
        await stuck.connect()
        await other.submit(1, [5, 6], max_tokens=60)
        for request in range(31):
            await stuck.submit(request, [5, 6, request + 7], sampling=sampling)
        await stack.until(lambda load: load.frontends == 1)
        await other.expect(1, [5, 6], 60)
        await stack.until(lambda load: load.running == load.blocks_used == 0)
        assert (await stack.load()).sampled_tokens < 31 * 400

        # When it reads on, it finds tokens in order, then a status that tells it to reconnect.
        with pytest.raises(aio.AioRpcError) as caught:
            await stuck.read_until_finished(*range(31))
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "more than 1000 outputs were not read" in str(caught.value.details())
        again = await stack.frontend()
        await again.submit(0, [5, 6, 7], generated_ids=np.array(stuck.tokens[0], "<i4").tobytes())


async def test_a_stream_that_is_ended_in_order_says_so(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await frontend.failure()).code() is grpc.StatusCode.ABORTED


async def test_a_scheduler_whose_engine_fails_announces_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frontends count no death of a scheduler that has announced its stop."""
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        monkeypatch.setattr(Scheduler, "schedule", Mock(side_effect=RuntimeError("planted")))
        await frontend.submit(1, [1, 2, 3])
        error = await frontend.failure()
        assert (error.code(), frontend.draining) == (grpc.StatusCode.INTERNAL, False)


async def test_a_full_queue_says_when_to_retry(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.gate.clear()
    async with stack_of(tmp_path, worker, max_waiting=1, max_num_seqs=1) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1] * 14, 2)
        await worker.step_arrived.wait()
        await frontend.submit(2, [1] * 14, 2)
        await frontend.submit(3, [1] * 14, 2)
        await frontend.read_until_finished(3)
        assert frontend.finished[3].cause == scheduler_pb2.FINISH_CAUSE_QUEUE_FULL
        assert frontend.finished[3].retry_after_s > 0
        worker.gate.set()
        await frontend.read_until_finished(1, 2)
        assert frontend.tokens[1] == frontend.tokens[2] == completion([1] * 14, 2)


@pytest.mark.parametrize(
    ("max_waiting", "tokens"), [(1, 1 << 20), (4096, 1 << 20), (8192, 1 << 21)]
)
def test_a_longer_queue_may_have_more_tokens(max_waiting: int, tokens: int) -> None:
    assert SchedulerSettings(max_waiting=max_waiting).max_waiting_tokens == tokens


async def test_a_deadline_ends_the_request_and_frees_its_blocks(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1], 100, timeout_s=1e-6)
        await frontend.read_until_finished(1)
        assert frontend.finished[1].cause == scheduler_pb2.FINISH_CAUSE_DEADLINE
        assert (await stack.load()).running == 0


async def test_priorities_are_served_first_and_frontends_in_turn(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker, max_num_seqs=1) as stack:
        busy, other = await stack.frontend(), await stack.frontend()
        worker.gate.clear()
        await busy.submit(0, [9], 1)
        await worker.step_arrived.wait()
        for number in range(1, 5):
            await busy.submit(number, [number], 1)
        await stack.until(lambda load: load.waiting == 4)
        await other.submit(5, [5], 1)
        await stack.until(lambda load: load.waiting == 5)
        await other.submit(6, [6], 1, priority=-1)
        await stack.until(lambda load: load.waiting == 6)
        worker.gate.set()
        await busy.read_until_finished(1, 2, 3, 4)
        await other.read_until_finished(5, 6)
        first_ids = [np.frombuffer(step.input_ids, "<i4")[0] for step in worker.steps]
        # The tokens of the other one's better priority count, so the busy one goes first.
        assert first_ids == [9, 6, 1, 5, 2, 3, 4]


async def test_a_salt_keeps_prefixes_apart(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        for number, salt in enumerate(["", "a", "b", "a"]):
            await frontend.submit(number, [1] * 9, 3, cache_salt=salt)
            await frontend.read_until_finished(number)
        cached = [frontend.started[number].cached_prompt_tokens for number in range(4)]
        assert cached[:3] == [0, 0, 0]
        assert cached[3] > 0
        assert frontend.tokens[3] == frontend.tokens[0]


async def test_completions_of_one_prompt_have_numbers_and_seeds_of_their_own(
    tmp_path: Path,
) -> None:
    prompt, seed = list(range(10)), 2**64 - 2
    sampling = scheduler_pb2.TokenSampling(max_tokens=6, seed=seed, temperature=1.0)
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        await frontend.submit(7, prompt, sampling=sampling, n=4)
        await frontend.read_until_finished(7, 8, 9, 10)
        for i in range(4):
            assert frontend.tokens[7 + i] == completion(prompt, 6, (seed + i) % 2**64)
            assert frontend.started[7 + i].cached_prompt_tokens == (9 if i else 0)
        load = await stack.load()
        assert load.step_tokens == 10 + 5 + 3 * 6
        assert load.blocks_free + load.blocks_cached == load.blocks


async def test_log_probabilities_come_with_their_tokens(tmp_path: Path) -> None:
    prompt = list(range(40, 60))  # in two chunks
    sampling = scheduler_pb2.TokenSampling(max_tokens=3, logprobs=2, prompt_logprobs=0)
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, prompt, sampling=sampling)
        await frontend.submit(2, prompt, 3)
        await frontend.read_until_finished(1, 2)
        tokens = prompt + completion(prompt, 3)
        before = states(tokens)
        assert frontend.logprobs.keys() == frontend.prompt_logprobs.keys() == {1}
        assert frontend.prompt_logprobs[1] == {
            i: logprobs(before[i - 1], prompt[i], 0) for i in range(1, 20)
        }
        assert frontend.logprobs[1] == {
            i: logprobs(before[19 + i], tokens[20 + i], 2) for i in range(3)
        }


async def test_every_feature_reaches_the_worker(tmp_path: Path) -> None:
    first = completion([1, 2], 1)[0]
    sampling = scheduler_pb2.TokenSampling(
        max_tokens=3,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        bias_ids=np.array([9, 4], "<i4").tobytes(),
        bias_values=np.array([1.0, -100.0], "<f4").tobytes(),
        min_tokens=2,
        eos_token_ids=[first],
    )
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1, 2], sampling=sampling)
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2], 3, min_tokens=2, ends=[first])
    features = worker.steps[0].features
    columns = (features.top_p, features.min_p, features.repetition_penalties)
    assert [np.frombuffer(c, "<f4").tolist() for c in columns] == [[0.5], [0.25], [1.5]]
    columns = (features.presence_penalties, features.frequency_penalties, features.bias_values)
    assert [np.frombuffer(c, "<f4").tolist() for c in columns] == [
        [-1.0],
        [2.0],
        [1.0, -100.0, -np.inf],
    ]
    assert np.frombuffer(features.bias_ids, "<i4").tolist() == [9, 4, first]


async def test_malformed_messages_end_the_stream_and_nothing_else(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        other = await stack.frontend()
        bad = await stack.frontend()
        await bad._call.write(
            scheduler_pb2.FrontendMessage(submit=scheduler_pb2.Submit(prompt_ids=b"abc"))
        )
        error = await bad.failure()
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "submit.prompt_ids" in (error.details() or "")
        garbage = stack.channel.stream_stream("/nanovllm.scheduler.v1.SchedulerService/Connect")()
        for _ in ("EngineInfo", "EngineState"):
            assert await garbage.read()
        await garbage.write(b"\xff\xff\xff")
        with pytest.raises(aio.AioRpcError) as raised:
            await garbage.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await other.complete(1, [1], 3)


BEAMS = {"beam_width": 2}


@pytest.mark.parametrize(
    ("number", "sampling", "fields", "message"),
    [
        (1, {"max_tokens": 200}, {}, "sampling.max_tokens: 200; the limit is 126 after a pro"),
        (1, {"top_p": float("nan")}, {}, "sampling.top_p: nan; must be in (0, 1]"),
        (1, {}, {"n": 65}, "sampling.n: 65"),
        (1, {}, {"timeout_s": float("nan")}, "timeout_s: must be a number"),
        (1, {"grammar": {"kind": 9}}, {}, "sampling.grammar: kind 9 is unknown"),
        (1, BEAMS | {"grammar": {"kind": 2}}, {}, "sampling.beam_width: 2; must be 0 with a gra"),
        (1, BEAMS, {"generated_ids": bytes(4)}, "sampling.beam_width: 2; must be 0 when tokens"),
        (1, BEAMS | {"length_penalty": 1e38}, {}, "sampling.length_penalty: 9.99"),
        (2**64 - 1, BEAMS, {}, f"request: {2**64 - 1} leaves no numbers for 2 completions"),
    ],
)
async def test_a_request_that_no_worker_can_run_is_rejected_and_others_continue(
    tmp_path: Path, number: int, sampling: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        other, frontend = await stack.frontend(), await stack.frontend()
        await other.submit(1, [4, 5], 60)
        params = scheduler_pb2.TokenSampling(**{"max_tokens": 4, **sampling})
        await frontend.submit(number, [1, 2], sampling=params, **fields)
        await frontend.read_until_finished(number)
        end = frontend.finished[number]
        assert end.cause == scheduler_pb2.FINISH_CAUSE_INVALID
        assert f"{end.field}: {end.message}".startswith(message)
        await other.expect(1, [4, 5], 60)
