"""Samples the rows of a step that have more sampling parameters than a temperature.

Uploads the parameters to the device, changes the rows' logits, and computes log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.sampling_params import FILTERS
from worker_svc.kernels.ops import Ops
from worker_svc.kv_cache import TokenCache
from worker_svc.layers.embedding import VocabParallelHead, VocabPartition
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.filters import Limit, keep_likely
from worker_svc.sampling.logprobs import Logprobs, LogprobScorer
from worker_svc.sampling.sampler import Sampler
from worker_svc.step.arrays import StepArrays
from worker_svc.step.features import FeatureArrays, PromptTargets
from worker_svc.step.tensors import StepTensors
from worker_svc.step.wire import Float32s

Upload = Callable[[Sequence[NDArray[Any]]], list[torch.Tensor]]


@dataclass(frozen=True)
class FeatureTensors:
    """The features of F rows whose logits change before a token is sampled, and of L rows that
    request log-probabilities. Tensors are int32 unless noted."""

    rows: torch.Tensor  # [F] rows of the step; if there are none, no logits change
    penalizes: bool
    filters: Mapping[str, Limit]  # the filters that some row has, with rows of F
    prompt_lens: torch.Tensor  # [F]; like the next three, empty unless `penalizes`
    repetition: torch.Tensor  # [F] float32
    presence: torch.Tensor  # [F] float32
    frequency: torch.Tensor  # [F] float32
    bias_rows: torch.Tensor  # [B] of F
    bias_columns: torch.Tensor  # [B] of this rank's logits
    bias_values: torch.Tensor  # [B] float32
    masked: torch.Tensor  # [M] of F
    masks: torch.Tensor  # [M, ceil(vocab / 32)], bit patterns
    scored_rows: torch.Tensor  # [L] of the step


class FeatureRunner:
    """Samples and scores the rows of a step that have features, after the step itself. It never
    waits for the device."""

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
        features: FeatureArrays,
        step: StepArrays,
        tensors: StepTensors,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        history: TokenCache,
    ) -> list[Logprobs]:
        """Resamples tokens [>= S] int32 in place for the rows whose features change logits -> the
        log-probabilities of the sampled tokens. logits [>= S, shard_size] are not modified."""
        chosen = feature_tensors(features, step.temperatures, self._vocab, self._upload)
        if len(chosen.rows):
            sampled = self._sampler(logits, chosen, tensors, history)
            tokens.index_copy_(0, chosen.rows.long(), sampled)
        rows = chosen.scored_rows
        if not len(rows):
            return []
        counts = features.num_logprobs[features.num_logprobs >= 0]
        scored = tokens.index_select(0, rows)
        return [self._scorer(lambda piece: logits.index_select(0, rows[piece]), scored, counts)]

    def score(
        self, targets: PromptTargets, step: StepArrays, hidden: torch.Tensor
    ) -> list[Logprobs]:
        """Computes log-probabilities of targets from all tokens' hidden states [T, hidden]."""
        if not len(targets.targets):
            return []
        tokens, rows = self._upload([targets.targets, targets.token_indices(step.query_lens)])
        counts = np.repeat(targets.num_logprobs, np.diff(targets.offsets))

        def logits_of(piece: slice) -> torch.Tensor:
            return self._head(hidden.index_select(0, rows[piece]))

        return [self._scorer(logits_of, tokens, counts)]


class FeatureSampler:
    """Resamples the rows whose features change logits. It uses the random numbers of the first
    draw, so a row whose logits did not change would get the token that it already has."""

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
        """This rank's logits [S, shard_size] of the step, which are not modified -> token ids [F]
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
        that `SamplingFeatures` documents. Tokens that may not be sampled get -inf. Only the filters
        use temperatures [F]."""
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


def feature_tensors(
    features: FeatureArrays, temperatures: Float32s, vocab: VocabPartition, upload: Upload
) -> FeatureTensors:
    """Uploads features to the device, all columns in one buffer.

    Args:
        temperatures: those of the step's rows, [S].
    """
    drawn = temperatures[features.rows] > 0
    biased = np.diff(features.bias_offsets) > 0
    changed = features.penalized | biased | (features.filtered & drawn)
    changed[features.masked] = True
    kept = np.flatnonzero(changed)  # the F rows that the device gets
    penalized = kept if features.penalized.any() else kept[:0]

    limits: dict[str, list[NDArray[Any]]] = {}  # row numbers of F, and their values
    for name in FILTERS:
        chosen = np.flatnonzero(features.active(name) & drawn)
        if len(chosen):
            limits[name] = [_places(kept, chosen), features.numbers[name][chosen]]
    arrays = [
        features.rows[kept],
        features.prompt_lens[penalized],
        features.numbers["repetition_penalty"][penalized],
        features.numbers["presence_penalty"][penalized],
        features.numbers["frequency_penalty"][penalized],
        *_local_bias(features, kept, vocab),
        _places(kept, features.masked),
        features.masks,
        features.rows[features.num_logprobs >= 0],
    ]
    uploaded = iter(upload([*arrays, *chain.from_iterable(limits.values())]))
    rows, *others = islice(uploaded, len(arrays))
    filters = {name: Limit(next(uploaded), next(uploaded)) for name in limits}
    tensors = FeatureTensors(rows, len(penalized) > 0, filters, *others)
    return replace(tensors, masks=tensors.masks.view(features.masks.shape))


def _local_bias(
    features: FeatureArrays, kept: NDArray[np.intp], vocab: VocabPartition
) -> list[NDArray[Any]]:
    """This rank's part of the bias, as row numbers of F, columns and values."""
    rows = np.repeat(np.arange(len(features.rows)), np.diff(features.bias_offsets))
    columns = features.bias_ids - np.int32(vocab.start)
    here = (columns >= 0) & (columns < vocab.num_tokens)
    return [_places(kept, rows[here]), columns[here], features.bias_values[here]]


def _places(kept: NDArray[np.intp], rows: NDArray[Any]) -> NDArray[np.int32]:
    """The indices at which `kept` holds each of `rows`."""
    return np.searchsorted(kept, rows).astype(np.int32)
