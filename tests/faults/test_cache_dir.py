"""A directory under the KV cache, which is far too small for the load: tokens are those of a stack
without one, whatever is preempted, killed, restarted or damaged meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from nano_vllm_grpc import LLM, SamplingParams
from tests.chaos.campaign import undisturbed
from tests.chaos.faults import damage_blocks
from tests.chaos.workload import draw_requests
from tests.faults.streams import assert_undamaged
from tests.faults.transcript import Transcript
from tests.stack import running_stack

pytestmark = pytest.mark.timeout(600)

_REQUESTS = draw_requests(Random(2), 25)
_ROUNDS = {
    1: ("plain", "damage", "worker", "scheduler", "damage", "plain"),
    2: ("worker", "damage"),
}
_TOKENS = 200  # of all streams, before a kill
_STEPS = 300  # at most until then; the longest streams have more tokens
_LIMITS = {"block_size": 16, "max_num_batched_tokens": 256, "speculation": "none"}


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, Transcript]]:
    with running_stack(kv_blocks=1024, **_LIMITS) as stack:
        yield asyncio.run(undisturbed(stack.address, _REQUESTS))


@pytest.mark.parametrize("tp", [1, 2])
async def test_random_faults(tmp_path: Path, expected: dict[str, Transcript], tp: int) -> None:
    """200 requests in all. `python -m tests.chaos` makes more."""
    limits = {"kv_blocks": 160, "tp": tp, "dtype": "float32", **_LIMITS}
    with running_stack(cache_dir=tmp_path, cache_dir_gb=0.02, **limits) as stack:
        for number, kind in enumerate(_ROUNDS[tp]):
            if kind == "damage":
                damage_blocks(tmp_path, Random(number))
            before = await asyncio.to_thread(stack.wait_idle)
            kills = kind in ("worker", "scheduler")
            if kills:
                stack.hold.after(_STEPS)
            reading = asyncio.create_task(undisturbed(stack.address, _REQUESTS))
            if kills:
                wanted = before.sampled_tokens + _TOKENS
                await asyncio.to_thread(
                    stack.wait_load, lambda now, wanted=wanted: now.sampled_tokens > wanted
                )
                await asyncio.to_thread(stack.kill, kind)
                stack.hold.release()
            assert_undamaged(await reading, expected)
            await asyncio.to_thread(stack.wait_serving)
            load = await asyncio.to_thread(stack.wait_idle)
            if kind != "scheduler":  # whose counters begin anew
                assert load.loaded_blocks > 0
                assert load.preemptions > 0


def test_a_conversation_returns_after_a_restart(tmp_path: Path) -> None:
    prompt = [*range(100, 420)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for begun in range(2):
        with running_stack(cache_dir=tmp_path) as stack, LLM(stack.address) as llm:
            (answer,) = llm.generate([prompt], params, use_tqdm=False)
            answers.append(answer["token_ids"])
            assert answer["usage"]["cached_prompt_tokens"] == (304 if begun else 0)
            stack.wait_load(lambda now: now.tier_blocks == (320 + 20 - 1) // 16)
    assert answers[0] == answers[1]


def test_a_request_that_is_not_stored_leaves_nothing(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with running_stack(cache_dir=tmp_path) as stack, LLM(stack.address) as llm:
        llm.generate([[*range(100, 200)]], params, use_tqdm=False)
        stack.wait_load(lambda now: now.tier_blocks == 6)
        llm.generate([[*range(200, 300)]], params, use_tqdm=False, store=False)
        llm.generate([[*range(300, 400)]], params, use_tqdm=False, cache_salt="salt")
        llm.generate([[*range(100, 200)]], params, use_tqdm=False, store=False)
        stack.wait_load(lambda now: now.tier_blocks == 0)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
