"""Embeddings over gRPC and HTTP, from a scheduler whose hidden states can be worked out by hand."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from frontend import embeddings, pooled
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend import fake_scheduler
from tests.frontend.conftest import failure
from tests.frontend.fake_scheduler import CACHED_PROMPT_TOKENS, embedding, ended
from tests.frontend.http.conftest import HttpService, Json

PATH = "/v1/embeddings"
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
PROMPTS = [[105, 300, 511], [7], [600, 42]]


def expected(prompt: Sequence[int], dimensions: int = 4, pooling: int = 1) -> list[float]:
    values = np.array(embedding(prompt, pooling)[:dimensions], np.float64)
    found: list[float] = (values / np.linalg.norm(values)).astype(np.float32).tolist()
    return found


def request(prompts: Sequence[Sequence[int]] = PROMPTS, **fields: Any) -> pb.EmbedRequest:
    inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=ids)) for ids in prompts]
    return pb.EmbedRequest(inputs=inputs, **fields)


async def test_prompts_and_texts_over_grpc(service: HttpService) -> None:
    answer = await service.stub.Embed(request(request_id="mine", priority=3, cache_salt="s"))
    assert answer.request_id == "mine"
    assert [list(each.values) for each in answer.embeddings] == [*map(expected, PROMPTS)]
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.cached_prompt_tokens == 3 * CACHED_PROMPT_TOKENS
    submit = await service.scheduler.submits.get()
    assert (submit.request_id, submit.priority, submit.cache_salt) == ("mine", 3, ":s")
    assert submit.sampling.pooling == scheduler_pb2.POOLING_LAST
    assert (submit.sampling.max_tokens, list(submit.sampling.eos_token_ids)) == (1, [])
    ids = (await service.stub.Tokenize(pb.TokenizeRequest(text="Once upon"))).token_ids
    text = pb.EmbedRequest(inputs=[pb.EmbedInput(text="Once upon")], dimensions=2)
    (found,) = (await service.stub.Embed(text)).embeddings
    assert list(found.values) == expected(list(ids), 2)


async def test_openais_forms(service: HttpService) -> None:
    body: Json = {"input": PROMPTS, "model": "demo", "user": "me"}
    whole = await service.post(PATH, body)
    assert whole == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": pytest.approx(expected(prompt))}
            for i, prompt in enumerate(PROMPTS)
        ],
        "model": "demo",
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }
    short = await service.post(PATH, body | {"encoding_format": "base64", "dimensions": 3})
    for prompt, each in zip(PROMPTS, short["data"], strict=True):
        values = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        assert values.tolist() == expected(prompt, 3)
    (one,) = (await service.post(PATH, {"input": PROMPTS[0]}))["data"]
    assert one["embedding"] == pytest.approx(expected(PROMPTS[0]))
    texts = [(await service.post(PATH, {"input": each}))["data"] for each in ("a b", ["a b"])]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("changes", [{"pooling": "mean"}])
async def test_another_way_to_pool(service: HttpService) -> None:
    (found,) = (await service.stub.Embed(request([[5, 6]]))).embeddings
    assert list(found.values) == expected([5, 6], pooling=2)


async def test_many_inputs_do_not_fill_the_queue(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled, "_AT_ONCE", 3)
    service.scheduler.automatic = False
    prompts = [[number + 1] for number in range(10)]
    call = service.stub.Embed(request(prompts))
    for number in range(10):
        await service.scheduler.submits.get()
        if number % 3 == 2:
            assert len(service.scheduler.connection.live) == 3
            assert service.scheduler.submits.empty()
            service.scheduler.step()
    service.scheduler.step()
    assert [list(each.values) for each in (await call).embeddings] == [*map(expected, prompts)]


async def test_a_lost_scheduler_delays_an_embedding(service: HttpService) -> None:
    service.scheduler.automatic = False
    call = service.stub.Embed(request())
    for _ in PROMPTS:
        await service.scheduler.submits.get()
    await service.reconnect()
    for _ in PROMPTS:
        assert (await service.scheduler.submits.get()).resubmitted
    service.scheduler.step()
    assert [list(each.values) for each in (await call).embeddings] == [*map(expected, PROMPTS)]


async def test_a_wrong_input_is_found_before_others_are_computed(service: HttpService) -> None:
    error = await failure(service.stub.Embed(request([[1, 2], [3, 4000], [5]])))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    reason = "4000 is not below the vocabulary size, 1536"
    assert error.details() == f"inputs[1].token_ids[1]: {reason}"
    assert service.scheduler.submits.empty()  # none was computed
    status, body = await service.error(PATH, {"input": [[1, 2], [3, 4000], [5]]})
    assert (status, body["error"]["param"]) == (400, "input[1][1]")


async def test_a_client_that_leaves_ends_its_inputs(service: HttpService) -> None:
    service.scheduler.automatic = False
    call = service.stub.Embed(request())
    numbers = {(await service.scheduler.submits.get()).request for _ in PROMPTS}
    call.cancel()
    assert {await service.scheduler.aborts.get() for _ in PROMPTS} == numbers


@pytest.mark.parametrize(
    ("message", "details"),
    [
        (pb.EmbedRequest(), "inputs: 0 inputs; must be 1 to 2048"),
        (request([[1]] * 2049), "inputs: 2049 inputs; must be 1 to 2048"),
        (request([[1], []]), "inputs[1].token_ids: empty; a prompt needs at least one token"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "inputs[0].prompt: missing"),
        (request(dimensions=-1), "dimensions: -1; must be 0 to 192"),
        (request(dimensions=193), "dimensions: 193; must be 0 to 192"),
        (request([[1] * 200]), "inputs[0].token_ids: 200 tokens; the limit is 127"),
        (request(request_id="\n"), "request_id: must be printable"),
    ],
)
async def test_what_is_refused(
    service: HttpService, message: pb.EmbedRequest, details: str
) -> None:
    error = await failure(service.stub.Embed(message))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith(details)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input[0]"),
        ({"input": ""}, "input"),
        ({"input": [5, 4000]}, "input[1]"),
        ({"input": [[]] * 3000}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"model": "other"}, "model"),
        ({"temperature": 1}, "temperature"),
    ],
)
async def test_what_http_refuses(service: HttpService, change: Json, param: str) -> None:
    status, body = await service.error(PATH, {"input": "a"} | change)
    assert status == (404 if param == "model" else 400)
    assert body["error"]["param"] == param


async def test_the_numbers_of_an_answer_have_a_limit(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 400)
    await service.stub.Embed(request(dimensions=130))
    error = await failure(service.stub.Embed(request()))
    assert error.details() == "inputs: 3 inputs; with 192 dimensions the limit is 2"


async def test_as_many_inputs_as_are_allowed(service: HttpService) -> None:
    """Each has its part in what is recorded of the call."""
    answer = await service.post(PATH, {"input": [[5, 6]] * pooled.MAX_INPUTS})
    assert answer["usage"]["prompt_tokens"] == 2 * pooled.MAX_INPUTS


async def test_a_full_queue_delays_inputs_if_others_are_accepted(service: HttpService) -> None:
    """Each repeat of a request that its client's limit stops midway makes progress."""
    scheduler = service.scheduler
    scheduler.rejection = scheduler_pb2.Finished(
        cause=scheduler_pb2.FINISH_CAUSE_QUEUE_FULL, message="full", retry_after_s=0.01
    )
    assert (await failure(service.stub.Embed(request()))).code() == FULL
    scheduler.rejection, scheduler.automatic = None, False
    call = asyncio.ensure_future(service.stub.Embed(request([[1], [2]])))
    while len(scheduler.connection.live) < 2:
        await scheduler.submits.get()
    second = [*scheduler.connection.live][1]
    rejected = scheduler.connection.live.pop(second)
    assert rejected.prompt == [2]
    finished = scheduler_pb2.Finished(
        request=second, cause=scheduler_pb2.FINISH_CAUSE_QUEUE_FULL, retry_after_s=0.01
    )
    scheduler.send((), [finished])
    while len(scheduler.connection.live) < 2:  # it comes again
        await scheduler.submits.get()
    scheduler.step()
    found = [list(each.values) for each in (await call).embeddings]
    assert found == [expected([1]), expected([2])]


@pytest.mark.parametrize("values", [[0, 0], [1, float("nan")], [1, float("inf")]])
async def test_a_vector_without_a_direction_is_an_error(
    service: HttpService, values: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_scheduler, "embedding", lambda *_: values)
    assert (await failure(service.stub.Embed(request()))).code() == grpc.StatusCode.INTERNAL


async def test_an_engine_without_an_embedding_is_an_error(service: HttpService) -> None:
    service.scheduler.automatic = False
    call = asyncio.ensure_future(service.stub.Embed(request([[1]])))
    number = (await service.scheduler.submits.get()).request
    service.scheduler.send([(number, 0, 1)], ended(number))
    assert (await failure(call)).code() == grpc.StatusCode.INTERNAL
