from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.errors import InvalidArgumentError
from shared.pb.worker_pb2 import Pooling, StepRequest
from shared.sampling_params import COLUMNS
from tests.worker_svc.harness import (
    Asked,
    Batch,
    f4,
    i4,
    limits,
    prompt_logprobs,
    sampling_features,
)
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import decode_step

VOCAB = 70  # three words of a mask, the last one not full
LIMITS = limits(vocab_size=VOCAB, block_size=4)
NAN, INF = float("nan"), float("inf")


def valid() -> StepRequest:
    """A valid step: rows of 5, 3 and 1 tokens, of which the first samples nothing."""
    request = Batch(LIMITS).request([(0, [1, 2, 3, 4, 5]), (1, [6, 7, 8]), (2, [9])], silent=[0])
    asked = {
        1: Asked(top_k=3, top_p=0.5, min_p=0.25, bias={5: 1.5, 69: -INF}, allowed=[0, 33, 69]),
        2: Asked(
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-2.0,
            prompt_len=1,
            logprobs=VOCAB,
        ),
    }
    request.features.CopyFrom(sampling_features(asked, VOCAB))
    request.prompt_logprobs.CopyFrom(prompt_logprobs({0: [2, 3, 4, 5, 6], 1: [7]}, 4))
    request.pooling.CopyFrom(
        Pooling(rows=i4([0, 2]), sums=b"\x01\x00", yes_ids=i4([-1, 7]), no_ids=i4([-1, 69]))
    )
    return request


def decode(request: StepRequest) -> StepArrays:
    return decode_step(request, LIMITS, None)


def check_rejected(part: str, column: str, value: bytes, reason: str) -> None:
    request = valid()
    setattr(getattr(request, part), column, value)
    with pytest.raises(InvalidArgumentError) as error:
        decode(request)
    assert (error.value.field, error.value.reason) == (f"{part}.{column}", reason)


def test_features_are_decoded() -> None:
    features = decode(valid()).features
    assert features
    numbers = {name: column.tolist() for name, column in features.numbers.items()}
    assert numbers == {
        "top_k": [3, 0],
        "top_p": [0.5, 1],
        "min_p": [0.25, 0],
        "repetition_penalty": [1, 1.5],
        "presence_penalty": [0, 0.5],
        "frequency_penalty": [0, -2],
    }
    columns = "rows", "prompt_lens", "num_logprobs", "bias_ids", "bias_values", "masked", "masks"
    assert [getattr(features, name).tolist() for name in columns] == [
        [1, 2], [0, 1], [-1, VOCAB], [5, 69], [1.5, -INF], [0], [[1, 2, 1 << 5]],
    ]  # fmt: skip
    assert features.bias_offsets.tolist() == [0, 2, 2]
    assert features.penalized.tolist() == [False, True]
    assert features.filtered.tolist() == [True, False]


def test_prompt_targets_are_decoded() -> None:
    step = decode(valid())
    targets = step.prompt_targets
    assert targets
    assert targets.rows.tolist() == [0, 1]
    assert targets.num_logprobs.tolist() == [4, 4]
    assert targets.targets.tolist() == [2, 3, 4, 5, 6, 7]
    assert targets.token_indices(step.query_lens).tolist() == [0, 1, 2, 3, 4, 5]


def test_targets_need_not_follow_every_token() -> None:
    request = valid()
    request.prompt_logprobs.CopyFrom(prompt_logprobs({0: [2], 1: [], 2: [3]}, 0))
    step = decode(request)
    assert step.prompt_targets
    assert step.prompt_targets.token_indices(step.query_lens).tolist() == [0, 8]


def test_a_step_without_features_or_targets() -> None:
    step = decode(Batch(LIMITS).request([(0, [1])]))
    assert step.features is None
    assert step.prompt_targets is None


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("rows", i4([0, 2]), "0 is not a row that samples"),
        ("rows", i4([2, 1]), "not ascending"),
        ("rows", i4([1, 1]), "not ascending"),
        ("rows", i4([1, 3]), "3 is not in 0..2"),
        ("rows", i4([-1, 1]), "-1 is not in 0..2"),
        ("rows", b"\x00" * 7, "7 bytes, not a multiple of 4"),
        ("prompt_lens", i4([0]), "1 entries, expected 2"),
        ("prompt_lens", i4([4, 1]), "4 is not in 0..context_len of its row"),
        ("prompt_lens", i4([0, -1]), "-1 is not in 0..context_len of its row"),
        ("num_logprobs", i4([0]), "1 entries, expected 2"),
        ("num_logprobs", i4([-2, 0]), "-2 is not in -1..70"),
        ("num_logprobs", i4([0, 71]), "71 is not in -1..70"),
        ("bias_offsets", i4([0, 2]), "2 entries, expected 3"),
        ("bias_offsets", i4([0, 3, 2]), "not rising from 0 to 2"),
        ("bias_offsets", i4([-1, 0, 2]), "not rising from 0 to 2"),
        ("bias_offsets", i4([0, 1, 1]), "not rising from 0 to 2"),
        ("bias_ids", i4([5, 70]), "70 is not in 0..69"),
        ("bias_ids", i4([-1, 5]), "-1 is not in 0..69"),
        ("bias_values", f4([1]), "1 entries, expected 2"),
        ("bias_values", f4([1, INF]), "inf is not finite or -inf"),
        ("bias_values", f4([NAN, 1]), "nan is not finite or -inf"),
        ("masked", i4([2]), "2 is not in 0..1"),
        ("masked", i4([-1]), "-1 is not in 0..1"),
        ("masks", i4([1, 2]), "2 entries, expected 3"),
        ("masks", b"", "0 entries, expected 3"),
    ],
)
def test_a_malformed_feature_is_named(column: str, value: bytes, reason: str) -> None:
    check_rejected("features", column, value, reason)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_number_that_is_not_in_its_range_is_named(name: str) -> None:
    """By the ranges that all services share, which have tests of their own."""
    parameter = COLUMNS[name]
    column, engine, default = parameter.column, parameter.engine, parameter.default
    encode, wrong = i4, [-1]
    if not parameter.whole:
        encode, wrong = f4, [NAN, INF, 0.0 if engine.above else -INF]
    reasons = {encode([default]): "1 entries, expected 2"}
    for value in wrong:
        reasons[encode([default, value])] = f"{value} is not {engine}"
    for values, reason in reasons.items():
        check_rejected("features", column, values, reason)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("rows", i4([1, 0]), "not ascending"),
        ("rows", i4([0, 3]), "3 is not in 0..2"),
        ("num_logprobs", i4([4]), "1 entries, expected 2"),
        ("num_logprobs", i4([4, -1]), "-1 is not in 0..70"),
        ("num_logprobs", i4([71, 4]), "71 is not in 0..70"),
        ("target_offsets", i4([0, 6]), "2 entries, expected 3"),
        ("target_offsets", i4([0, 7, 6]), "not rising from 0 to 6"),
        ("target_offsets", i4([0, 6, 6]), "6 is not in 0..query_len targets of a row"),
        ("targets", i4([2, 3, 4, 5, 70, 7]), "70 is not in 0..69"),
        ("targets", i4([2, 3, 4, 5, -1, 7]), "-1 is not in 0..69"),
    ],
)
def test_a_malformed_target_is_named(column: str, value: bytes, reason: str) -> None:
    check_rejected("prompt_logprobs", column, value, reason)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("rows", b"", "no rows"),
        ("rows", i4([2, 0]), "not ascending"),
        ("rows", i4([0, 3]), "3 is not in 0..2"),
        ("rows", i4([-1, 0]), "-1 is not in 0..2"),
        ("sums", b"\x01", "1 entries, expected 2"),
        ("sums", b"\x01\x02", "2 is not 0 or 1"),
        ("yes_ids", i4([1]), "1 entries, expected 2"),
        ("yes_ids", i4([-1, 70]), "70 is not in 0..69"),
        ("yes_ids", i4([-2, 7]), "-2 is not in 0..69"),
        ("no_ids", i4([70, -1]), "-1 is not in 0..69"),
    ],
)
def test_malformed_pooling_is_named(column: str, value: bytes, reason: str) -> None:
    check_rejected("pooling", column, value, reason)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_never_pass_as_something_else(seed: int) -> None:
    """Any bytes are either a step or rejected: no other exception, and no index out of range."""
    rng = np.random.default_rng(seed)
    for _ in range(1400):
        request: Any = valid()
        request.copies = i4([0, 3, 1, 4])
        columns = [
            (message, field.name)
            for message in (request, request.features, request.prompt_logprobs, request.pooling)
            for field in message.DESCRIPTOR.fields
            if field.type == field.TYPE_BYTES
        ]
        for place in rng.choice(len(columns), rng.integers(1, 4), replace=False):
            message, column = columns[place]
            data = bytearray(getattr(message, column))
            for _ in range(rng.integers(1, 3)):
                data[rng.integers(len(data))] = rng.integers(256)
            setattr(message, column, bytes(data[: rng.integers(len(data) + 1) or None]))
        try:
            step = decode(request)
        except InvalidArgumentError:
            continue
        assert ((step.block_table >= 0) & (step.block_table < LIMITS.num_blocks)).all()
        assert step.slot_mapping.max() < LIMITS.num_blocks * LIMITS.paging.block_size
        assert ((step.copies >= 0) & (step.copies < LIMITS.num_blocks)).all()
        assert step.features
        assert step.prompt_targets
        assert step.pooling
        assert (step.pooling.rows < step.num_seqs).all()
        scored = step.pooling.yes_ids >= 0
        for ids in (step.pooling.yes_ids[scored], step.pooling.no_ids[scored]):
            assert ((ids >= 0) & (ids < VOCAB)).all()
        assert step.samples[step.features.rows].all()
        assert (step.features.masked < len(step.features.rows)).all()
        indices = step.prompt_targets.token_indices(step.query_lens)
        assert ((indices >= 0) & (indices < step.num_tokens)).all()
