"""Small models and workloads for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.steps import QWEN_0_6B, Heads
from tests.worker_svc.device import by_device
from tests.worker_svc.harness import Asked, Batch, batch_for, worker_settings
from tests.worker_svc.platforms import GpuPlatform
from tests.worker_svc.test_model_runner import prompts
from worker_svc.model_runner import ModelRunner
from worker_svc.step_result import StepResult

VOCAB = 150
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
}
# On a GPU, with matrices as large as a real model's.
LARGER: dict[str, Any] = by_device(
    cpu=SMALL,
    gpu={
        "vocab_size": 32_003,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 1100,
        "std": 0.02,
    },
)
LARGER_HEADS = by_device(cpu=Heads(2, 1, 16), gpu=QWEN_0_6B)
LARGER_DTYPE = by_device(cpu=torch.float32, gpu=torch.bfloat16)
NUM_BLOCKS = 24
MAX_NUM_SEQS = 4  # graphs of 1, 2 and 4


def make_runner(
    path: Path,
    platform: type[GpuPlatform] = GpuPlatform,
    *,
    captures: bool = True,
    num_blocks: int = NUM_BLOCKS,
    **overrides: Any,
) -> tuple[ModelRunner, Batch]:
    values = {
        "attention": "triton",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 16,
        "enforce_eager": not captures,
        "kv_blocks": 2,  # others use the GPU's memory at the same time
    }
    settings = worker_settings(path, **{**values, **overrides})
    runner = ModelRunner(settings, platform(settings))
    runner.configure(1, num_blocks)
    assert bool(runner._model.graphs) == captures
    return runner, batch_for(runner, num_blocks)


def decode(runner: ModelRunner, batch: Batch) -> list[list[int]]:
    """Runs `_run` without features -> the tokens."""
    return [result.token_ids.tolist() for result in _run(runner, batch, features=False)]


def decode_with_features(runner: ModelRunner, batch: Batch) -> list[StepResult]:
    """Runs `_run` with prompts that are scored, and with rows that have features."""
    return _run(runner, batch, features=True)


def _run(runner: ModelRunner, batch: Batch, *, features: bool) -> list[StepResult]:
    """Runs prompts, then decodes of sequences that come and go, fed with what the previous step
    sampled, the last of them in a copied block. Launches them all before it waits for any."""
    vocab = batch.limits.vocab_size
    texts = prompts(vocab, [3, 18, 1])
    first = Asked(
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        top_k=30,
        top_p=0.9,
        min_p=0.01,
        prompt_len=3,
        logprobs=0,
    )
    second = Asked(bias={7: 3.0, 8: -np.inf}, allowed=range(0, vocab, 2), logprobs=3)
    steps: list[tuple[list[int], list[list[int]], dict[int, Asked]]] = [
        ([0, 1, 2], texts, {0: first, 1: second}),
        ([0, 1, 2], [[-1], [-2], [-3]], {0: first, 1: second}),
        ([2, 0], [[-3], [-1]], {1: first}),
        ([0], [[-2]], {0: first}),
        ([3, 1], [[-1], [7]], {0: first}),  # one that was away, with a known token
    ]
    temperatures = [0.9] * 4 if features else [0.0, 0.9, 1.3, 0.0]
    pending = []
    for index, (seqs, ids, asked) in enumerate(steps):
        copies = []
        if index == 4:
            copies = [(batch.tables[0][0], batch.free.pop())]
            batch.tables[3], batch.contexts[3] = [copies[0][1]], batch.contexts[0]
        step = batch.step(
            list(zip(seqs, ids, strict=True)),
            temperatures=[temperatures[seq] for seq in seqs],
            seeds=[5 + seq for seq in seqs],
            copies=copies,
            features=asked if features else None,
            targets={1: texts[1][1:]} if features and index == 0 else None,
            num_prompt_logprobs=2,
        )
        pending.append(runner.launch(step))
    return [step.wait() for step in pending]
