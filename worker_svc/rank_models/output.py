"""Makes tokens, log-probabilities and embeddings of a model's last hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shared.graph_sizes import NUM_PROMPTS
from worker_svc.devices.base import Platform
from worker_svc.kv_cache import TokenCache
from worker_svc.layers.embedding import VocabParallelHead, VocabPartition
from worker_svc.layers.pooling import pool, score
from worker_svc.models.config import ModelConfig
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.features import FeatureRunner, Upload
from worker_svc.sampling.logprobs import Logprobs
from worker_svc.sampling.sampler import Sampler
from worker_svc.settings import WorkerSettings
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors


class Found(NamedTuple):
    """The results of a step besides tokens: log-probabilities, and the hidden states and scores of
    pooled rows."""

    logprobs: list[Logprobs]
    pooled: list[torch.Tensor]


class Output:
    """The output of a model on one rank of its last stage. Tokens go to last_tokens
    [>= max_num_seqs] int32."""

    def __init__(
        self,
        settings: WorkerSettings,
        platform: Platform,
        tp: TensorParallel,
        config: ModelConfig,
        head: VocabParallelHead,
        last_tokens: torch.Tensor,
        upload: Upload,
    ) -> None:
        self._vocab = vocab = VocabPartition(config.vocab_size, tp.rank, tp.size)
        self._ops, self._tp, self._head = platform.ops, tp, head
        self._last_tokens = last_tokens
        self._sampler = Sampler(vocab, tp, platform.ops)
        self._features = FeatureRunner(vocab, tp, platform.ops, head, upload)
        self._logits: torch.Tensor | None = None
        if platform.captures:  # all graphs share one buffer
            shape = settings.max_num_seqs + NUM_PROMPTS, vocab.shard_size
            self._logits = last_tokens.new_empty(shape, dtype=config.dtype)

    def sample(self, hidden: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        """Samples a token per row of hidden states [S, hidden] -> this rank's logits
        [S, shard_size]."""
        logits = self._head(hidden, self._logits)
        tokens = self._sampler(logits, tensors.temperatures, tensors.uniforms)
        last_tokens = self._last_tokens
        if len(tensors.places):
            self._ops.store_tokens(last_tokens, tensors.places, tokens, last_tokens)
        else:
            last_tokens[: len(tokens)] = tokens
        return logits

    def find(
        self, step: StepArrays, tensors: StepTensors, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, Found]:
        """Does what `sample` does, and what else is found from hidden states. They are of every
        token [T, hidden] if `step.reads_every_token`."""
        targets, pooling = step.prompt_targets, step.pooling
        last = hidden[tensors.query_starts[1:] - 1] if step.reads_every_token else hidden
        logprobs = self._features.score(targets, step, hidden) if targets else []
        logits = self.sample(last, tensors)
        pooled: list[torch.Tensor] = []
        if pooling:
            scores = score(pooling, last, self._head, self._vocab, self._tp, self._ops)
            pooled = [torch.cat((pool(pooling, last, hidden, step.query_lens), scores))]
        return logits, Found(logprobs, pooled)

    def resample(
        self, step: StepArrays, tensors: StepTensors, logits: torch.Tensor, history: TokenCache
    ) -> list[Logprobs]:
        """Samples again the rows of a step whose features change logits -> the log-probabilities of
        sampled tokens."""
        if step.features is None:
            return []
        return self._features.sample(
            step.features, step, tensors, logits, self._last_tokens, history
        )
