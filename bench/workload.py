"""The reference workload: prompts and output lengths that are equal for every server."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TEMPERATURE = 0.6
STREAM_PROMPT, STREAM_TOKENS = 32, 128
LONG_PROMPT = 1024
REPEATS = 3
_ID_RANGE = 10_000
_ROOT = Path(__file__).parents[1]
DOCUMENTS = (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")), _ROOT / "CHANGELOG.md")


class BenchError(Exception):
    """The benchmark cannot be run as asked; the message says which flag to change."""


@dataclass(frozen=True)
class Shape:
    """The number of requests and the bounds of their lengths in tokens, both included."""

    num_seqs: int = 256
    min_input: int = 100
    max_input: int = 1024
    min_output: int = 100
    max_output: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class WorkloadRequest:
    prompt: list[int]
    output_len: int
    seed: int


def reference_workload(shape: Shape, vocab_size: int) -> list[WorkloadRequest]:
    """The requests of nano-vLLM's bench.py, from the same random calls in the same order. Seed 0
    gives nano-vLLM's lengths and, with a vocabulary over 10,000, its ids. Smaller vocabularies fold
    the ids, but keep the lengths."""
    rng = random.Random(shape.seed)
    prompts = [
        [
            rng.randint(0, _ID_RANGE) % vocab_size
            for _ in range(rng.randint(shape.min_input, shape.max_input))
        ]
        for _ in range(shape.num_seqs)
    ]
    return [
        WorkloadRequest(prompt, rng.randint(shape.min_output, shape.max_output), seed=index)
        for index, prompt in enumerate(prompts)
    ]


def text_workload(shape: Shape, text: Sequence[int]) -> list[WorkloadRequest]:
    """The reference workload's lengths, with pieces of a text's token ids as prompts."""
    return [
        replace(each, prompt=_piece(text, len(each.prompt), random.Random(f"piece {each.seed}")))
        for each in reference_workload(shape, 1)
    ]


def text_request(text: Sequence[int], prompt_len: int, output_len: int) -> WorkloadRequest:
    """A request with another piece of the text on every call, which no prefix cache holds."""
    return WorkloadRequest(_piece(text, prompt_len, random.Random()), output_len, seed=0)


def _piece(text: Sequence[int], size: int, rng: random.Random) -> list[int]:
    start = rng.randrange(len(text) - size + 1)
    return list(text[start : start + size])


def warm_up_request(shape: Shape, vocab_size: int) -> WorkloadRequest:
    """A request that shares no prefix with the requests of the workload."""
    rng = random.Random(f"warm-up {shape.seed}")
    prompt = [rng.randrange(vocab_size) for _ in range(shape.min_input)]
    return WorkloadRequest(prompt, min(shape.min_output, 16), seed=0)


def random_request(vocab_size: int, prompt_len: int, output_len: int) -> WorkloadRequest:
    """A request with a new prompt on every call, which no prefix cache holds. So it has no seed."""
    return WorkloadRequest(random.choices(range(vocab_size), k=prompt_len), output_len, seed=0)


def check_fits(requests: list[WorkloadRequest], max_model_len: int) -> None:
    """Raises BenchError if a request is too long for the model."""
    longest = max(len(request.prompt) + request.output_len for request in requests)
    if longest > max_model_len:
        raise BenchError(
            f"the longest request needs {longest} tokens for prompt and output; the server allows "
            f"{max_model_len}; lower --max-input or --max-output, or raise MAX_MODEL_LEN"
        )


def read_tokens(model: Path, files: Iterable[Path] = DOCUMENTS) -> list[int]:
    """The token ids of text files, by default this project's documents, one after the other, from
    the tokenizer of a model directory.

    Raises:
        OSError, UnicodeDecodeError: a file cannot be read.
    """
    from transformers import AutoTokenizer  # not in the environment of every server

    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    texts = [path.read_text(encoding="utf-8") for path in files]
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
