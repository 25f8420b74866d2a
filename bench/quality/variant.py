"""A model in one format of weights and cache, run in this process by the server's scheduler and
worker code, without gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.gpu.steps import Sequences, blocks_needed
from bench.in_process import RunnerEngine
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Sequence
from shared.config import load_settings
from worker_svc.model_runner import ModelRunner
from worker_svc.settings import WorkerSettings
from worker_svc.step.decode import Step, StepLimits
from worker_svc.step.features import PromptTargets

MAX_NUM_SEQS = 64
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Variant:
    """Settings of a worker."""

    dtype: str
    quantization: str
    kv_dtype: str


class Loaded:
    """A variant that is ready to answer.

    Raises:
        StartError: the model or its settings cannot be served.
    """

    def __init__(self, model: Path, variant: Variant) -> None:
        flags = {
            "--model": model,
            "--dtype": variant.dtype,
            "--quantization": variant.quantization,
            "--kv-dtype": variant.kv_dtype,
            "--max-num-seqs": MAX_NUM_SEQS,
        }
        args = [str(part) for pair in flags.items() for part in pair]
        self._runner = ModelRunner(load_settings(WorkerSettings, args))
        info = self._runner.info
        blocks = MAX_NUM_SEQS * -(-info.max_model_len // info.block_size)
        self._limits = StepLimits(
            vocab_size=info.vocab_size,
            num_blocks=blocks,
            block_size=info.block_size,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
        )
        self._runner.configure(1, blocks)

    def answers(self, prompts: Seq[list[int]], end: frozenset[int]) -> list[list[int]]:
        """The greedy completions, each up to one of the tokens `end`."""
        params = SamplingParams(MAX_NEW_TOKENS, temperature=0.0, eos_token_ids=end)
        sequences = [Sequence((0, i), prompt, params) for i, prompt in enumerate(prompts)]
        asyncio.run(self._complete(sequences))
        return [list(each.tokens[each.num_prompt_tokens :]) for each in sequences]

    async def _complete(self, sequences: list[Sequence]) -> None:
        await RunnerEngine(self._runner, self._limits, len(sequences)).complete(sequences)

    def log_probabilities(self, text: list[int]) -> NDArray[np.float64]:
        """Log-probabilities of every token after each of the N tokens of `text`, which fits into
        one step: [N, vocab]."""
        result = self._runner.launch(self._scored_step(text)).wait()
        columns = 1 + self._limits.vocab_size  # the target comes first
        ids = result.logprob_ids.reshape(-1, columns)[:, 1:].astype(np.int64)
        values = result.logprob_values.reshape(-1, columns)[:, 1:]
        found = np.empty(ids.shape)
        np.put_along_axis(found, ids, values, axis=1)
        return found

    def _scored_step(self, text: list[int]) -> Step:
        size = self._limits.block_size
        sequences = Sequences(size, range(blocks_needed([len(text)], size)), seed=0)
        targets = PromptTargets(
            rows=np.zeros(1, np.int32),
            num_logprobs=np.array([self._limits.vocab_size], np.int32),
            offsets=np.array([0, len(text)], np.int32),
            targets=np.zeros(len(text), np.int32),
        )
        return replace(sequences.step({0: np.array(text, np.int32)}), prompt_targets=targets)
