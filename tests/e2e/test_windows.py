"""A cache that has room for sequences only if blocks out of windows are freed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, MistralForCausalLM

from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams, TokenIds
from tests.e2e.test_features import run_all
from tests.faults.streams import open_streams
from tests.stack import DEMO_MODEL, RealStack, running_stack
from tests.worker_svc.families import GEMMA3
from tests.worker_svc.harness import save_model
from tests.worker_svc.test_model_runner import oracle_logits

VOCAB_SIZE = 1536  # of the demo model's tokenizer
MAX_TOKENS = 40
LENGTHS = (430, 120, 300, 17, 390, 260)
# Of the sequences of six prompts, a cache without windows has room for two at most.
SMALL = {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8, "dtype": "float32"}
# A block has 16 tokens of two layers with windows, or 32 tokens of the other layer.
GEMMA = {"family": Gemma3ForCausalLM, **GEMMA3}
MISTRAL = {"family": MistralForCausalLM, "sliding_window": 24}


@dataclass(frozen=True)
class Served:
    stack: RealStack
    oracle: Any

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        """Each token is the likeliest one after those before it."""
        logits = oracle_logits(self.oracle, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == logits.argmax(1).tolist()


@pytest.fixture(scope="module", params=[(GEMMA, 26, 1), (GEMMA, 26, 2), (MISTRAL, 34, 1)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    shape, kv_blocks, tp = request.param
    path = tmp_path_factory.mktemp("model")
    oracle = save_model(path, vocab_size=VOCAB_SIZE, **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, path)
    with running_stack(model=path, kv_blocks=kv_blocks, tp=tp, **SMALL) as stack:
        yield Served(stack, oracle)


def request_of(prompt: list[int], **sampling: Any) -> GenerateRequest:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **sampling)
    return GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=params)


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def test_tokens_are_exact_though_processes_are_killed(served: Served) -> None:
    stack, texts = served.stack, dict(enumerate(prompts(seed=0)))
    requests = {key: request_of(prompt) for key, prompt in texts.items()}
    with stack.hold, open_streams(stack.address, requests) as streams:
        for service in ("worker", "scheduler"):
            before = streams.num_tokens
            stack.hold.after(8)
            streams.wait_for_tokens(before + 5)
            pid = stack.kill(service)
            stack.wait_replaced(service, 0, pid)
        stack.hold.release()
        transcripts = streams.wait_ended()
    for key, prompt in texts.items():
        served.check(prompt, [*transcripts[key].parts[0].token_ids])


def test_a_conversation_finds_its_last_window(served: Served) -> None:
    served.stack.wait_serving()
    prompt = prompts(seed=1)[0][:200]
    for turn in range(4):
        (answer,) = run_all(served.stack.address, [request_of(prompt)])
        tokens = [*answer.completions[0].token_ids]
        served.check(prompt, tokens)
        assert turn == 0 or answer.usage.cached_prompt_tokens > len(prompt) - MAX_TOKENS - 32
        prompt = [*prompt, *tokens, 5, 6, 7]


def test_completions_of_a_prompt_share_it(served: Served) -> None:
    prompt = prompts(seed=2)[2]
    (answer,) = run_all(served.stack.address, [request_of(prompt, n=3)])
    for completion in answer.completions:
        served.check(prompt, [*completion.token_ids])


def test_penalties_count_tokens_out_of_the_window(served: Served) -> None:
    prompt = prompts(seed=3)[2]
    (answer,) = run_all(served.stack.address, [request_of(prompt, repetition_penalty=1.5)])
    tokens = [*answer.completions[0].token_ids]
    logits = oracle_logits(served.oracle, prompt + tokens)[len(prompt) - 1 : -1].clone()
    for place, row in enumerate(logits):
        seen = [*{*prompt, *tokens[:place]}]
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.5, row[seen] * 1.5)
    assert tokens == logits.argmax(1).tolist()
