"""Sampling for the rows of a step that ask for more than a temperature."""

from __future__ import annotations

import torch

from worker_svc.distributed import TensorParallel
from worker_svc.kernels.ops import Ops
from worker_svc.kv_cache import TokenCache
from worker_svc.layers.embedding import VocabPartition
from worker_svc.sampling.feature_tensors import FeatureTensors
from worker_svc.sampling.filters import keep_likely
from worker_svc.sampling.sampler import Sampler
from worker_svc.step.tensors import StepTensors


class FeatureSampler:
    """Samples again what features change, with the random numbers that the rows have anyway: a row
    whose features change nothing would get the same token."""

    def __init__(self, vocab: VocabPartition, tp: TensorParallel, ops: Ops) -> None:
        self._vocab = vocab
        self._tp = tp
        self._ops = ops
        self._sampler = Sampler(vocab, tp, ops)

    def __call__(
        self,
        logits: torch.Tensor,
        features: FeatureTensors,
        step: StepTensors,
        history: TokenCache,
    ) -> torch.Tensor:
        """This rank's logits [S, shard_size] of the step, which stay as they are -> token ids [F]
        int32, equal on all ranks."""
        rows = features.rows
        chosen = logits.index_select(0, rows).float()
        temperatures = step.temperatures.index_select(0, rows)
        self.process(chosen, temperatures, features, step, history)
        return self._sampler(chosen, temperatures, step.uniforms.index_select(0, rows))

    def process(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        features: FeatureTensors,
        step: StepTensors,
        history: TokenCache,
    ) -> None:
        """Changes logits [F, shard_size] float32 of the rows of `features` in place, in the order
        that `SamplingFeatures` gives; what may not be sampled becomes -inf. Temperatures [F], of
        which only the filters take notice."""
        start, count = self._vocab.start, self._vocab.num_tokens
        if len(features.bias_rows):
            places = features.bias_rows.long(), features.bias_columns.long()
            logits.index_put_(places, features.bias_values, accumulate=True)
        if features.penalizes:
            self._ops.penalize(
                logits,
                start,
                count,
                history.slots,
                history.block_size,
                step.block_table,
                step.table_offsets,
                features.rows,
                step.context_lens,
                features.prompt_lens,
                features.repetition,
                features.presence,
                features.frequency,
            )
        if len(features.masked):
            self._ops.apply_masks(logits, start, count, features.masked, features.masks)
        keep_likely(
            logits,
            self._vocab,
            temperatures,
            features.filters,
            self._tp,
            self._ops,
        )
