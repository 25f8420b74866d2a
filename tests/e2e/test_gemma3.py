"""A published checkpoint whose layers have windows, Gemma 3 270M: texts in several scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from deploy.model import resolve_model
from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams
from tests.e2e.test_features import run_all
from tests.faults.streams import open_streams
from tests.gguf_files import read_gguf
from tests.others import gemma3
from tests.stack import RealStack, running_stack

# Prompts in chunks, and a crowd that does not fit.
SMALL = {"kv_blocks": 120, "block_size": 16, "max_num_batched_tokens": 96, "max_num_seqs": 24}
MAX_TOKENS = 32
WINDOW = 512
SHORT = (
    "The capital of France is",
    "Once upon a time there was a small dragon who",
    "def fibonacci(n):\n    ",
    "In the year 1969, the first",
    "Water boils at",
    "The three primary colours are",
    "Die Hauptstadt von Deutschland ist",
    "Il était une fois",
    "La lluvia en España",
    "Der schnellste Weg nach",
    "Столица России — это",
    "Однажды в студёную зимнюю пору",
    "Вода состоит из",
    "Самая длинная река",
    "中国的首都是",
    "从前有一座山",
    "人工智能的发展",
    "水的化学式是",
    "日本の首都は",
    "昔々あるところに",
    "भारत की राजधानी",
    "एक समय की बात है",
    "पानी का",
    "عاصمة فرنسا هي",
    "كان يا ما كان",
    "الماء يتكون من",
    "한국의 수도는",
)
# Longer than a window.
LONG = tuple(
    " ".join(f"{word} {number}." for number in range(count))
    for word, count in (("Chapter", 180), ("Глава", 200), ("第章", 170))
)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(str(gemma3()))


Check = Callable[[str, Sequence[int]], None]


@pytest.fixture(scope="module")
def check_tokens(model: Path) -> Check:
    """Checks that a text's tokens are the likeliest ones, each after those before it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=WINDOW,
    )
    oracle = Gemma3ForCausalLM(config).eval()
    read_gguf(gemma3(), oracle)

    @cache  # every stack gives the same tokens
    def likeliest(ids: tuple[int, ...]) -> list[int]:
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids]), logits_to_keep=MAX_TOKENS + 1).logits[0]
        tokens: list[int] = logits.argmax(1).tolist()
        return tokens

    def check(text: str, tokens: Sequence[int]) -> None:
        ids = tokenizer(text).input_ids
        assert (len(ids) > WINDOW) == (text in LONG)
        assert [*tokens] == likeliest((*ids, *tokens))[-len(tokens) - 1 : -1], text

    return check


@pytest.fixture(scope="module", params=[1, 2])
def stack(model: Path, request: pytest.FixtureRequest) -> Iterator[RealStack]:
    small = SMALL if request.param > 1 else {}
    with running_stack(model=model, tp=request.param, dtype="float32", **small) as running:
        yield running


def completion(text: str) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    return GenerateRequest(text=text, sampling=sampling)


def test_tokens_equal_transformers_though_a_worker_is_killed(
    stack: RealStack, check_tokens: Check
) -> None:
    requests = {text: completion(text) for text in (*SHORT, *LONG)}
    assert len(requests) == 30
    with open_streams(stack.address, requests) as streams:
        streams.wait_for_tokens(200)
        rank = stack.stack.num_ranks - 1
        pid = stack.kill("worker", rank)
        transcripts = streams.wait_ended()
    stack.wait_replaced("worker", rank, pid)
    for text in requests:
        check_tokens(text, transcripts[text].parts[0].token_ids)


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_answers_are_those_of_the_prefix_cache(
    stack: RealStack, check_tokens: Check, text: str
) -> None:
    """One prompt at a time: the cache of two ranks cannot hold two of them."""
    stack.wait_serving()
    for _ in range(2):
        (answer,) = run_all(stack.address, [completion(text)])
        check_tokens(text, answer.completions[0].token_ids)
    assert answer.usage.cached_prompt_tokens > WINDOW
