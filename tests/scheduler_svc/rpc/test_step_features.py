"""Only rows with features get feature columns, and answers are split accordingly."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import Answer, Logprobs, Step
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from scheduler_svc.rpc.step_features import MalformedAnswerError
from shared.paging import Paging
from shared.pb import worker_pb2
from shared.sampling_params import BANNED
from tests.oracle import completion, logprobs, next_token, states
from tests.scheduler_svc.schedulers import make_scheduler, planned

BLOCK = 4


def sequence(prompt: list[int], generated: tuple[int, ...] = (), **params: Any) -> Sequence:
    seq = Sequence(
        (0, 1), prompt, SamplingParams(**{"max_tokens": 9, **params}), generated_ids=generated
    )
    seq.blocks.tables = [array("i", range(8))]
    return seq


def encode(*rows: Row) -> worker_pb2.StepRequest:
    return encode_step(Step(1, list(rows)), Paging(BLOCK), 1, 1)


def whole(seq: Sequence) -> Row:
    return Row(seq, 0, seq.num_tokens, True)


def ints(column: bytes) -> list[int]:
    return list(np.frombuffer(column, "<i4").tolist())


def floats(column: bytes) -> list[float]:
    return list(np.frombuffer(column, "<f4").tolist())


def test_rows_without_features_have_no_columns() -> None:
    ends = frozenset([3])
    plain, ended = sequence([1, 2], eos_token_ids=ends), sequence([1], stop_token_ids=ends, seed=5)
    never_ends = sequence([1, 2], min_tokens=5)
    request = encode(whole(plain), whole(ended), whole(never_ends))
    assert not request.HasField("features")
    assert not request.HasField("prompt_logprobs")
    assert not request.copies


def test_a_rows_features_are_in_its_columns() -> None:
    first = sequence([1, 2, 3], (7,), top_k=5, top_p=0.5, min_p=0.25, repetition_penalty=1.5)
    second = sequence(
        [4], presence_penalty=0.5, frequency_penalty=-0.5, bias_ids=(9, 8), bias_values=(1.0, -2.0)
    )
    third = sequence([5, 6], logprobs=0)
    features = encode(whole(sequence([1])), whole(first), whole(second), whole(third)).features
    assert ints(features.rows) == [1, 2, 3]
    assert ints(features.top_k) == [5, 0, 0]
    assert floats(features.top_p) == [0.5, 1.0, 1.0]
    assert floats(features.min_p) == [0.25, 0.0, 0.0]
    assert floats(features.repetition_penalties) == [1.5, 1.0, 1.0]
    assert floats(features.presence_penalties) == [0.0, 0.5, 0.0]
    assert floats(features.frequency_penalties) == [0.0, -0.5, 0.0]
    assert ints(features.prompt_lens) == [3, 1, 2]
    assert ints(features.num_logprobs) == [-1, -1, 0]
    assert ints(features.bias_offsets) == [0, 0, 2, 2]
    assert ints(features.bias_ids) == [9, 8]
    assert floats(features.bias_values) == [1.0, -2.0]
    assert not features.masked
    assert not features.masks


def test_a_row_mid_prompt_asks_for_nothing() -> None:
    seq = sequence([1] * 8, top_k=3, logprobs=2)
    assert not encode(Row(seq, 0, 7, False)).HasField("features")


@pytest.mark.parametrize("num_generated", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_end_tokens_are_banned_up_to_min_tokens(num_generated: int, ahead: bool) -> None:
    tokens = tuple(range(num_generated))
    seq = sequence(
        [1, 2],
        tokens[:-1] if ahead else tokens,
        min_tokens=3,
        eos_token_ids=frozenset([30]),
        stop_token_ids=frozenset([20]),
        bias_ids=(20,),
        bias_values=(2.0,),
    )
    if ahead and not num_generated:
        return
    row = Row(seq, 1 + num_generated, 1, True, previous_row=0 if ahead else None)
    features = encode(row).features
    banned = num_generated < 3
    assert ints(features.bias_ids) == [20, *([20, 30] if banned else [])]
    assert floats(features.bias_values) == [2.0, *([-math.inf] * 2 if banned else [])]


@pytest.mark.parametrize(
    ("generated", "banned"),
    [((), [7]), ((5,), [6, 7]), ((9, 5), [6, 7]), ((5, 6), [4, 7]), ((6,), [7]), ((5, 5), [6, 7])],
)
def test_tokens_that_complete_a_bad_word_are_banned(
    generated: tuple[int, ...], banned: list[int]
) -> None:
    """Tokens of the prompt do not count."""
    seq = sequence([1, 5], generated, bad_words=((7,), (5, 6), (5, 6, 4)))
    features = encode(Row(seq, 1 + len(generated), 1, True)).features
    assert sorted(ints(features.bias_ids)) == banned
    assert floats(features.bias_values) == [BANNED] * len(banned)


def test_a_row_without_a_bad_word_to_complete_is_plain() -> None:
    seq = sequence([1, 5], bad_words=((5, 6),))
    assert not encode(Row(seq, 1, 1, True)).HasField("features")


@pytest.mark.parametrize(
    ("start", "end", "targets"),
    [
        (0, 3, [11, 12, 13]),
        (3, 4, [14]),
        (0, 5, [11, 12, 13, 14]),
        (0, 7, [11, 12, 13, 14]),
        (4, 5, None),
        (5, 6, None),
    ],
)
def test_a_chunk_scores_the_prompts_tokens_that_follow_its_own(
    start: int, end: int, targets: list[int] | None
) -> None:
    seq = sequence([10, 11, 12, 13, 14], (8, 9), prompt_logprobs=3)
    plain = sequence([1, 2])
    request = encode(whole(plain), Row(seq, start, end - start, end == 7))
    assert request.HasField("prompt_logprobs") == (targets is not None)
    if targets is not None:
        found = request.prompt_logprobs
        assert (ints(found.rows), ints(found.num_logprobs)) == ([1], [3])
        assert (ints(found.target_offsets), ints(found.targets)) == ([0, len(targets)], targets)


def test_delivered_log_probabilities_are_not_asked_for_again() -> None:
    seq = sequence([10, 11, 12, 13, 14], prompt_logprobs=0)
    assert seq.features is not None
    seq.features.num_scored = 2
    assert not encode(Row(seq, 0, 2, False)).HasField("prompt_logprobs")
    assert ints(encode(Row(seq, 0, 3, False)).prompt_logprobs.targets) == [11, 12, 13]


def test_answers_are_split_by_what_was_asked() -> None:
    first, second = sequence([1, 2, 3], logprobs=1, prompt_logprobs=0), sequence([4], logprobs=2)
    request = encode(
        whole(sequence([9])), whole(first), whole(sequence([5], top_k=1)), whole(second)
    )
    response = worker_pb2.StepResponse(
        token_ids=np.arange(4, dtype="<i4").tobytes(),
        logprob_ids=np.arange(7, dtype="<i4").tobytes(),
        logprob_values=np.arange(7, dtype="<f4").tobytes(),
    )
    answer = read_answer(request, response)
    assert answer.token_ids == [0, 1, 2, 3]
    assert {row: found.ids.tolist() for row, found in answer.logprobs.items()} == {
        1: [[0, 1]],
        3: [[2, 3, 4]],
    }
    assert {row: found.values.tolist() for row, found in answer.prompt_logprobs.items()} == {
        1: [[5.0], [6.0]]
    }
    response.logprob_values = b""
    with pytest.raises(MalformedAnswerError, match="7 ids and 0 values"):
        read_answer(request, response)
    response.token_ids = b""
    with pytest.raises(MalformedAnswerError, match="0 tokens for 4 rows"):
        read_answer(request, response)


def answer_to(step: Step) -> Answer:
    """Answers a step as the oracle's model would."""
    answer = Answer([])
    tokens, found, scored = [], {}, {}
    for i, row in enumerate(step.rows):
        before = states(row.seq.tokens)
        end = row.start + row.num_tokens
        tokens.append(next_token(row.seq.tokens[:end]) if row.samples else -1)
        if row.samples:
            ids, values = logprobs(before[end - 1], tokens[-1], 1)
            found[i] = Logprobs(np.array([ids]), np.array([values]))
        last = min(end, row.seq.num_prompt_tokens - 1)
        features = row.seq.features
        if features is not None and row.start < last and last > features.num_scored:
            rows = [logprobs(before[p], row.seq.tokens[p + 1], 1) for p in range(row.start, last)]
            scored[i] = Logprobs(np.array([r[0] for r in rows]), np.array([r[1] for r in rows]))
    return Answer(tokens, found, scored) if tokens else answer


def test_each_prompt_token_is_scored_once_and_not_taken_from_the_cache() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    prompt = list(range(12))
    scheduler.add(Sequence((0, 1), prompt, SamplingParams(1)))
    while step := scheduler.schedule():
        scheduler.apply(step, answer_to(step))
    seq = Sequence((0, 2), prompt, SamplingParams(3, logprobs=1, prompt_logprobs=1))
    scheduler.add(seq)
    outputs = []
    for turn in range(9):
        if turn in (1, 4):
            scheduler.requeue_all()
        step = scheduler.schedule()
        if step is None:
            break
        outputs += scheduler.apply(step, answer_to(step))
    assert seq.started.num_cached_tokens == 0
    scored = [o for o in outputs if o.prompt_logprobs is not None]
    positions = [
        o.offset + i
        for o in scored
        for i in range(len(o.prompt_logprobs.ids))  # type: ignore
    ]
    assert positions == list(range(1, 12))
    sampled = [o for o in outputs if o.token is not None]
    assert [o.token for o in sampled] == completion(prompt, 3)
    assert [o.logprobs.ids[0, 0] for o in sampled if o.logprobs] == completion(prompt, 3)


def test_a_scored_prompt_may_be_taken_from_the_cache_again() -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    seq = Sequence((0, 2), prompt, SamplingParams(3, prompt_logprobs=1))
    scheduler.add(seq)
    step = planned(scheduler)
    scheduler.apply(step, answer_to(step))
    scheduler.blocks.free(seq)
    seq.reset()
    assert scheduler.blocks.allocate_prompt(seq)
    assert seq.num_computed_tokens == 12
