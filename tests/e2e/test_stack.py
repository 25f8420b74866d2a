"""The whole system through its public API, against transformers."""

from __future__ import annotations

from typing import Any

import grpc

from nano_vllm_grpc.pb.frontend_pb2 import (
    FINISH_REASON_EOS,
    Chat,
    ChatMessage,
    GenerateRequest,
    GetModelRequest,
    SamplingParams,
    TokenIds,
)
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.e2e.test_features import TIMEOUT_S, run_all, tokens_of
from tests.e2e.transformers_model import TransformersModel, token_prompts


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def test_concurrent_greedy_completions_equal_transformers(
    demo_stack: str, oracle: TransformersModel
) -> None:
    prompts = token_prompts(len(oracle.tokenizer), 20)
    expected = [[oracle.greedy(p, 64, ignore_eos=True)] for p in prompts]
    sampling = greedy(64, ignore_eos=True)
    requests = [GenerateRequest(token_ids=TokenIds(ids=p), sampling=sampling) for p in prompts]
    assert [tokens_of(answer) for answer in run_all(demo_stack, requests)] == expected


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


def test_a_repeated_prompt_comes_from_the_prefix_cache(demo_channel: grpc.Channel) -> None:
    stub = InferenceServiceStub(demo_channel)
    request = GenerateRequest(
        text="The quick brown fox meets another. " * 20, sampling=greedy(8, ignore_eos=True)
    )
    first = stub.Generate(request, timeout=TIMEOUT_S)
    second = stub.Generate(request, timeout=TIMEOUT_S)
    assert second.usage.cached_prompt_tokens > first.usage.cached_prompt_tokens
    assert second.completions[0].token_ids == first.completions[0].token_ids


def test_the_model_is_described(demo_channel: grpc.Channel, oracle: TransformersModel) -> None:
    model = InferenceServiceStub(demo_channel).GetModel(GetModelRequest(), timeout=TIMEOUT_S)
    assert model.model == "demo"
    assert model.vocab_size == oracle.model.config.vocab_size
    assert list(model.eos_token_ids) == oracle.model.generation_config.eos_token_id
    assert model.capacity.num_blocks * model.capacity.block_size >= model.max_model_len
