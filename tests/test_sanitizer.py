"""The sanitizer accepts correct steps and catches every kind of wrong one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import Step
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from shared.paging import Paging
from shared.pb import worker_pb2
from shared.sampling_params import Grammar
from tests.oracle import VOCAB_SIZE, completion, logprobs, next_token, states
from tests.sanitizer import Beside, Limits, Owner, Sanitizer, SanitizerError

BLOCK = 2
NUM_BLOCKS = 8
SEED = VOCAB_SIZE  # as good as 0
LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=10)


def make() -> Sanitizer:
    return Sanitizer(LIMITS, NUM_BLOCKS, Paging(BLOCK), epoch=1)


def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
    seq = Sequence((0, 1), tokens, SamplingParams(max_tokens=9, seed=SEED))
    seq.blocks.tables = [array("i", blocks)]
    return seq


def request(
    step_id: int, *rows: Row, copies: Seq[tuple[int, int]] = (), epoch: int = 1
) -> worker_pb2.StepRequest:
    return encode_step(Step(step_id, list(rows), list(copies)), Paging(BLOCK), epoch, step_id)


def owner(tokens: list[int], number: int = 1, salt: int = 0) -> Owner:
    params = SamplingParams(max_tokens=9, seed=SEED)
    return Owner(f"request {number}", number, salt, params, tokens, np.array(states(tokens)))


def run(
    sanitizer: Sanitizer, step: worker_pb2.StepRequest, known: Beside | None = None
) -> list[int]:
    """Runs a step; returns the sampled tokens."""
    return list(read_answer(step, sanitizer.run(step, known)).token_ids)


def beside(*owners: Owner, answered: int = 0, held_twice: int = -1) -> Beside:
    references = np.ones(NUM_BLOCKS, np.int64)
    if held_twice >= 0:
        references[held_twice] = 2
    return Beside(owners, answered, references)


def test_a_prompt_in_chunks_and_a_decode_ahead_give_the_oracles_tokens() -> None:
    tokens = [7, 8, 9]
    seq, sanitizer = sequence(tokens, [5, 1, 3]), make()
    assert run(sanitizer, request(1, Row(seq, 0, 2, False))) == [-1]
    assert run(sanitizer, request(2, Row(seq, 2, 1, True))) == [next_token(tokens)]
    ahead = run(sanitizer, request(3, Row(seq, 3, 1, True, previous_row=0)))
    assert completion(tokens, 2) == [next_token(tokens), *ahead]


def test_a_computed_prefix_may_be_shared() -> None:
    first, second = sequence([1, 2, 3], [0, 1]), sequence([1, 2, 4], [0, 2])
    sanitizer = make()
    sanitizer.run(request(1, Row(first, 0, 3, True)), beside(owner([1, 2, 3])))
    known = beside(owner([1, 2, 4], 2), answered=1, held_twice=0)
    found = run(sanitizer, request(2, Row(second, 2, 1, True)), known)
    assert found == [next_token([1, 2, 4])]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("epoch", 2, "epoch: 2"),
        ("step_id", 3, "step_id: 3"),
        ("positions", [1, 2, 3, 0, 1], "positions"),
        ("slot_mapping", [0, 1, 2, 6, 5], "slot_mapping"),
        ("context_lens", [11, 2], "context_lens: 11 tokens, the limit is 10"),
        ("block_table", [0, 1, 8], "there are 8"),
        ("input_ids", [1, 2, 3, -1, 1], "no such row"),
        ("input_ids", [1, 2, 3, 1000, 1], "vocabulary"),
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
    with pytest.raises(SanitizerError, match="3 sequences"):
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
    with pytest.raises(SanitizerError, match="that sampled nothing"):
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
        (
            {"owners": [replace(owner([1, 2, 4], 2), params=SamplingParams(9)), owner([9], 3)]},
            "seeds",
        ),
    ],
)
def test_what_the_scheduler_knew_is_checked(change: dict[str, object], reason: str | None) -> None:
    """A second sequence shares the first one's prefix; a third is new."""
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
    with pytest.raises(SanitizerError, match=reason) if reason else nullcontext():
        sanitizer.run(step, replace(right, **change))  # type: ignore[arg-type]


def test_what_a_step_in_flight_attends_to_is_not_written() -> None:
    sanitizer = make()
    sanitizer.run(request(1, Row(sequence([1, 2], [0]), 0, 2, True)), beside(owner([1, 2])))
    step = request(2, Row(sequence([9], [0]), 0, 1, True))
    with pytest.raises(SanitizerError, match="in flight"):
        sanitizer.run(step, beside(owner([9], 2), answered=0))


def copied(sanitizer: Sanitizer, copies: list[tuple[int, int]], known: Beside) -> list[int]:
    """Runs [1, 2, 3, 4] in blocks 0 and 1, then a fork of it in 0 and 2; returns its token."""
    sanitizer.run(
        request(1, Row(sequence([1, 2, 3, 4], [0, 1]), 0, 4, True)), beside(owner([1, 2, 3, 4]))
    )
    fork = sequence([1, 2, 3, 9], [0, 2])
    return run(sanitizer, request(2, Row(fork, 3, 1, True), copies=copies), known)


def fork_beside(answered: int = 1, **change: object) -> Beside:
    known = beside(owner([1, 2, 3, 9], 2), answered=answered, held_twice=0)
    return replace(known, **change)  # type: ignore[arg-type]


def test_a_fork_reads_what_was_copied_for_it() -> None:
    assert copied(make(), [(1, 2)], fork_beside()) == [next_token([1, 2, 3, 9])]


@pytest.mark.parametrize(
    ("copies", "known", "reason"),
    [
        ([], fork_beside(), "holds position -1"),
        ([(0, 2)], fork_beside(), "holds position 0"),
        ([(1, 2), (0, 2)], fork_beside(), "block 2 is copied to twice"),
        ([(1, 2)], fork_beside(answered=0), "from a step in flight"),
        ([(1, 2)], fork_beside(references=np.full(NUM_BLOCKS, 2)), "not exactly one"),
        ([(3, 1)], fork_beside(answered=0), "which is in flight"),
        (
            [(1, 2)],
            fork_beside(owners=[owner([1, 2, 3, 9], 2, salt=1)]),
            "another cache salt",
        ),
    ],
)
def test_wrong_copies_are_found(copies: list[tuple[int, int]], known: Beside, reason: str) -> None:
    with pytest.raises(SanitizerError, match=reason):
        copied(make(), copies, known)


WANTS = SamplingParams(
    9,
    top_k=3,
    bias_ids=(7,),
    bias_values=(-2.0,),
    logprobs=1,
    prompt_logprobs=0,
    grammar=Grammar(2, "a*"),
)


def with_features() -> tuple[worker_pb2.StepRequest, Owner]:
    seq = Sequence((0, 1), [1, 2, 3], WANTS)
    seq.blocks.tables = [array("i", [0, 1])]
    assert seq.features is not None
    seq.features.masks = [mask(all_but=next_token([1, 2, 3]))]
    plain = sequence([4, 5], [3])
    plain_owner = owner([1, 2, 3])
    return request(1, Row(plain, 0, 2, True), Row(seq, 0, 3, True)), replace(
        plain_owner, params=WANTS
    )


def mask(all_but: int) -> bytes:
    bits = np.ones(-(-VOCAB_SIZE // 32) * 32, np.uint8)
    bits[all_but] = 0
    return np.packbits(bits, bitorder="little").tobytes()


def test_features_change_what_is_sampled_and_what_is_answered() -> None:
    step, wants = with_features()
    answer = read_answer(step, make().run(step, beside(owner([4, 5], 2), wants)))
    token = next_token([1, 2, 3]) + 1  # the mask bans the one it would be otherwise
    assert answer.token_ids == [next_token([4, 5]), token]
    before = states([1, 2, 3])
    assert {row: found.ids[0].tolist() for row, found in answer.logprobs.items()} == {
        1: logprobs(before[2], token, 1)[0]
    }
    assert {row: found.values.tolist() for row, found in answer.prompt_logprobs.items()} == {
        1: [logprobs(before[i], target, 0)[1] for i, target in enumerate([2, 3])]
    }


def test_banned_tokens_are_not_sampled() -> None:
    first = next_token([1])
    params = SamplingParams(9, min_tokens=1, stop_token_ids=frozenset([first, first + 1]))
    seq = Sequence((0, 1), [1], params)
    seq.blocks.tables = [array("i", [0])]
    assert run(make(), request(1, Row(seq, 0, 1, True))) == [first + 2]


@pytest.mark.parametrize(
    ("part", "column", "value", "reason"),
    [
        ("features", "rows", np.int32([2]), "features.rows"),
        ("features", "top_k", np.int32([4]), "features of row 1 are"),
        ("features", "prompt_lens", np.int32([2]), "features of row 1 are"),
        ("features", "num_logprobs", np.int32([0]), "features of row 1 are"),
        ("features", "bias_ids", np.int32([8]), "features of row 1 are"),
        ("features", "bias_values", np.float32([1]), "features of row 1 are"),
        ("prompt_logprobs", "rows", np.int32([0]), "row 0 scores"),
        ("prompt_logprobs", "targets", np.int32([2, 4]), "row 1 scores"),
        ("prompt_logprobs", "num_logprobs", np.int32([1]), "row 1 scores"),
    ],
)
def test_wrong_features_are_found(
    part: str, column: str, value: np.ndarray[Any, Any], reason: str
) -> None:
    step, wants = with_features()
    setattr(getattr(step, part), column, value.tobytes())
    with pytest.raises(SanitizerError, match=reason):
        make().run(step, beside(owner([4, 5], 2), wants))


def test_missing_and_unwanted_features_are_found() -> None:
    step, wants = with_features()
    step.ClearField("features")
    with pytest.raises(SanitizerError, match="features of row 1 are None"):
        make().run(step, beside(owner([4, 5], 2), wants))
    step, _ = with_features()
    free = replace(wants, params=replace(WANTS, grammar=None))
    with pytest.raises(SanitizerError, match="row 1 has a mask"):
        make().run(step, beside(owner([4, 5], 2), free))


@pytest.mark.parametrize("seed", range(8))
def test_a_kept_cache_holds_what_was_answered_and_nothing_else_is_trusted(seed: int) -> None:
    seq = sequence([1, 2, 3, 4], [0, 1])
    sanitizer, trusting = make(), make()
    for each, lost in ((sanitizer, Row(seq, 2, 2, True)), (trusting, Row(seq, 2, 1, False))):
        each.run(request(1, Row(seq, 0, 2, False)))
        each.run(request(2, lost))
        each.keep(2, answered=1, rng=Random(seed))
    assert run(sanitizer, request(1, Row(seq, 2, 2, True), epoch=2)) == [next_token([1, 2, 3, 4])]
    with pytest.raises(SanitizerError, match=r"unanswered step is trusted: position 2 of row 0"):
        trusting.run(request(1, Row(seq, 3, 1, True), epoch=2))


@pytest.mark.parametrize("seed", range(8))
def test_a_lost_copy_is_not_trusted_until_it_is_made_again(seed: int) -> None:
    parent, child = sequence([1, 2, 3], [0, 1]), sequence([1, 2, 3, 4], [0, 2])
    row, copies = Row(child, 3, 1, True), [(1, 2)]
    sanitizer, trusting = make(), make()
    for each in (sanitizer, trusting):
        each.run(request(1, Row(parent, 0, 3, True)))
        each.run(request(2, row, copies=copies))
        each.keep(2, answered=1, rng=Random(seed))
    again = request(1, row, copies=copies, epoch=2)
    assert run(sanitizer, again) == [next_token([1, 2, 3, 4])]
    with pytest.raises(SanitizerError, match="a slot of an unanswered step is trusted"):
        trusting.run(request(1, row, epoch=2))


def test_an_unanswered_slot_that_is_copied_along_is_not_trusted_in_the_copy() -> None:
    parent, child = sequence([1, 2], [0]), sequence([1, 2, 3], [1, 2])
    sanitizer = make()
    sanitizer.run(request(1, Row(parent, 0, 1, False)))
    sanitizer.run(request(2, Row(parent, 1, 1, True)))
    sanitizer.keep(2, answered=1, rng=Random(0))
    step = request(1, Row(child, 2, 1, True), copies=[(0, 1)], epoch=2)
    with pytest.raises(SanitizerError, match="a slot of an unanswered step is trusted"):
        sanitizer.run(step)
