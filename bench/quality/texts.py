"""The questions and texts that all variants receive, as token ids."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tools.demo.corpus import held_out_pairs, training_pairs, write_corpus
from tools.demo.objects import sum_answer
from tools.demo.tokenizer import END_OF_TEXT, IM_END
from tools.evaluate_demo_model import Chat, earlier_chat, sum_prompts

CHAT_TOKENS = 1000
MAX_TEXT_TOKENS = 1024  # the length of rows in training
# The training text has seeds 0 and 1.
CORPUS_SEED = 1_000_000


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    answer: str


class Texts:
    """Writes questions and texts with the tokenizer of the model in a directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        self._seed = seed
        names = [END_OF_TEXT, IM_END]
        self.end_ids = frozenset(self._tokenizer.convert_tokens_to_ids(names))

    def sums(self, count: int) -> list[Question]:
        """Sums of different pairs of numbers below one hundred, each in one of 13 phrasings. The
        816 pairs that training held out come first."""
        rng = random.Random(self._seed)
        pairs = _pairs(count, rng)
        return self._questions(pairs, sum_prompts(pairs, rng))

    def sums_after_chats(self, count: int) -> list[Question]:
        """The questions of `sums`, each after another chat of about `CHAT_TOKENS` tokens."""
        rng = random.Random(self._seed)
        pairs = _pairs(count, rng)
        prompts = [
            earlier_chat(self._tokenizer, CHAT_TOKENS, rng) + sum_prompt
            for sum_prompt in sum_prompts(pairs, rng)
        ]
        return self._questions(pairs, prompts)

    def held_out(self, count: int) -> list[list[int]]:
        """New stories, facts, sums and chats of them, from the generator of the training text."""
        documents = write_corpus(count, CORPUS_SEED + self._seed)
        return [self._tokenizer.encode(each.text)[:MAX_TEXT_TOKENS] for each in documents]

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _questions(self, pairs: list[tuple[int, int]], prompts: list[Chat]) -> list[Question]:
        encoded = self._tokenizer.apply_chat_template(prompts, add_generation_prompt=True)
        answers = [sum_answer(*pair) for pair in pairs]
        return [Question(*each) for each in zip(encoded["input_ids"], answers, strict=True)]


def _pairs(count: int, rng: random.Random) -> list[tuple[int, int]]:
    held_out, others = sorted(held_out_pairs()), training_pairs()
    rng.shuffle(held_out)
    rng.shuffle(others)
    return (held_out + others)[:count]
