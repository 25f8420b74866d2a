"""A model of another family, with a tokenizer in SentencePiece's manner, from a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from gguf import GGMLQuantizationType
from transformers import LlamaForCausalLM

from nano_vllm_grpc.pb.frontend_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    SamplingParams,
    StructuredOutput,
    TokenIds,
)
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.e2e.test_features import SCHEMA, TIMEOUT_S, run_all, tokens_of
from tests.e2e.transformers_model import token_prompts
from tests.gguf_files import SPM_TOKENS, write_gguf
from tests.stack import RealStack, running_stack
from tests.worker_svc.harness import save_model
from tests.worker_svc.test_model_runner import oracle_logits

VOCAB_SIZE = 301
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@dataclass(frozen=True)
class Served:
    stack: RealStack
    oracle: Any

    @property
    def stub(self) -> InferenceServiceStub:
        return InferenceServiceStub(grpc.insecure_channel(self.stack.address))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("llama")
    oracle = save_model(
        path / "original",
        family=LlamaForCausalLM,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        intermediate_size=96,
    )
    write_gguf(
        path / "small.gguf",
        oracle,
        GGMLQuantizationType.Q8_0,
        {"tokenizer.chat_template": TEMPLATE},
    )
    model = str(path / "small.gguf")
    # A cache so small that sequences are preempted, and prompts in chunks.
    small = {"kv_blocks": 24, "block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with running_stack(model=model, tp=3, dtype="float32", **small) as stack:
        yield Served(stack, oracle)


def spelled(token_ids: list[int]) -> str:
    """The text of tokens, without special ones and the first space."""
    words = [f"word{number}" for number in range(VOCAB_SIZE - len(SPM_TOKENS))]
    tokens = [[*SPM_TOKENS, *words][token] for token in token_ids]
    each = (
        bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.replace("▁", " ").encode()
        for token in tokens
        if token not in SPECIAL
    )
    return b"".join(each).decode(errors="replace").removeprefix(" ")


def test_tokens_and_texts(served: Served) -> None:
    prompts = token_prompts(VOCAB_SIZE, 12)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    requests = [GenerateRequest(token_ids=TokenIds(ids=p), sampling=sampling) for p in prompts]
    for prompt, answer in zip(prompts, run_all(served.stack.address, requests), strict=True):
        (tokens,) = tokens_of(answer)
        logits = oracle_logits(served.oracle, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == logits.argmax(1).tolist()
        assert answer.completions[0].text == spelled(tokens)


def test_a_stream_has_the_text_of_a_whole_answer(served: Served) -> None:
    sampling = SamplingParams(seed=1, max_tokens=100, ignore_eos=True)
    request = GenerateRequest(text="ab a", sampling=sampling)
    whole = served.stub.Generate(request, timeout=TIMEOUT_S).completions[0]
    parts = list(served.stub.GenerateStream(request, timeout=TIMEOUT_S))
    assert "".join(part.text for part in parts) == whole.text
    assert whole.text == spelled(list(whole.token_ids))


def test_prompts_are_encoded_like_the_original(served: Served) -> None:
    sampling = SamplingParams(max_tokens=1)
    text = GenerateRequest(text="ab é", sampling=sampling)
    # <s> ▁ab ▁ é
    assert served.stub.Generate(text, timeout=TIMEOUT_S).usage.prompt_tokens == 4
    chat = Chat(messages=[ChatMessage(role="user", content="ab")])
    answer = served.stub.Generate(GenerateRequest(chat=chat, sampling=sampling), timeout=TIMEOUT_S)
    assert answer.usage.prompt_tokens == len("▁[user]ab") - 1


@pytest.mark.parametrize("seed", range(4))
def test_structured_output_is_exact(served: Served, seed: int) -> None:
    for output, pattern in (
        (StructuredOutput(json_schema=json.dumps(SCHEMA)), None),
        (StructuredOutput(regex=" a[bé]{3,8}!"), " a[bé]{3,8}!"),
    ):
        sampling = SamplingParams(seed=seed, max_tokens=300, structured_output=output)
        request = GenerateRequest(text="ab", sampling=sampling)
        answer = served.stub.Generate(request, timeout=TIMEOUT_S).completions[0]
        if pattern:
            assert re.fullmatch(pattern, answer.text)
        else:
            assert json.loads(answer.text)["legs"] in range(1, 10)
