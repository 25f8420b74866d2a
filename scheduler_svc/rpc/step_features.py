"""Encodes the parts of a step beyond a token per row, and decodes their answers."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from operator import attrgetter
from struct import pack

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequence import Row
from scheduler_svc.core.step import Logprobs
from shared.pb import worker_pb2
from shared.sampling_params import BANNED, COLUMNS, Pooling

_NEVER = float("-inf")
# Name, type and value of each parameter that is a column.
_COLUMNS = [
    (each.column, "i" if each.whole else "f", attrgetter(name)) for name, each in COLUMNS.items()
]


class MalformedAnswerError(Exception):
    """An answer that does not fit its step."""


def encode_features(request: worker_pb2.StepRequest, rows: list[Row]) -> None:
    """Adds columns for the rows that have features or targets to score."""
    asking = {
        i: row
        for i, row in enumerate(rows)
        if row.seq.features is not None and row.start < row.seq.features.end
    }
    banned = {i: _banned(row) for i, row in asking.items() if row.samples}
    sampling = {i: asking[i] for i, biases in banned.items() if biases or _has_features(asking[i])}
    if sampling:
        request.features.CopyFrom(_features(sampling, banned))
    if targets := {i: found for i, row in asking.items() if (found := _targets(row))}:
        ks = [rows[i].seq.params.prompt_logprobs or 0 for i in targets]
        request.prompt_logprobs.CopyFrom(
            worker_pb2.PromptLogprobs(
                rows=_column("i", targets),
                num_logprobs=_column("i", ks),
                target_offsets=_column("i", [*accumulate(map(len, targets.values()), initial=0)]),
                targets=b"".join(targets.values()),
            )
        )
    if pooled := {i: row for i, row in asking.items() if _is_pooled(row)}:
        params = [row.seq.params for row in pooled.values()]
        yes_ids = [each.yes_id if each.pooling is Pooling.SCORE else -1 for each in params]
        request.pooling.CopyFrom(
            worker_pb2.Pooling(
                rows=_column("i", pooled),
                sums=bytes(each.pooling is Pooling.MEAN for each in params),
                yes_ids=_column("i", yes_ids),
                no_ids=_column("i", [each.no_id for each in params]),
            )
        )


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
    rows, ks = _ints(features.rows), _ints(features.num_logprobs)
    sampled = {row: (1, k + 1) for row, k in zip(rows, ks, strict=True) if k >= 0}
    counts = np.diff(np.frombuffer(prompts.target_offsets, "<i4")).tolist()
    rows, ks = _ints(prompts.rows), _ints(prompts.num_logprobs)
    scored = {row: (n, k + 1) for row, n, k in zip(rows, counts, ks, strict=True)}
    shapes = [*sampled.values(), *scored.values()]
    expected = sum(count * width for count, width in shapes)
    if not len(ids) == len(values) == expected:
        raise MalformedAnswerError(
            f"{len(ids)} ids and {len(values)} values of log-probabilities, expected {expected}"
        )
    parts = _split(ids, values, shapes)
    return {row: next(parts) for row in sampled}, {row: next(parts) for row in scored}


def read_hidden_states(
    request: worker_pb2.StepRequest, response: worker_pb2.StepResponse
) -> dict[int, npt.NDArray[np.float32]]:
    """The hidden states, or the scores [1], of pooled rows, by row.

    Raises:
        MalformedAnswerError: their number does not fit the rows.
    """
    rows = np.frombuffer(request.pooling.rows, "<i4")
    scored = np.frombuffer(request.pooling.yes_ids, "<i4") >= 0
    values, num_scores = np.frombuffer(response.hidden_states, "<f4"), np.count_nonzero(scored)
    num_states, size = len(rows) - num_scores, len(values) - num_scores
    if size < num_states or (size % num_states if num_states else size):
        raise MalformedAnswerError(
            f"{len(values)} numbers for {num_states} hidden states and {num_scores} scores"
        )
    states = values[:size].reshape(num_states, -1) if num_states else values[:0]
    found: dict[int, npt.NDArray[np.float32]] = {}
    found.update(zip(rows[~scored].tolist(), states, strict=True))
    found.update(zip(rows[scored].tolist(), values[size:, None], strict=True))
    return found


def _is_pooled(row: Row) -> bool:
    pooling = row.seq.params.pooling
    return pooling is Pooling.MEAN or (pooling is not Pooling.NONE and row.samples)


def _split(
    ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32], shapes: Iterable[tuple[int, int]]
) -> Iterator[Logprobs]:
    end = 0
    for shape in shapes:
        start, end = end, end + shape[0] * shape[1]
        yield Logprobs(ids[start:end].reshape(shape), values[start:end].reshape(shape))


def _has_features(row: Row) -> bool:
    features = row.seq.features
    assert features is not None
    return features.always or bool(features.masks)


def _banned(row: Row) -> dict[int, float]:
    """The bias of tokens that would end the sequence too early, which a mask excludes by itself,
    and of those that would complete a bad word."""
    seq = row.seq
    banned: dict[int, float] = {}
    index = row.start + row.num_tokens - seq.num_prompt_tokens  # of the sampled token
    if index < seq.params.min_tokens and not (seq.features and seq.features.masks):
        banned = dict.fromkeys(sorted(seq.params.end_token_ids), _NEVER)
    for word in seq.params.bad_words:
        start = seq.num_tokens + 1 - len(word)
        if start >= seq.num_prompt_tokens and tuple(seq.tokens[start:]) == word[:-1]:
            banned.setdefault(word[-1], BANNED)
    return banned


def _mask(row: Row) -> bytes | None:
    """The mask of the token that the row samples, if there is one."""
    seq = row.seq
    if seq.features is None or not seq.features.masks:
        return None
    return seq.features.masks[row.start + row.num_tokens - seq.num_tokens]


def _features(
    rows: dict[int, Row], banned: dict[int, dict[int, float]]
) -> worker_pb2.SamplingFeatures:
    """The columns of some rows of a step, by index, with the biases of the tokens `banned` in
    each."""
    seqs = [row.seq for row in rows.values()]
    params = [seq.params for seq in seqs]
    bias_ids, bias_values, bias_offsets = array("i"), array("f"), array("i", [0])
    for i, p in zip(rows, params, strict=True):
        if p.bias_ids:
            bias_ids.extend(p.bias_ids)
            bias_values.extend(p.bias_values)
        bias_ids.extend(banned[i])
        bias_values.extend(banned[i].values())
        bias_offsets.append(len(bias_ids))
    num_logprobs = [-1 if (k := p.num_logprobs) is None else k for p in params]
    masked = {i: mask for i, row in enumerate(rows.values()) if (mask := _mask(row))}
    return worker_pb2.SamplingFeatures(
        rows=_column("i", rows),
        prompt_lens=_column("i", [seq.num_prompt_tokens for seq in seqs]),
        num_logprobs=_column("i", num_logprobs),
        bias_offsets=bias_offsets.tobytes(),
        bias_ids=bias_ids.tobytes(),
        bias_values=bias_values.tobytes(),
        masked=_column("i", masked),
        masks=b"".join(masked.values()),
        **{name: _column(code, [*map(of, params)]) for name, code, of in _COLUMNS},
    )


def _targets(row: Row) -> array[int]:
    """The successors in the prompt of the row's tokens, if they must be scored. Empty if all of
    these scores were delivered before a recomputation."""
    features = row.seq.features
    assert features is not None
    end = min(row.start + row.num_tokens, features.num_to_score)
    if end <= features.num_scored:
        return array("i")
    return row.seq.tokens[row.start + 1 : end + 1]


def _column(code: str, values: Collection[float]) -> bytes:
    """A little-endian array of `values`, of the type that `struct` calls `code`."""
    return pack(f"<{len(values)}{code}", *values)


def _ints(column: bytes) -> list[int]:
    found: list[int] = np.frombuffer(column, "<i4").tolist()
    return found
