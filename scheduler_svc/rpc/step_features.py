"""Encodes the parts of a step beyond a token per row, and decodes their answers."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import accumulate
from operator import attrgetter
from struct import pack

import numpy as np

from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import Logprobs
from shared.pb import worker_pb2
from shared.sampling_params import COLUMNS

_NEVER = float("-inf")
# Name, type and value of each parameter that is a column.
_COLUMNS = [
    (each.column, "i" if each.whole else "f", attrgetter(name)) for name, each in COLUMNS.items()
]


class MalformedAnswerError(Exception):
    """An answer that does not fit its step."""


def encode_features(request: worker_pb2.StepRequest, rows: list[Row]) -> None:
    """Adds columns for the rows that have features or targets to score."""
    asking = [
        i
        for i, row in enumerate(rows)
        if row.seq.features is not None and row.start < row.seq.features.end
    ]
    sampling = [i for i in asking if rows[i].samples and _has_features(rows[i])]
    if sampling:
        request.features.CopyFrom(_features(rows, sampling))
    scored = [i for i in asking if _num_targets(rows[i])]
    if scored:
        request.prompt_logprobs.CopyFrom(_prompt_logprobs(rows, scored))


def read_logprobs(
    request: worker_pb2.StepRequest, response: worker_pb2.StepResponse
) -> tuple[dict[int, Logprobs], dict[int, Logprobs]]:
    """Splits the log-probabilities into those of sampled tokens and of prompt tokens, by row.

    Raises:
        MalformedAnswerError: there are more or fewer than the step asked for.
    """
    ids = np.frombuffer(response.logprob_ids, "<i4")
    values = np.frombuffer(response.logprob_values, "<f4")
    features, prompts = request.features, request.prompt_logprobs
    offsets = np.frombuffer(prompts.target_offsets, "<i4").tolist()
    sampled = [
        (row, 1, k + 1)
        for row, k in zip(_ints(features.rows), _ints(features.num_logprobs), strict=True)
        if k >= 0
    ]
    targets = [
        (row, offsets[i + 1] - offsets[i], k + 1)
        for i, (row, k) in enumerate(
            zip(_ints(prompts.rows), _ints(prompts.num_logprobs), strict=True)
        )
    ]
    expected = sum(count * width for _, count, width in sampled + targets)
    if not len(ids) == len(values) == expected:
        raise MalformedAnswerError(
            f"{len(ids)} ids and {len(values)} values of log-probabilities, expected {expected}"
        )
    found, end = [], 0
    for _, count, width in sampled + targets:
        start, end = end, end + count * width
        shape = (count, width)
        found.append(Logprobs(ids[start:end].reshape(shape), values[start:end].reshape(shape)))
    split = len(sampled)
    return (
        {row: f for (row, _, _), f in zip(sampled, found[:split], strict=True)},
        {row: f for (row, _, _), f in zip(targets, found[split:], strict=True)},
    )


def _has_features(row: Row) -> bool:
    features = row.seq.features
    assert features is not None
    return features.always or features.mask is not None or bool(_banned(row))


def _mask(seq: Sequence) -> bytes | None:
    return None if seq.features is None else seq.features.mask


def _banned(row: Row) -> frozenset[int]:
    """Tokens that would end the sequence too early. A mask excludes them by itself."""
    seq = row.seq
    if _mask(seq) is not None:
        return frozenset()
    index = row.start + row.num_tokens - seq.num_prompt_tokens  # of the sampled token
    return seq.params.end_token_ids if index < seq.params.min_tokens else frozenset()


def _features(rows: list[Row], places: list[int]) -> worker_pb2.SamplingFeatures:
    seqs = [rows[i].seq for i in places]
    params = [seq.params for seq in seqs]
    bias_ids, bias_values, bias_offsets = array("i"), array("f"), array("i", [0])
    for place, p in zip(places, params, strict=True):
        if p.bias_ids:
            bias_ids.extend(p.bias_ids)
            bias_values.extend(p.bias_values)
        if p.min_tokens:
            banned = sorted(_banned(rows[place]))
            bias_ids.extend(banned)
            bias_values.extend([_NEVER] * len(banned))
        bias_offsets.append(len(bias_ids))
    num_logprobs = [-1 if (k := p.num_logprobs) is None else k for p in params]
    masks = {i: mask for i, seq in enumerate(seqs) if (mask := _mask(seq)) is not None}
    return worker_pb2.SamplingFeatures(
        rows=_column("i", places),
        prompt_lens=_column("i", [seq.num_prompt_tokens for seq in seqs]),
        num_logprobs=_column("i", num_logprobs),
        bias_offsets=bias_offsets.tobytes(),
        bias_ids=bias_ids.tobytes(),
        bias_values=bias_values.tobytes(),
        masked=_column("i", masks),
        masks=b"".join(masks.values()),
        **{name: _column(code, [*map(of, params)]) for name, code, of in _COLUMNS},
    )


def _num_targets(row: Row) -> int:
    """The number of the row's tokens whose successor in the prompt must be scored. It is 0 if all
    of those scores were delivered before a recomputation."""
    features = row.seq.features
    assert features is not None
    if row.start >= features.num_to_score:
        return 0
    end = min(row.start + row.num_tokens, features.num_to_score)
    return end - row.start if end > features.num_scored else 0


def _prompt_logprobs(rows: list[Row], places: list[int]) -> worker_pb2.PromptLogprobs:
    targets, lens = array("i"), []
    for row in (rows[i] for i in places):
        lens.append(_num_targets(row))
        targets.extend(row.seq.tokens[row.start + 1 : row.start + 1 + lens[-1]])
    return worker_pb2.PromptLogprobs(
        rows=_column("i", places),
        num_logprobs=_column("i", [_num_prompt_logprobs(rows[i].seq) for i in places]),
        target_offsets=_column("i", list(accumulate(lens, initial=0))),
        targets=targets.tobytes(),
    )


def _num_prompt_logprobs(seq: Sequence) -> int:
    assert seq.params.prompt_logprobs is not None
    return seq.params.prompt_logprobs


def _column(code: str, values: Collection[float]) -> bytes:
    """A little-endian array of `values`, of the type that `struct` calls `code`."""
    return pack(f"<{len(values)}{code}", *values)


def _ints(column: bytes) -> list[int]:
    found: list[int] = np.frombuffer(column, "<i4").tolist()
    return found
