"""The sanitizer accepts what is right and finds each thing that is wrong."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.scheduler import Row, Step
from scheduler_svc.sequence import SamplingParams, Sequence
from scheduler_svc.worker_client import encode_step
from shared.pb import worker_pb2
from tests.oracle import completion, next_token, states
from tests.sanitizer import Beside, Limits, Owner, Sanitizer, SanitizerError

BLOCK = 2
NUM_BLOCKS = 8
LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=10)


def make() -> Sanitizer:
    return Sanitizer(LIMITS, NUM_BLOCKS, BLOCK, epoch=1)


def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
    seq = Sequence((0, 1), tokens, SamplingParams(max_tokens=9, seed=5))
    seq.block_table = array("i", blocks)
    return seq


def request(step_id: int, *rows: Row) -> worker_pb2.StepRequest:
    return encode_step(Step(step_id, list(rows)), BLOCK, 1, step_id)


def owner(tokens: list[int], number: int = 1, salt: int = 0) -> Owner:
    return Owner(f"request {number}", number, salt, 5, np.array(states(tokens)))


def beside(*owners: Owner, answered: int = 0, held_twice: int = -1) -> Beside:
    references = np.ones(NUM_BLOCKS, np.int64)
    if held_twice >= 0:
        references[held_twice] = 2
    return Beside(owners, answered, references)


def test_a_prompt_in_chunks_and_a_decode_ahead_give_the_oracles_tokens() -> None:
    tokens = [7, 8, 9]
    seq, sanitizer = sequence(tokens, [5, 1, 3]), make()
    assert sanitizer.run(request(1, Row(seq, 0, 2, False))) == [-1]
    assert sanitizer.run(request(2, Row(seq, 2, 1, True))) == [next_token(tokens)]
    ahead = sanitizer.run(request(3, Row(seq, 3, 1, True, previous_row=0)))
    assert completion(tokens, 2) == [next_token(tokens), *ahead]


def test_a_computed_prefix_may_be_shared() -> None:
    first, second = sequence([1, 2, 3], [0, 1]), sequence([1, 2, 4], [0, 2])
    sanitizer = make()
    sanitizer.run(request(1, Row(first, 0, 3, True)), beside(owner([1, 2, 3])))
    found = sanitizer.run(
        request(2, Row(second, 2, 1, True)), beside(owner([1, 2, 4], 2), answered=1, held_twice=0)
    )
    assert found == [next_token([1, 2, 4])]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("epoch", 2, "epoch"),
        ("step_id", 3, "epoch and step"),
        ("positions", [1, 2, 3, 0, 1], "positions"),
        ("slot_mapping", [0, 1, 2, 6, 5], "slots are not"),
        ("query_lens", [5, 0], "an empty row"),
        ("query_lens", [4, 1], "positions"),
        ("context_lens", [11, 2], "longer than the model"),
        ("context_lens", [2, 2], "block tables"),
        ("block_table_offsets", [0, 1, 3], "block tables"),
        ("block_table", [0, 1, 8], "does not exist"),
        ("block_table", [2, 1, 3], "slots are not"),
        ("input_ids", [1, 2, 3, -1, 1], "did not have"),
        ("input_ids", [1, 2, 3, 1000, 1], "vocabulary"),
        ("input_ids", [1, 2, 3, 4], "different lengths"),
    ],
)
def test_wrong_columns_are_found(column: str, value: int | list[int], reason: str) -> None:
    first, second = sequence([1, 2, 3], [0, 1]), sequence([4, 5], [3])
    step = request(1, Row(first, 0, 3, True), Row(second, 0, 2, True))
    setattr(step, column, value if isinstance(value, int) else array("i", value).tobytes())
    with pytest.raises(SanitizerError, match=reason) as raised:
        make().run(step)
    assert "row 0" in str(raised.value)


def test_limits_of_a_step_are_kept() -> None:
    seqs = [sequence([1] * 4, [n * 2, n * 2 + 1]) for n in range(3)]
    with pytest.raises(SanitizerError, match="3 rows"):
        make().run(request(1, *(Row(seq, 0, 1, False) for seq in seqs)))
    with pytest.raises(SanitizerError, match="9 tokens"):
        make().run(request(1, Row(sequence([1] * 9, [0, 1, 2, 3, 4]), 0, 9, True)))


def test_a_slot_is_written_once() -> None:
    step = request(
        1, Row(sequence([1, 2], [3]), 0, 2, True), Row(sequence([4, 5], [3]), 0, 2, True)
    )
    with pytest.raises(SanitizerError, match="written twice"):
        make().run(step)


def test_a_token_that_was_not_sampled_cannot_be_referred_to() -> None:
    seq, sanitizer = sequence([1, 2, 3], [0, 1]), make()
    sanitizer.run(request(1, Row(seq, 0, 2, False)))
    with pytest.raises(SanitizerError, match="sampled nothing"):
        sanitizer.run(request(2, Row(seq, 2, 1, True, previous_row=0)))


def test_attended_slots_must_hold_the_prefix() -> None:
    sanitizer = make()
    sanitizer.run(request(1, Row(sequence([1, 2, 3, 4], [0, 1]), 0, 4, True)))
    with pytest.raises(SanitizerError, match="holds position -1"):
        sanitizer.run(request(2, Row(sequence([1, 2, 3], [5, 2]), 2, 1, True)))
    sanitizer = make()
    sanitizer.run(request(1, Row(sequence([1, 2, 3, 4], [0, 1]), 0, 4, True)))
    sanitizer.run(request(2, Row(sequence([9, 9], [0]), 0, 2, True)))
    with pytest.raises(SanitizerError, match="position 2 of row 0 was computed after other tokens"):
        sanitizer.run(request(3, Row(sequence([9, 9, 3, 4, 5], [0, 1, 2]), 4, 1, True)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owners": [owner([1, 2, 4], 2), owner([9], 3)]}, None),
        ({"answered": 0}, "from a step in flight"),
        ({"references": np.full(NUM_BLOCKS, 2)}, "2 sequences hold"),
        ({"owners": [owner([1, 3, 4], 2), owner([9], 3)]}, "another sequence's tokens"),
        ({"owners": [owner([1, 2, 4], 2, salt=1), owner([9], 3)]}, "another cache salt"),
        ({"owners": [owner([1, 2], 2), owner([9], 3)]}, "needs no token at position 2"),
        ({"owners": [replace(owner([1, 2, 4], 2), seed=6), owner([9], 3)]}, "seeds"),
    ],
)
def test_what_the_scheduler_knew_is_checked(change: dict[str, object], reason: str | None) -> None:
    """A second sequence shares the first's prefix, a third is new."""
    sanitizer = make()
    sanitizer.run(
        request(1, Row(sequence([1, 2, 3], [0, 1]), 0, 3, True)), beside(owner([1, 2, 3]))
    )
    step = request(
        2,
        Row(sequence([1, 2, 4], [0, 2]), 2, 1, True),
        Row(sequence([9], [3]), 0, 1, True),
    )
    right = beside(owner([1, 2, 4], 2), owner([9], 3), answered=1)
    if reason is None:
        sanitizer.run(step, replace(right, **change))  # type: ignore[arg-type]
        return
    with pytest.raises(SanitizerError, match=reason):
        sanitizer.run(step, replace(right, **change))  # type: ignore[arg-type]


def test_what_a_step_in_flight_attends_to_is_not_written() -> None:
    sanitizer = make()
    sanitizer.run(request(1, Row(sequence([1, 2], [0]), 0, 2, True)), beside(owner([1, 2])))
    step = request(2, Row(sequence([9], [0]), 0, 1, True))
    with pytest.raises(SanitizerError, match="in flight"):
        sanitizer.run(step, beside(owner([9], 2), answered=0))
