"""The same model in transformers, as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# The stack under test has the other cores; spinning for one more slows both.
torch.set_num_threads(1)


class TransformersModel:
    """Runs the model in transformers, in float32."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def generate(self, prompt_ids: list[int], max_tokens: int, **options: Any) -> list[list[int]]:
        output = self.model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            temperature=None,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **options,
        )
        ids: list[list[int]] = output[:, len(prompt_ids) :].tolist()
        return ids

    def greedy(self, prompt_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> list[int]:
        ends = None if ignore_eos else self.model.generation_config.eos_token_id
        return self.generate(prompt_ids, max_tokens, eos_token_id=ends)[0]

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary]; row i is for the token that follows token i."""
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def token_prompts(vocab_size: int, count: int) -> list[list[int]]:
    """Prompts from one token to several chunks long, no two alike, some sharing a prefix."""
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for number in range(count):
        length = 1 + number * number % 211
        prompts.append(torch.randint(3, vocab_size, (length,), generator=generator).tolist())
    for number in range(1, count, 3):
        prompts[number] = prompts[count - 1][:40] + prompts[number]
    return prompts
