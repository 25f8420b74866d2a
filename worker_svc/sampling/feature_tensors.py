"""The sampling features of a step on the device, all columns in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.sampling_params import FILTERS
from worker_svc.layers.embedding import VocabPartition
from worker_svc.sampling.filters import Limit
from worker_svc.step.features import Features
from worker_svc.step.wire import Float32s

Upload = Callable[[Sequence[NDArray[Any]]], list[torch.Tensor]]


@dataclass(frozen=True)
class FeatureTensors:
    """Of F rows whose logits are to be changed before a token is sampled, and of L rows whose
    log-probabilities are asked for. int32 where nothing is said."""

    rows: torch.Tensor  # [F] of the step; empty: the logits stay as they are
    penalizes: bool
    filters: Mapping[str, Limit]  # those that some row has, by rows of F
    prompt_lens: torch.Tensor  # [F], as the three that follow empty unless `penalizes`
    repetition: torch.Tensor  # [F] float32
    presence: torch.Tensor  # [F] float32
    frequency: torch.Tensor  # [F] float32
    bias_rows: torch.Tensor  # [B] of F
    bias_columns: torch.Tensor  # [B] of this rank's logits
    bias_values: torch.Tensor  # [B] float32
    masked: torch.Tensor  # [M] of F
    masks: torch.Tensor  # [M, ceil(vocab / 32)], bit patterns
    scored_rows: torch.Tensor  # [L] of the step


def feature_tensors(
    features: Features, temperatures: Float32s, vocab: VocabPartition, upload: Upload
) -> FeatureTensors:
    """
    Args:
        temperatures: [S] of the step.
    """
    drawn = temperatures[features.rows] > 0
    biased = np.diff(features.bias_offsets) > 0
    changed = features.penalized | biased | (features.filtered & drawn)
    changed[features.masked] = True
    kept = np.flatnonzero(changed)  # what F stands for on the device
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
    features: Features, kept: NDArray[np.intp], vocab: VocabPartition
) -> list[NDArray[Any]]:
    """The part of this rank: row numbers of F, columns and values."""
    rows = np.repeat(np.arange(len(features.rows)), np.diff(features.bias_offsets))
    columns = features.bias_ids - np.int32(vocab.start)
    here = (columns >= 0) & (columns < vocab.num_tokens)
    return [_places(kept, rows[here]), columns[here], features.bias_values[here]]


def _places(kept: NDArray[np.intp], rows: NDArray[Any]) -> NDArray[np.int32]:
    """Where `rows`, all of them in `kept`, are in it."""
    return np.searchsorted(kept, rows).astype(np.int32)
