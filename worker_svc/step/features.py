"""Decodes and checks the features of a step's rows: sampling parameters other than the temperature,
and requests for log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidArgumentError
from shared.pb.worker_pb2 import Pooling, PromptLogprobs, SamplingFeatures
from shared.sampling_params import COLUMNS, FILTERS, PENALTIES, Parameter
from worker_svc.step.wire import (
    FLOAT32,
    INT32,
    UINT8,
    UINT32,
    Float32s,
    Int32s,
    check_ascending,
    check_length,
    check_offsets,
    check_range,
    check_values,
    decode_column,
)


@dataclass(frozen=True)
class FeatureArrays:
    """The columns of `SamplingFeatures` for F rows."""

    rows: Int32s  # [F]
    numbers: Mapping[str, NDArray[Any]]  # [F] for each parameter in COLUMNS, by its name
    prompt_lens: Int32s  # [F]
    num_logprobs: Int32s  # [F]
    bias_offsets: Int32s  # [F+1]
    bias_ids: Int32s  # ragged
    bias_values: Float32s  # ragged
    masked: Int32s  # [M], into rows
    masks: NDArray[np.uint32]  # [M, ceil(vocab / 32)]

    @property
    def penalized(self) -> NDArray[np.bool_]:
        """Whether each row has a penalty, [F]."""
        return self._any(PENALTIES)

    @property
    def filtered(self) -> NDArray[np.bool_]:
        """Whether each row has a filter, [F]. A filter has no effect in a greedy row."""
        return self._any(FILTERS)

    def active(self, name: str) -> NDArray[np.bool_]:
        """Whether the parameter differs from its default, which has no effect, in each row, [F]."""
        found: NDArray[np.bool_] = self.numbers[name] != COLUMNS[name].default
        return found

    def _any(self, names: Iterable[str]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.logical_or.reduce([self.active(name) for name in names])
        return found


@dataclass(frozen=True)
class PromptTargets:
    """The columns of `PromptLogprobs` for P rows."""

    rows: Int32s  # [P]
    num_logprobs: Int32s  # [P]
    offsets: Int32s  # [P+1]
    targets: Int32s  # ragged, N in total

    def token_indices(self, query_lens: Int32s) -> Int32s:
        """The step's query_lens [S] -> the indices [N] of the tokens that the targets follow."""
        starts = np.cumsum(query_lens) - query_lens
        shift = (starts[self.rows] - self.offsets[:-1]).astype(np.int32)
        places = np.arange(len(self.targets), dtype=np.int32)
        return places + np.repeat(shift, np.diff(self.offsets))


@dataclass(frozen=True)
class PooledRows:
    """The columns of `Pooling` for P rows."""

    rows: Int32s  # [P]
    sums: NDArray[np.bool_]  # [P]
    yes_ids: Int32s  # [P]
    no_ids: Int32s  # [P]


def decode_features(
    message: SamplingFeatures, samples: NDArray[np.bool_], context_lens: Int32s, vocab_size: int
) -> FeatureArrays:
    """Decodes and checks the features of a step.

    Args:
        samples, context_lens: the step's columns, [S].

    Raises:
        InvalidArgumentError: a column is malformed. The message names the column.
    """
    masked = decode_column("features.masked", message.masked, INT32)
    masks = decode_column("features.masks", message.masks, UINT32)
    words = -(-vocab_size // 32)
    check_length("features.masks", masks, len(masked) * words)
    features = FeatureArrays(
        rows=decode_column("features.rows", message.rows, INT32),
        numbers={name: _numbers(message, each) for name, each in COLUMNS.items()},
        prompt_lens=decode_column("features.prompt_lens", message.prompt_lens, INT32),
        num_logprobs=decode_column("features.num_logprobs", message.num_logprobs, INT32),
        bias_offsets=decode_column("features.bias_offsets", message.bias_offsets, INT32),
        bias_ids=decode_column("features.bias_ids", message.bias_ids, INT32),
        bias_values=decode_column("features.bias_values", message.bias_values, FLOAT32),
        masked=masked,
        masks=masks.reshape(len(masked), words),
    )
    _check_rows(features, samples)
    _check_numbers(features, vocab_size)
    lens = features.prompt_lens
    within = (lens >= 0) & (lens <= context_lens[features.rows])
    check_values("features.prompt_lens", lens, within, "in 0..context_len of its row")
    _check_bias(features, vocab_size)
    check_ascending("features.masked", masked, len(features.rows))
    return features


def decode_prompt_targets(
    message: PromptLogprobs, query_lens: Int32s, vocab_size: int
) -> PromptTargets:
    """Decodes and checks the prompt targets of a step.

    Args:
        query_lens: the step's column, [S].

    Raises:
        InvalidArgumentError: a column is malformed. The message names the column.
    """
    rows = decode_column("prompt_logprobs.rows", message.rows, INT32)
    counts = decode_column("prompt_logprobs.num_logprobs", message.num_logprobs, INT32)
    offsets = decode_column("prompt_logprobs.target_offsets", message.target_offsets, INT32)
    targets = decode_column("prompt_logprobs.targets", message.targets, INT32)
    check_ascending("prompt_logprobs.rows", rows, len(query_lens))
    check_length("prompt_logprobs.num_logprobs", counts, len(rows))
    check_range("prompt_logprobs.num_logprobs", counts, 0, vocab_size)
    check_offsets("prompt_logprobs.target_offsets", offsets, len(rows), len(targets))
    lens = np.diff(offsets)
    within = lens <= query_lens[rows]
    check_values("prompt_logprobs.target_offsets", lens, within, "in 0..query_len targets of a row")
    check_range("prompt_logprobs.targets", targets, 0, vocab_size - 1)
    return PromptTargets(rows, counts, offsets, targets)


def decode_pooling(message: Pooling, samples: NDArray[np.bool_], vocab_size: int) -> PooledRows:
    """Decodes and checks which hidden states and scores a step returns.

    Args:
        samples: the step's column, [S].

    Raises:
        InvalidArgumentError: a column is malformed. The message names the column.
    """
    rows = decode_column("pooling.rows", message.rows, INT32)
    sums = decode_column("pooling.sums", message.sums, UINT8)
    if not len(rows):
        raise InvalidArgumentError("pooling.rows", "no rows")
    check_ascending("pooling.rows", rows, len(samples))
    check_length("pooling.sums", sums, len(rows))
    check_values("pooling.sums", sums, sums <= 1, "0 or 1")
    yes_ids = decode_column("pooling.yes_ids", message.yes_ids, INT32)
    no_ids = decode_column("pooling.no_ids", message.no_ids, INT32)
    for name, ids in (("yes_ids", yes_ids), ("no_ids", no_ids)):
        check_length(f"pooling.{name}", ids, len(rows))
        valid = ((ids >= 0) & (ids < vocab_size)) | (yes_ids == -1)
        check_values(f"pooling.{name}", ids, valid, f"in 0..{vocab_size - 1}")
    return PooledRows(rows, sums.view(np.bool_), yes_ids, no_ids)


def _numbers(message: SamplingFeatures, parameter: Parameter) -> NDArray[Any]:
    data: bytes = getattr(message, parameter.column)
    name = f"features.{parameter.column}"
    dtype: np.dtype[Any] = INT32 if parameter.whole else FLOAT32
    return decode_column(name, data, dtype)


def _check_rows(features: FeatureArrays, samples: NDArray[np.bool_]) -> None:
    rows = features.rows
    check_ascending("features.rows", rows, len(samples))
    check_values("features.rows", rows, samples[rows], "a row that samples")
    for name, each in COLUMNS.items():
        check_length(f"features.{each.column}", features.numbers[name], len(rows))
    check_length("features.prompt_lens", features.prompt_lens, len(rows))
    check_length("features.num_logprobs", features.num_logprobs, len(rows))


def _check_numbers(features: FeatureArrays, vocab_size: int) -> None:
    """Checks the ranges of numbers. A NaN fails every comparison."""
    for name, each in COLUMNS.items():
        values, valid = features.numbers[name], each.engine
        high_enough = values > valid.low if valid.above else values >= valid.low
        within = high_enough & (values <= valid.high)
        check_values(f"features.{each.column}", values, within, valid)
    check_range("features.num_logprobs", features.num_logprobs, -1, vocab_size)


def _check_bias(features: FeatureArrays, vocab_size: int) -> None:
    ids, values = features.bias_ids, features.bias_values
    check_offsets("features.bias_offsets", features.bias_offsets, len(features.rows), len(ids))
    check_range("features.bias_ids", ids, 0, vocab_size - 1)
    check_length("features.bias_values", values, len(ids))
    check_values("features.bias_values", values, values < np.inf, "finite or -inf")
