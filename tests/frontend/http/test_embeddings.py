"""Embeddings over gRPC and HTTP, from a scheduler whose hidden states can be worked out by hand."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from frontend import embeddings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend.fake_scheduler import CACHED_PROMPT_TOKENS, embedding
from tests.frontend.http.conftest import HttpService, Json

PATH = "/v1/embeddings"
PROMPTS = [[105, 300, 511], [7], [600, 42]]


def expected(prompt: Sequence[int], dimensions: int = 4, pooling: int = 1) -> list[float]:
    values = np.array(embedding(prompt, pooling)[:dimensions], np.float64)
    found: list[float] = (values / np.linalg.norm(values)).astype(np.float32).tolist()
    return found


def request(prompts: Sequence[Sequence[int]] = PROMPTS, **fields: Any) -> pb.EmbedRequest:
    inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=ids)) for ids in prompts]
    return pb.EmbedRequest(inputs=inputs, **fields)


async def failure(call: Any) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as raised:
        await call
    return raised.value


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
    monkeypatch.setattr(embeddings, "_AT_ONCE", 3)
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


async def test_an_input_that_fails_ends_the_others(service: HttpService) -> None:
    service.scheduler.automatic = False
    error = await failure(service.stub.Embed(request([[1, 2], [3, 4000], [5]])))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    reason = "4000 is not below the vocabulary size, 1536"
    assert error.details() == f"inputs[1].token_ids[1]: {reason}"
    while service.scheduler.connection.live:
        await service.scheduler.aborts.get()
    status, body = await service.error(PATH, {"input": [[1, 2], [3, 4000], [5]]})
    assert (status, body["error"]["param"]) == (400, "input[1].token_ids[1]")


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
        (request(dimensions=-1), "dimensions: -1; must be 0 or more"),
        (request(dimensions=5), "dimensions: 5; the model has 4"),
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
        ({"input": [""]}, "input[0].text"),
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


async def test_an_engine_without_an_embedding_is_an_error(service: HttpService) -> None:
    service.scheduler.automatic = False
    call = asyncio.ensure_future(service.stub.Embed(request([[1]])))
    number = (await service.scheduler.submits.get()).request
    finished = scheduler_pb2.Finished(request=number, cause=scheduler_pb2.FINISH_CAUSE_LENGTH)
    service.scheduler.send([(number, 0, 1)], [finished])
    assert (await failure(call)).code() == grpc.StatusCode.INTERNAL
