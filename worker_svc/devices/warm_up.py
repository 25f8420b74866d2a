"""Makes the steps that warm up a worker: as large as possible, and with all features."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from shared.graph_sizes import token_sizes
from shared.sampling_params import COLUMNS
from worker_svc.sampling.logprobs import PIECE
from worker_svc.step.arrays import DRAFTED, StepArrays, made_up_step
from worker_svc.step.features import FeatureArrays, PromptTargets

# A CPU warms up with a few tokens, because a full step of a large model takes minutes there.
CPU_TOKENS = 8
NUM_LOGPROBS = 20


def warm_up_steps(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    on_cpu: bool,
    max_model_len: int,
    block_size: int,
    num_tables: int,
    vocab_size: int,
) -> tuple[StepArrays, StepArrays]:
    """Makes a step of prompts and a step of decodes. All their tokens share one cache block."""
    longest = max_model_len
    if on_cpu:
        max_num_seqs, max_num_batched_tokens = 1, CPU_TOKENS
        longest = min(CPU_TOKENS, max_model_len)
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    shares = np.diff(np.linspace(0, max_num_batched_tokens, num_seqs + 1).astype(np.int32))
    lens = np.minimum(shares, longest)
    scored = _dummy_targets(min(int(lens[0]), PIECE), vocab_size)
    features = _dummy_features(num_seqs, vocab_size)
    prompts, decodes = (
        replace(step, temperatures=np.ones(num_seqs, np.float32), features=features)
        for step in (
            made_up_step(lens, lens, block_size, num_tables=num_tables),
            plain_decodes(num_seqs, longest, block_size, num_tables),
        )
    )
    return replace(prompts, prompt_targets=scored), decodes


def tokens_in_a_launch(launch: Callable[[StepArrays], Any], prompts: StepArrays) -> int:
    """How many prompt tokens the device computes while a step is launched kernel by kernel. A step
    of more tokens would gain nothing from a graph, and lose by its padding. torch keeps the memory
    of these steps until `Platform.measure_peak_bytes`, which therefore comes later."""
    plain = replace(prompts, features=None, prompt_targets=None)
    launch(plain).wait()  # allocates memory
    started = time.monotonic()
    pending = launch(plain)
    launch_s = time.monotonic() - started
    tokens = plain.num_tokens * launch_s / max(pending.wait().seconds, 1e-9)
    # The size of a graph, so that most starts find the same number.
    return max((each for each in token_sizes(plain.num_tokens) if each <= tokens), default=0)


def plain_decodes(
    num_seqs: int, max_model_len: int, block_size: int, num_tables: int = 1
) -> StepArrays:
    """Makes a step of decodes without features. All its tokens share one cache block."""
    ones = np.ones(num_seqs, np.int32)
    return made_up_step(ones, ones * max_model_len, block_size, num_tables=num_tables)


def half_drafted(step: StepArrays) -> StepArrays:
    """Has a draft model draft every second token of a step of decodes."""
    ids = step.input_ids.copy()
    ids[1::2] = DRAFTED
    return replace(step, input_ids=ids)


def _dummy_features(num_seqs: int, vocab_size: int) -> FeatureArrays:
    rows = np.arange(num_seqs, dtype=np.int32)
    zeros = np.zeros_like(rows)
    part = np.full(num_seqs, 0.5, np.float32)
    return FeatureArrays(
        rows=rows,
        numbers={name: zeros + 1 if each.whole else part for name, each in COLUMNS.items()},
        prompt_lens=zeros,
        num_logprobs=zeros + np.int32(min(NUM_LOGPROBS, vocab_size)),
        bias_offsets=np.arange(num_seqs + 1, dtype=np.int32),
        bias_ids=zeros,
        bias_values=part,
        masked=rows,
        masks=np.full((num_seqs, -(-vocab_size // 32)), 2**32 - 1, np.uint32),
    )


def _dummy_targets(num_targets: int, vocab_size: int) -> PromptTargets:
    return PromptTargets(
        rows=np.zeros(1, np.int32),
        num_logprobs=np.full(1, min(NUM_LOGPROBS, vocab_size), np.int32),
        offsets=np.array([0, num_targets], np.int32),
        targets=np.zeros(num_targets, np.int32),
    )
