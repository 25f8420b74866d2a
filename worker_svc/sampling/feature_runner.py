"""What only some rows of a step ask for, after the step itself."""

from __future__ import annotations

import numpy as np
import torch

from worker_svc.distributed import TensorParallel
from worker_svc.kernels.ops import Ops
from worker_svc.kv_cache import TokenCache
from worker_svc.layers.embedding import VocabParallelHead, VocabPartition
from worker_svc.sampling.feature_sampler import FeatureSampler
from worker_svc.sampling.feature_tensors import Upload, feature_tensors
from worker_svc.sampling.logprobs import Logprobs, LogprobScorer
from worker_svc.step.decode import Step
from worker_svc.step.features import Features, PromptTargets
from worker_svc.step.tensors import StepTensors


class FeatureRunner:
    """Waits for the device nowhere."""

    def __init__(
        self,
        vocab: VocabPartition,
        tp: TensorParallel,
        ops: Ops,
        head: VocabParallelHead,
        upload: Upload,
    ) -> None:
        self._vocab = vocab
        self._head = head
        self._upload = upload
        self._sampler = FeatureSampler(vocab, tp, ops)
        self._scorer = LogprobScorer(vocab, tp, ops)

    def sample(
        self,
        features: Features,
        step: Step,
        tensors: StepTensors,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        history: TokenCache,
    ) -> list[Logprobs]:
        """Samples again in tokens [at least S] int32 where features change logits
        [at least S, shard_size], which stay as they are; scores what was sampled."""
        chosen = feature_tensors(features, step.temperatures, self._vocab, self._upload)
        if len(chosen.rows):
            sampled = self._sampler(logits, chosen, tensors, history)
            tokens.index_copy_(0, chosen.rows.long(), sampled)
        rows = chosen.scored_rows
        if not len(rows):
            return []
        counts = features.num_logprobs[features.num_logprobs >= 0]

        def logits_of(piece: slice) -> torch.Tensor:
            return logits.index_select(0, rows[piece])

        return [self._scorer(logits_of, tokens.index_select(0, rows), counts)]

    def score(self, targets: PromptTargets, step: Step, hidden: torch.Tensor) -> list[Logprobs]:
        """hidden [T, hidden] of all tokens."""
        if not len(targets.targets):
            return []
        tokens, rows = self._upload([targets.targets, targets.token_indices(step.query_lens)])
        counts = np.repeat(targets.num_logprobs, np.diff(targets.offsets))

        def logits_of(piece: slice) -> torch.Tensor:
            return self._head(hidden.index_select(0, rows[piece]))

        return [self._scorer(logits_of, tokens, counts)]
