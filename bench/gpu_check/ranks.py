"""Tensor parallelism over NCCL: two ranks against one, through the whole stack."""

from __future__ import annotations

import torch

from bench.gpu_check.model import small_model, texts
from bench.gpu_check.parts import PartPlan
from bench.gpu_check.records import Report, SkipPart
from bench.gpu_check.setup import Setup
from frontend.client import LLM, SamplingParams

RANKS = 2
PROMPTS = 64
TOKENS = 8
KV_BLOCKS = 1024  # others use the GPU at the same time
# In half precision the sum over ranks rounds differently from one product, which tips the balance
# where two logits are as good as equal: of the first tokens hardly any, of later ones some more.
LEAST_EQUAL = 0.95


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    return [PartPlan(f"{RANKS} ranks", check_ranks, limit_s=100)]


def check_ranks(setup: Setup, report: Report) -> None:
    if setup.device.type == "cuda" and torch.cuda.device_count() < RANKS:
        raise SkipPart(f"there is {torch.cuda.device_count()} GPU")
    model = small_model(setup, "ranks")
    vocab_size = dict(setup.sizes.model)["vocab_size"]
    lengths = [1 + n * max(setup.sizes.texts) // PROMPTS for n in range(PROMPTS)]
    prompts = [text.tolist() for text in texts(setup, lengths, vocab_size)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    answers = []
    for ranks in (1, RANKS):
        with LLM(
            model=model,
            tp=ranks,
            device=setup.device.type,
            dtype=str(setup.dtype).removeprefix("torch."),
            max_model_len=max(lengths) + TOKENS,
            kv_blocks=KV_BLOCKS,
        ) as llm:
            answers.append([each["token_ids"] for each in llm.generate(prompts, params, False)])
    one, several = answers
    pairs = list(zip(one, several, strict=True))
    first = sum(a[0] == b[0] for a, b in pairs) / PROMPTS
    report.check("first tokens", 1 - first, 1 - LEAST_EQUAL, "share that differs")
    report.note(f"{sum(a == b for a, b in pairs)} of {PROMPTS} x {TOKENS} tokens are equal")
