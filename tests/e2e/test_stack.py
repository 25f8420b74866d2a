"""The whole system through its public API, against transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from nano_vllm_grpc.pb.frontend_pb2 import (
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    FINISH_REASON_UNSPECIFIED,
    Chat,
    ChatMessage,
    GenerateRequest,
    GetModelRequest,
    SamplingParams,
    TokenIds,
)
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.e2e.transformers_model import TransformersModel, token_prompts
from tests.stack import RealStack

TIMEOUT_S = 60


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def generate_all(address: str, requests: list[GenerateRequest]) -> list[list[int]]:
    """Sends all requests at once and returns the token ids of each."""
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(len(requests)) as pool:
        stub = InferenceServiceStub(channel)
        answers = pool.map(lambda r: stub.Generate(r, timeout=TIMEOUT_S), requests)
        return [list(answer.completions[0].token_ids) for answer in answers]


def requests_for(prompts: list[list[int]], max_tokens: int) -> list[GenerateRequest]:
    sampling = greedy(max_tokens, ignore_eos=True)
    return [GenerateRequest(token_ids=TokenIds(ids=p), sampling=sampling) for p in prompts]


def test_concurrent_greedy_completions_equal_transformers(
    demo_stack: str, oracle: TransformersModel
) -> None:
    prompts = token_prompts(len(oracle.tokenizer), 20)
    expected = [oracle.greedy(p, 64, ignore_eos=True) for p in prompts]
    assert generate_all(demo_stack, requests_for(prompts, 64)) == expected


def test_a_chat_is_rendered_and_ends_by_itself(
    demo_channel: grpc.Channel, oracle: TransformersModel
) -> None:
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    rendered = oracle.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    prompt_ids = oracle.tokenizer(rendered)["input_ids"]
    expected = oracle.greedy(prompt_ids, 200, ignore_eos=False)
    chat = Chat(messages=[ChatMessage(**m) for m in messages])
    answer = InferenceServiceStub(demo_channel).Generate(
        GenerateRequest(chat=chat, sampling=greedy(200)), timeout=TIMEOUT_S
    )
    completion = answer.completions[0]
    assert completion.finish_reason == FINISH_REASON_EOS
    assert list(completion.token_ids) == expected
    assert completion.text == oracle.tokenizer.decode(expected, skip_special_tokens=True)
    assert "42" in completion.text
    assert answer.usage.prompt_tokens == len(prompt_ids)


def test_a_stream_joined_is_the_unary_answer(demo_channel: grpc.Channel) -> None:
    stub = InferenceServiceStub(demo_channel)
    sampling = SamplingParams(temperature=0.8, seed=7, max_tokens=80)
    request = GenerateRequest(text="Once upon a time", sampling=sampling, request_id="mine")
    whole = stub.Generate(request, timeout=TIMEOUT_S)
    chunks = list(stub.GenerateStream(request, timeout=TIMEOUT_S))
    assert "".join(c.text for c in chunks) == whole.completions[0].text
    ids: list[int] = []
    for chunk in chunks:
        assert chunk.request_id == "mine"
        assert chunk.token_offset == len(ids)
        ids += chunk.token_ids
    assert ids == list(whole.completions[0].token_ids)
    reasons = [c.finish_reason for c in chunks]
    assert reasons[-1] == whole.completions[0].finish_reason
    assert set(reasons[:-1]) <= {FINISH_REASON_UNSPECIFIED}
    assert chunks[-1].usage.completion_tokens == len(ids)


def test_seeds_repeat_whatever_shares_the_batch(demo_stack: str) -> None:
    request = GenerateRequest(
        text="Once upon a time",
        sampling=SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True),
    )
    (alone,) = generate_all(demo_stack, [request])
    others = [
        GenerateRequest(
            text="Once", sampling=SamplingParams(temperature=1.0, seed=s, max_tokens=30)
        )
        for s in range(8)
    ]
    assert generate_all(demo_stack, [*others, request])[-1] == alone
    unseeded = GenerateRequest(
        text="Once upon a time",
        sampling=SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True),
    )
    first, second = generate_all(demo_stack, [unseeded, unseeded])
    assert first != second


def test_a_repeated_prompt_comes_from_the_prefix_cache(demo_channel: grpc.Channel) -> None:
    stub = InferenceServiceStub(demo_channel)
    request = GenerateRequest(
        text="The quick brown fox meets another. " * 20, sampling=greedy(8, ignore_eos=True)
    )
    first = stub.Generate(request, timeout=TIMEOUT_S)
    second = stub.Generate(request, timeout=TIMEOUT_S)
    assert second.usage.cached_prompt_tokens > first.usage.cached_prompt_tokens
    assert second.completions[0].token_ids == first.completions[0].token_ids


def test_a_cache_salt_hides_what_others_asked(demo_channel: grpc.Channel) -> None:
    stub = InferenceServiceStub(demo_channel)

    def cached(salt: str) -> int:
        request = GenerateRequest(
            text="A secret that one tenant asks about. " * 20,
            sampling=greedy(4, ignore_eos=True),
            cache_salt=salt,
        )
        return stub.Generate(request, timeout=TIMEOUT_S).usage.cached_prompt_tokens

    assert cached("tenant a") == cached("tenant b") == cached("") == 0
    assert cached("tenant a") > 0


@pytest.mark.parametrize("priority", [-(2**31), 7, 2**31 - 1])
def test_any_priority_is_served(demo_channel: grpc.Channel, priority: int) -> None:
    request = GenerateRequest(text="Once", sampling=greedy(4), priority=priority)
    response = InferenceServiceStub(demo_channel).Generate(request, timeout=TIMEOUT_S)
    assert response.usage.completion_tokens == 4


@pytest.mark.parametrize("text", ["🦊🌍 日本語 naïve", "\u0000\ufffd ends with 👩‍👩‍👧", "a" * 500])
def test_any_text_is_a_prompt(demo_channel: grpc.Channel, text: str) -> None:
    stub = InferenceServiceStub(demo_channel)
    request = GenerateRequest(
        text=text, sampling=SamplingParams(temperature=2, seed=1, max_tokens=50, ignore_eos=True)
    )
    whole = stub.Generate(request, timeout=TIMEOUT_S).completions[0]
    chunks = list(stub.GenerateStream(request, timeout=TIMEOUT_S))
    assert "".join(c.text for c in chunks) == whole.text
    assert whole.finish_reason == FINISH_REASON_LENGTH


def test_cancelled_streams_are_not_computed_to_the_end(
    demo: RealStack, demo_channel: grpc.Channel
) -> None:
    stub = InferenceServiceStub(demo_channel)
    sampling = SamplingParams(max_tokens=1900, ignore_eos=True, temperature=1)
    before = demo.load()
    for _ in range(5):
        stream = stub.GenerateStream(GenerateRequest(text="Once", sampling=sampling))
        next(stream)
        stream.cancel()
    after = demo.wait_idle()
    assert after.sampled_tokens - before.sampled_tokens < 5 * 1900
    assert after.blocks_free + after.blocks_cached == after.blocks


def test_a_deadline_ends_a_request(demo_channel: grpc.Channel) -> None:
    stub = InferenceServiceStub(demo_channel)
    request = GenerateRequest(
        text="Once", sampling=SamplingParams(max_tokens=1900, ignore_eos=True)
    )
    with pytest.raises(grpc.RpcError) as raised:
        stub.Generate(request, timeout=0.2)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_model_is_described(demo_channel: grpc.Channel, oracle: TransformersModel) -> None:
    model = InferenceServiceStub(demo_channel).GetModel(GetModelRequest(), timeout=TIMEOUT_S)
    assert model.model == "demo"
    assert model.vocab_size == oracle.model.config.vocab_size
    assert list(model.eos_token_ids) == oracle.model.generation_config.eos_token_id
    assert model.capacity.num_blocks * model.capacity.block_size >= model.max_model_len
