"""A published checkpoint, SmolLM2-135M-Instruct: chats, tools and texts in several scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from bench.speculation import read_prompts
from deploy.model import resolve_model
from nano_vllm_grpc.pb.frontend_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StructuredOutput,
)
from tests.e2e.test_features import SCHEMA, run_all
from tests.faults.streams import open_streams
from tests.gguf_files import read_gguf
from tests.others import smollm2
from tests.stack import RealStack, running_stack
from tests.worker_svc.test_model_runner import oracle_logits

# Prompts in chunks, a crowd that does not fit, and the ranks that its three key-value heads allow.
SMALL = {"kv_blocks": 96, "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 24}
MAX_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is 7 times 8?",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "List the days of the week.",
    "How many legs does a spider have?",
    "Give me a recipe for pancakes.",
    "What is the opposite of cold?",
    "Tell me a joke about a computer.",
    "What is photosynthesis?",
    "Which planet is the largest?",
    "Complete the sentence: The quick brown fox",
    "What is the boiling point of water?",
    "Write a line of Python that prints hello.",
    "What do bees make?",
    "Summarize: The cat sat on the mat and slept all day.",
    "How do you say thank you in German?",
    "用中文介绍一下你自己。",
    "ما هي عاصمة مصر؟",
    "Столица России — это какой город?",
    "भारत की राजधानी क्या है?",
    "What do these mean: 👍🏽 🎉 👩‍👩‍👧‍👦?",
)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(str(smollm2()))


Check = Callable[[str, GenerateRequest, Sequence[int]], None]


@pytest.fixture(scope="module")
def check_tokens(model: Path) -> Check:
    """Checks that a prompt's tokens are the likeliest ones, each after those before it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    transformer = LlamaForCausalLM(AutoConfig.from_pretrained(model)).float().eval()
    read_gguf(smollm2(), transformer)

    @cache  # every stack gives the same tokens
    def likeliest(ids: tuple[int, ...]) -> list[int]:
        tokens: list[int] = oracle_logits(transformer, [*ids]).argmax(1).tolist()
        return tokens

    def check(prompt: str, request: GenerateRequest, tokens: Sequence[int]) -> None:
        text = prompt
        if request.HasField("chat"):
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert [*tokens] == likeliest((*ids, *tokens))[len(ids) - 1 : -1], prompt

    return check


@pytest.fixture(scope="module", params=[1, 3])
def stack(model: Path, request: pytest.FixtureRequest) -> Iterator[RealStack]:
    small = SMALL if request.param > 1 else {}
    with running_stack(model=model, tp=request.param, dtype="float32", **small) as running:
        yield running


def chat(text: str, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": MAX_TOKENS, **fields})
    messages = [ChatMessage(role="user", content=text)]
    return GenerateRequest(chat=Chat(messages=messages), sampling=sampling)


def texts() -> list[str]:
    """Beginnings of the prompts of a benchmark, which are continued as texts."""
    prompts = [each["prompt"] for group in read_prompts().values() for each in group]
    return [prompt[:400] for prompt in prompts][:25]


def all_requests() -> dict[str, GenerateRequest]:
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    requests = {question: chat(question) for question in QUESTIONS}
    return requests | {text: GenerateRequest(text=text, sampling=sampling) for text in texts()}


def test_tokens_equal_transformers_though_a_worker_is_killed(
    stack: RealStack, check_tokens: Check
) -> None:
    requests = all_requests()
    assert len(requests) == 50
    with open_streams(stack.address, requests) as streams:
        streams.wait_for_tokens(200)
        rank = stack.stack.num_ranks - 1
        pid = stack.kill("worker", rank)
        transcripts = streams.wait_ended()
    stack.wait_replaced("worker", rank, pid)
    for prompt, request in requests.items():
        check_tokens(prompt, request, transcripts[prompt].parts[0].token_ids)


def test_answers_are_those_of_the_prefix_cache(stack: RealStack, check_tokens: Check) -> None:
    stack.wait_serving()
    requests = [chat(question) for question in QUESTIONS[:8]]
    for _ in range(2):
        answers = run_all(stack.address, requests)
    assert any(answer.usage.cached_prompt_tokens for answer in answers)
    for question, request, answer in zip(QUESTIONS, requests, answers, strict=False):
        check_tokens(question, request, answer.completions[0].token_ids)
    assert "Paris" in answers[0].completions[0].text


def test_objects_by_schema(stack: RealStack) -> None:
    stack.wait_serving()
    output = StructuredOutput(json_schema=json.dumps(SCHEMA))
    requests = [
        chat("Describe a hen as JSON.", structured_output=output, max_tokens=200, temperature=t)
        for t in (0, 1)
    ]
    answers: list[GenerateResponse] = run_all(stack.address, requests)
    for answer in answers:
        assert json.loads(answer.completions[0].text)["legs"] in range(1, 10)
