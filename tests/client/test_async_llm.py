"""The asyncio client over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from nano_vllm_grpc import AsyncLLM, SamplingParams, UnavailableError
from tests.client.fake_server import ENDLESS_SEED, FakeServer, FakeService


async def test_many_generate_calls_at_once(server: FakeServer) -> None:
    async with AsyncLLM(server.address) as llm:
        calls = [llm.generate(chr(97 + i), use_tqdm=False) for i in range(20)]
        results = await asyncio.gather(*calls)
    assert [r[0]["text"] for r in results] == [chr(98 + i) * 8 for i in range(20)]


async def test_stream(server: FakeServer) -> None:
    async with AsyncLLM(server.address) as llm:
        text = [c.text async for c in llm.stream("ab", SamplingParams(max_tokens=3))]
    assert text == ["b", "c", "b"]


async def test_leaving_a_stream_cancels_the_request(
    server: FakeServer, service: FakeService
) -> None:
    async with AsyncLLM(server.address) as llm:
        async with aclosing(llm.stream("a", SamplingParams(seed=ENDLESS_SEED))) as stream:
            async for chunk in stream:
                assert chunk.text == "b"
                break
        assert await asyncio.to_thread(service.cancelled.wait, 60)


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


async def test_a_server_that_is_not_there_is_a_typed_error() -> None:
    async with AsyncLLM("127.0.0.1:1", max_retry_wait_s=0) as llm:
        with pytest.raises(UnavailableError):
            await llm.generate("a", use_tqdm=False)


def test_a_client_can_be_made_before_the_loop(server: FakeServer) -> None:
    llm = AsyncLLM(server.address)

    async def use() -> int:
        async with llm:
            return len(await llm.tokenize("abc"))

    assert asyncio.run(use()) == 3
