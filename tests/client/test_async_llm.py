"""Behaviour of the asyncio client that the blocking client, which wraps it, cannot show."""

from __future__ import annotations

import asyncio

import pytest

from nano_vllm_grpc import AsyncLLM, SamplingParams
from nano_vllm_grpc.async_llm import _parts
from tests.client.fake_server import ENDLESS_SEED, FakeServer, FakeService


async def test_cancelling_generate_cancels_its_requests(
    server: FakeServer, service: FakeService
) -> None:
    async with AsyncLLM(server.address) as llm:
        prompts = ["a"] * 3
        task = asyncio.create_task(
            llm.generate(prompts, SamplingParams(seed=ENDLESS_SEED), use_tqdm=False)
        )
        assert await asyncio.to_thread(service.streaming.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(service.cancelled.wait, 60)


def test_a_client_is_created_before_its_event_loop(server: FakeServer) -> None:
    llm = AsyncLLM(server.address)

    async def use() -> int:
        async with llm:
            return len(await llm.tokenize("abc"))

    assert asyncio.run(use()) == 3


def test_prompts_to_embed_are_sent_in_parts() -> None:
    """A part has at most as many as a call may have, and fits into a message."""
    long = "é" * 350_000
    prompts = ["a", "b", "c", long, [1] * 100_000, long, "d"]
    parts = [prompts[part] for part in _parts([len(each) for each in prompts], 2)]
    assert parts == [["a", "b"], ["c", long], [[1] * 100_000], [long, "d"]]
    assert [*_parts([], 2)] == []
