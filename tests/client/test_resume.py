"""Streams resume after a server breaks them off, over real gRPC."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing
from itertools import count
from types import SimpleNamespace

import grpc
import pytest

from nano_vllm_grpc import (
    AsyncLLM,
    Chunk,
    DeadlineError,
    LLMError,
    QueueFullError,
    SamplingParams,
    ServerError,
    UnavailableError,
)
from shared.errors import QueueFullError as ServerQueueFullError
from shared.errors import ServiceError
from shared.errors import UnavailableError as ServerUnavailableError
from tests.client.fake_server import ENDLESS_SEED, FakeServer, FakeService, running_server
from tests.waiting import until

PROMPT = "acegikmoq"


@pytest.fixture
async def llm(server: FakeServer) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(server.address) as client:
        yield client


@pytest.fixture
def two_servers() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_server()) for _ in range(2)]


def refusal(code: grpc.StatusCode, message: str) -> ServiceError:
    error = ServiceError(message)
    error.code = code
    return error


async def chunks_of(llm: AsyncLLM, params: SamplingParams, resume: list[int]) -> list[Chunk]:
    return [chunk async for chunk in llm.stream(PROMPT, params, resume_token_ids=resume)]


def joined(chunks: list[Chunk]) -> object:
    """Joins what must be the same however the stream was broken off. Checks that each chunk follows
    the previous one of its completion, and that only the call's last chunk has totals."""
    completions: dict[int, list[object]] = {}
    for chunk in chunks:
        parts = completions.setdefault(chunk.index, [chunk.token_offset, "", [], [], None])
        offset, text, ids, logprobs, finish_reason = parts
        assert isinstance(offset, int)
        assert isinstance(ids, list)
        assert finish_reason is None
        assert chunk.token_offset == offset + len(ids)
        completions[chunk.index] = [
            offset,
            f"{text}{chunk.text}",
            ids + chunk.token_ids,
            logprobs + chunk.logprobs if isinstance(logprobs, list) else None,
            chunk.finish_reason and (chunk.finish_reason, chunk.score),
        ]
    assert all(chunk.usage is chunk.timings is None for chunk in chunks[:-1])
    assert chunks[-1].timings is not None
    assert not any(chunk.prompt_logprobs for chunk in chunks[1:])
    return sorted(completions.items()), chunks[0].prompt_logprobs, chunks[-1].usage


@pytest.mark.parametrize("number", range(30))
async def test_a_broken_stream_resumes_without_a_gap_or_a_repetition(
    llm: AsyncLLM, service: FakeService, number: int
) -> None:
    rng = random.Random(number)
    n = rng.choice((1, 1, 2, 3))
    params = SamplingParams(
        n=n,
        seed=rng.choice((3, 7)),
        max_tokens=rng.randint(7, 9),
        logprobs=rng.choice((None, 1)),
        prompt_logprobs=rng.choice((None, 1)),
        stop=["never"],
    )
    resume = [ord("a") + 1 + (params.seed or 0)] * rng.randint(0, 2) if n == 1 else []
    service.tokens_per_chunk = rng.randint(1, 3)
    expected = joined(await chunks_of(llm, params, resume))
    service.requests.clear()
    service.cuts.append(rng.randint(0, 1))
    service.cuts.extend(rng.randint(0, 4) for _ in range(rng.randint(0, 5)))
    service.tokens_per_chunk = rng.randint(1, 3)
    chunks = await chunks_of(llm, params, resume)
    assert joined(chunks) == expected
    assert {chunk.request_id for chunk in chunks} == {service.requests[0].request_id}
    assert len(service.requests) > 1
    assert all(list(request.sampling.stop) == ["never"] for request in service.requests)


async def test_each_of_several_completions_resumes_alone(
    llm: AsyncLLM, service: FakeService
) -> None:
    params = SamplingParams(n=3, seed=2**64 - 2, max_tokens=4, prompt_logprobs=0)
    service.cuts.append(4)  # one token of each completion, and another of the first
    await chunks_of(llm, params, [])
    resumed = sorted(service.requests[1:], key=lambda r: -len(r.resume_token_ids))
    assert [len(r.resume_token_ids) for r in resumed] == [2, 1, 1]
    assert {r.sampling.seed for r in resumed} == {2**64 - 2, 2**64 - 1, 0}
    assert not any(r.sampling.HasField("n") for r in resumed)
    assert not any(r.sampling.HasField("prompt_logprobs") for r in resumed)


async def test_a_stream_that_only_lacks_its_status_is_not_resumed(
    llm: AsyncLLM, service: FakeService
) -> None:
    service.cuts.append(8)
    chunks = await chunks_of(llm, SamplingParams(max_tokens=8), [])
    assert chunks[-1].usage is not None
    assert len(service.requests) == 1


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
async def test_beams_arrive_once(llm: AsyncLLM, service: FakeService, cut: int) -> None:
    params = SamplingParams(beam_width=3, max_tokens=2)
    service.tokens_per_chunk = 2
    expected = joined(await chunks_of(llm, params, []))
    service.cuts.append(cut)
    assert joined(await chunks_of(llm, params, [])) == expected
    assert not any(request.sampling.HasField("seed") for request in service.requests)


async def test_a_chosen_seed_is_kept_when_a_stream_resumes(
    llm: AsyncLLM, service: FakeService
) -> None:
    service.cuts.extend((0, 2))
    await chunks_of(llm, SamplingParams(max_tokens=4), [])
    await chunks_of(llm, SamplingParams(max_tokens=4), [])
    seeds = [request.sampling.seed for request in service.requests]
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
    ],
)
async def test_a_stream_that_a_proxy_cuts_is_resumed(
    llm: AsyncLLM, service: FakeService, code: grpc.StatusCode, message: str
) -> None:
    service.refusals.append(refusal(code, message))
    assert len(await llm.generate("a", use_tqdm=False)) == 1
    assert len(service.requests) == 2


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (grpc.StatusCode.UNKNOWN, ServerError),
        (grpc.StatusCode.INTERNAL, ServerError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, QueueFullError),  # no hint when to retry
    ],
)
async def test_an_error_that_waiting_does_not_help_is_raised_at_once(
    llm: AsyncLLM,
    service: FakeService,
    code: grpc.StatusCode,
    raised: type[LLMError],
    cut: int,
) -> None:
    service.cuts.append(cut)
    service.cut_error = refusal(code, "something else")
    with pytest.raises(raised) as caught:
        await llm.generate("a", use_tqdm=False)
    assert caught.value.code is code
    assert len(service.requests) == 1


async def test_a_broken_stream_waits_for_a_full_server(llm: AsyncLLM, service: FakeService) -> None:
    service.cuts.append(2)
    stream = llm.stream("a", SamplingParams(max_tokens=4))
    async with aclosing(stream):
        text = (await anext(stream)).text
        service.refusals.append(ServerQueueFullError("full", 0.01))
        text += "".join([chunk.text async for chunk in stream])
    assert text == "bbbb"
    assert len(service.requests) == 3


async def test_a_server_that_breaks_off_before_any_token_counts_as_reached(
    llm: AsyncLLM, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_vllm_grpc.retry._FIRST_CONTACT_S", 0)
    service.refusals.append(ServerUnavailableError("cut"))
    (completion,) = await llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    assert completion["text"] == "bb"


async def test_every_token_begins_a_new_wait(
    server: FakeServer, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(0, 0.1)  # from each failure to the next, however long it takes
    monkeypatch.setattr("nano_vllm_grpc.retry.time", SimpleNamespace(monotonic=ticks.__next__))
    away = [ServerUnavailableError("away", 0.1) for _ in range(20)]
    async with AsyncLLM(server.address, max_retry_wait_s=0.9) as llm:
        for cut in (1, 1, 1, 1):  # each takes less time than allowed; together they take more
            service.cuts.append(cut)
        stream = llm.stream("a", SamplingParams(max_tokens=5))
        async with aclosing(stream):
            async for _ in stream:
                service.refusals.extend(away[:2])
                if len(service.requests) == 10:
                    service.refusals.extend(away)
                    break
            with pytest.raises(UnavailableError, match="away") as caught:
                async for _ in stream:
                    pass
    assert caught.value.retry_after_s == 0.1
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_all_attempts_share_the_deadline(llm: AsyncLLM, service: FakeService) -> None:
    service.refusals.extend(ServerUnavailableError("away", 0.05) for _ in range(1000))
    with pytest.raises((UnavailableError, DeadlineError)):
        await llm.generate("a", use_tqdm=False, timeout_s=0.5)
    assert service.refusals


async def test_closing_a_resumed_stream_cancels_all_its_calls(
    llm: AsyncLLM, service: FakeService
) -> None:
    service.cuts.append(3)
    async with aclosing(llm.stream("a", SamplingParams(seed=ENDLESS_SEED, n=3))) as stream:
        async for _ in stream:
            if len(service.requests) == 4:  # first all together, then each alone
                break
    await until(lambda: not service.in_flight, "all to be cancelled")


async def test_calls_spread_over_all_addresses(two_servers: list[FakeServer]) -> None:
    for server in two_servers:
        server.service.start_together = 10
    async with AsyncLLM([server.address for server in two_servers]) as llm:
        results = await llm.generate(["a"] * 20, use_tqdm=False)
    assert [each["text"] for each in results] == ["b" * 8] * 20
    assert [len(server.service.requests) for server in two_servers] == [10, 10]


async def test_another_address_takes_over(two_servers: list[FakeServer]) -> None:
    first, second = two_servers
    addresses = f"127.0.0.1:1, {first.address},{second.address}"
    params = SamplingParams(max_tokens=100)
    async with AsyncLLM(addresses) as llm:
        assert llm.address == f"127.0.0.1:1,{first.address},{second.address}"
        stream = llm.stream("a", params)
        async with aclosing(stream):
            text = (await anext(stream)).text
            serving = first if first.service.requests else second
            serving.stop()
            text += "".join([chunk.text async for chunk in stream])
    assert text == "b" * 100


async def test_connections_to_one_address(server: FakeServer, service: FakeService) -> None:
    service.start_together = 9
    async with AsyncLLM(server.address, connections=3) as llm:
        await llm.generate(["a"] * 9, use_tqdm=False)
    assert sorted(map(service.peers.count, set(service.peers))) == [3, 3, 3]


async def test_a_closed_client_raises_an_error(server: FakeServer) -> None:
    llm = AsyncLLM(server.address)
    await llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        await llm.get_model()


@pytest.mark.parametrize("address", ["", " , ", []])
def test_an_address_is_required(address: str | list[str]) -> None:
    with pytest.raises(ValueError, match="names no server"):
        AsyncLLM(address)
