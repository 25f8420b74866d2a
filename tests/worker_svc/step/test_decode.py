from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from shared.errors import FailedPreconditionError, InvalidArgumentError
from shared.graph_sizes import graph_size
from shared.paging import Paging
from shared.pb.worker_pb2 import StepRequest
from tests.worker_svc.harness import f4, i4, limits
from worker_svc.step.arrays import DRAFTED
from worker_svc.step.decode import decode_run, decode_step

LIMITS = limits(num_blocks=8, block_size=4, max_num_seqs=3, max_num_batched_tokens=16)


def valid() -> StepRequest:
    """A valid step of two sequences: 5 tokens from position 0, in blocks 6 and 2; 1 at 3, in 7."""
    return StepRequest(
        epoch=1,
        step_id=1,
        input_ids=i4([1, 2, 3, 4, 5, 6]),
        positions=i4([0, 1, 2, 3, 4, 3]),
        slot_mapping=i4([24, 25, 26, 27, 8, 31]),
        query_lens=i4([5, 1]),
        context_lens=i4([5, 4]),
        block_table=i4([6, 2, 7]),
        block_table_offsets=i4([0, 2, 3]),
        samples=b"\x00\x01",
        temperatures=f4([0, 0.5]),
        seeds=np.array([0, 2**64 - 1], "<u8").tobytes(),
    )


def test_a_valid_step_is_decoded() -> None:
    step = decode_step(valid(), LIMITS, None)
    assert (step.num_tokens, step.num_seqs) == (6, 2)
    assert step.samples.tolist() == [False, True]
    assert step.seeds.tolist() == [0, 2**64 - 1]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("input_ids", i4([1, 2, 3, 4, 5])),
        ("input_ids", b"\x00" * 23),
        ("input_ids", i4([1, 2, 3, 4, 5, 301])),
        ("input_ids", i4([1, 2, 3, 4, 5, -1])),  # there is no previous step
        ("positions", i4([0, 1, 2, 3, 4])),
        ("positions", i4([0, 1, 2, 3, 4, 4])),
        ("positions", i4([0, 1, 2, 4, 3, 3])),
        ("positions", i4([0, 1, 2, 3, 4, -1])),
        ("slot_mapping", i4([24, 25, 26, 27, 8])),
        ("slot_mapping", i4([24, 25, 26, 27, 9, 31])),
        ("slot_mapping", i4([24, 25, 26, 27, 8, 27])),  # another sequence's block
        ("slot_mapping", i4([24, 25, 26, 27, 8, 2**31 - 1])),
        ("query_lens", b""),
        ("query_lens", i4([5, 2])),
        ("query_lens", i4([6, 0])),
        ("query_lens", i4([7, -1])),
        ("context_lens", i4([5])),
        ("context_lens", i4([4, 4])),
        ("context_lens", i4([5, 2**31 - 1])),
        ("block_table", i4([6, 2, 8])),
        ("block_table", i4([6, 2, -1])),
        ("block_table_offsets", i4([0, 2])),
        ("block_table_offsets", i4([0, 2, 2])),
        ("block_table_offsets", i4([0, 4, 3])),
        ("block_table_offsets", i4([-1, 2, 3])),
        ("samples", b"\x00"),
        ("samples", b"\x00\x02"),
        ("temperatures", f4([0])),
        ("temperatures", f4([0, -0.1])),
        ("temperatures", f4([float("nan"), 0])),
        ("temperatures", f4([0, float("inf")])),
        ("seeds", b"\x00" * 15),
        ("seeds", b"\x00" * 8),
        ("copies", b"\x00" * 7),
        ("copies", i4([0, 1, 3])),
        ("copies", i4([0, 8])),
        ("copies", i4([-1, 1])),
        ("copies", i4([0, 1, 2, 1])),  # to block 1 twice
        ("copies", i4([0, 1, 1, 2])),  # from and to block 1
        ("copies", i4([3, 3])),
    ],
)
def test_a_malformed_column_is_named(column: str, value: bytes) -> None:
    request = valid()
    setattr(request, column, value)
    with pytest.raises(InvalidArgumentError) as error:
        decode_step(request, LIMITS, None)
    # A wrong length is noticed by comparing two columns; either may be the wrong one.
    partners = {"input_ids": {"positions"}, "query_lens": {"context_lens"}}
    assert error.value.field in {column} | partners.get(column, set())


# A block has 8 tokens in the first table, and 4 in the second.
TWO_TABLES = limits(num_blocks=8, paging=Paging(8, window=6, window_block_size=4))


def with_two_tables() -> StepRequest:
    """The valid step, with blocks 6 and 7 in the first tables and 3 and 5, and 2, in the others."""
    request = valid()
    request.slot_mapping = i4([48, 49, 50, 51, 52, 59, 24, 25, 26, 27, 40, 19])
    request.block_table = i4([6, 7, 3, 5, 2])
    request.block_table_offsets = i4([0, 1, 2, 4, 5])
    return request


def test_blocks_of_two_tables_become_parts() -> None:
    request = with_two_tables()
    request.copies = i4([1, 0])
    step = decode_step(request, TWO_TABLES, None)
    assert step.block_table.tolist() == [12, 13, 14, 15, 6, 10, 4]
    assert step.block_table_offsets.tolist() == [0, 2, 4, 6, 7]
    assert step.copies.tolist() == [[2, 0], [3, 1]]
    assert step.num_tables == 2


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("slot_mapping", i4([48, 49, 50, 51, 52, 59])),
        ("slot_mapping", i4([48, 49, 50, 51, 52, 59, 24, 25, 26, 27, 41, 19])),
        ("block_table", i4([6, 7, 3, 5, 8])),
        ("block_table_offsets", i4([0, 1, 2])),
        ("block_table_offsets", i4([0, 1, 3, 5, 5])),  # a second table without blocks
    ],
)
def test_a_malformed_second_table_is_named(column: str, value: bytes) -> None:
    request = with_two_tables()
    setattr(request, column, value)
    with pytest.raises(InvalidArgumentError) as error:
        decode_step(request, TWO_TABLES, None)
    # If its blocks are too few, the offsets may be right.
    assert error.value.field in {column, column.removesuffix("_offsets")}


MAX_BLOCKS = -(-LIMITS.max_model_len // LIMITS.paging.block_size)


@pytest.mark.parametrize(
    ("table", "offsets", "reason"),
    [
        ([6, 2], [0, 1, 2], "fewer blocks"),
        ([6, 2, 7, *[0] * MAX_BLOCKS], [0, 2, 3 + MAX_BLOCKS], f"{MAX_BLOCKS + 1} blocks of one"),
    ],
)
def test_too_few_or_too_many_blocks(table: list[int], offsets: list[int], reason: str) -> None:
    request = valid()
    request.block_table, request.block_table_offsets = i4(table), i4(offsets)
    with pytest.raises(InvalidArgumentError, match=f"^block_table: {reason}"):
        decode_step(request, LIMITS, None)


@pytest.mark.parametrize(
    ("limit", "value", "column"),
    [
        ("max_num_seqs", 1, "query_lens"),
        ("max_num_batched_tokens", 5, "input_ids"),
        ("max_model_len", 4, "context_lens"),
        ("num_blocks", 7, "block_table"),
        ("vocab_size", 6, "input_ids"),
    ],
)
def test_limits_are_inclusive(limit: str, value: int, column: str) -> None:
    decode_step(valid(), dataclasses.replace(LIMITS, **{limit: value + 1}), None)
    with pytest.raises(InvalidArgumentError) as error:
        decode_step(valid(), dataclasses.replace(LIMITS, **{limit: value}), None)
    assert error.value.field == column


@pytest.mark.parametrize("step_id", [0, 1, 3])
def test_out_of_order(step_id: int) -> None:
    first = decode_step(valid(), LIMITS, None)
    request = valid()
    request.step_id = step_id
    with pytest.raises(FailedPreconditionError, match=f"step_id: {step_id}, expected 2"):
        decode_step(request, LIMITS, first)


@pytest.mark.parametrize(("token", "ok"), [(-2, True), (-1, False), (-3, False), (-(2**31), False)])
def test_tokens_of_the_previous_step(token: int, ok: bool) -> None:
    first = decode_step(valid(), LIMITS, None)
    request = valid()
    request.step_id = 2
    request.input_ids = i4([1, 2, 3, 4, 5, token])
    if ok:
        decode_step(request, LIMITS, first)
    else:  # row 0 sampled nothing, rows past 1 are not there
        with pytest.raises(InvalidArgumentError, match=r"^input_ids: "):
            decode_step(request, LIMITS, first)


def test_copies_are_pairs() -> None:
    assert decode_step(valid(), LIMITS, None).copies.tolist() == []
    request = valid()
    request.copies = i4([0, 1, 0, 4])
    assert decode_step(request, LIMITS, None).copies.tolist() == [[0, 1], [0, 4]]


CAPTURING = dataclasses.replace(LIMITS, graph_tokens=17)


def test_the_size_of_a_graph() -> None:
    request = valid()
    assert decode_step(request, CAPTURING, None).graph is None
    request.graph = True
    assert decode_step(request, CAPTURING, None).graph == graph_size(1, 1, 5, 3, 17)
    request.prompt_logprobs.rows = i4([])
    request.prompt_logprobs.target_offsets = i4([0])
    with pytest.raises(InvalidArgumentError, match=r"^graph: the step has features, prompt "):
        decode_step(request, CAPTURING, None)


DRAFTING = dataclasses.replace(LIMITS, drafts=True, max_num_seqs=4)


def drafting() -> StepRequest:
    """A valid step: 2 tokens of a prompt in block 6; a token at 3 in block 2, the next at 4 in the
    blocks 2 and 7, and the one after at 5. The last two are drafted."""
    return StepRequest(
        epoch=1,
        step_id=1,
        input_ids=i4([1, 2, 3, DRAFTED, DRAFTED]),
        positions=i4([0, 1, 3, 4, 5]),
        slot_mapping=i4([24, 25, 11, 28, 29]),
        query_lens=i4([2, 1, 1, 1]),
        context_lens=i4([2, 4, 5, 6]),
        block_table=i4([6, 2, 2, 7, 2, 7]),
        block_table_offsets=i4([0, 1, 2, 4, 6]),
        samples=b"\x01\x01\x01\x01",
        temperatures=f4([0, 0, 0, 0]),
        seeds=b"\x00" * 32,
    )


def test_rows_of_drafted_tokens() -> None:
    step = decode_step(drafting(), DRAFTING, None)
    assert step.drafted_rows.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"input_ids": i4([1, DRAFTED, 3, DRAFTED, DRAFTED])}, "in the first row"),
        ({"input_ids": i4([DRAFTED, 1, 2, 3, 4])}, "in the first row"),
        ({"input_ids": i4([1, 2, DRAFTED, 3, 4])}, "in, or after, a row of several"),
        ({"samples": b"\x01\x00\x01\x01"}, "after a row that samples nothing"),
        (
            {
                "positions": i4([0, 1, 2, 4, 5]),
                "slot_mapping": i4([24, 25, 10, 28, 29]),
                "context_lens": i4([2, 3, 5, 6]),
            },
            "not at the next position",
        ),
        (
            {"block_table": i4([6, 2, 3, 7, 3, 7])},
            "in blocks of another sequence",
        ),
        (
            {
                "block_table": i4([6, 2, 7, 2, 7, 2, 7]),
                "block_table_offsets": i4([0, 1, 3, 5, 7]),
            },
            None,
        ),
        (
            {
                "block_table": i4([6, 2, 7, 3, 2, 7, 2, 7]),
                "block_table_offsets": i4([0, 1, 4, 6, 8]),
            },
            "in blocks of another sequence",
        ),
    ],
)
def test_a_drafted_token_continues_the_row_before(
    columns: dict[str, bytes], reason: str | None
) -> None:
    request = drafting()
    for name, value in columns.items():
        setattr(request, name, value)
    if reason is None:
        decode_step(request, DRAFTING, None)
        return
    with pytest.raises(InvalidArgumentError, match=f"^input_ids: a drafted token {reason}"):
        decode_step(request, DRAFTING, None)


def test_without_a_draft_model_there_are_no_drafted_tokens() -> None:
    limits = dataclasses.replace(DRAFTING, drafts=False)
    with pytest.raises(InvalidArgumentError, match=r"^input_ids: .* there is no draft model"):
        decode_step(drafting(), limits, None)


def test_a_drafted_token_may_be_sampled_from() -> None:
    """The next step may refer to what a row with a drafted token sampled."""
    first = decode_step(drafting(), DRAFTING, None)
    request = valid()
    request.step_id, request.input_ids = 2, i4([1, 2, 3, 4, 5, -4])
    assert decode_step(request, DRAFTING, first).input_ids[-1] == -4


def run_of(num_steps: int, **columns: bytes) -> StepRequest:
    """A run of decodes of two sequences: from position 2 on, in the blocks 6 and 2; and from 3 on,
    in 7 and 1."""
    request = StepRequest(
        epoch=1,
        step_id=1,
        input_ids=i4([5, 6]),
        positions=i4([2, 3]),
        slot_mapping=i4([26, 31]),
        query_lens=i4([1, 1]),
        context_lens=i4([3, 4]),
        block_table=i4([6, 2, 7, 1]),
        block_table_offsets=i4([0, 2, 4]),
        samples=b"\x01\x01",
        temperatures=f4([0, 0.5]),
        seeds=b"\x00" * 16,
        copies=i4([0, 4]),
        num_steps=num_steps,
    )
    request.MergeFrom(StepRequest(**columns))
    return request


def test_the_steps_of_a_run_follow_from_the_first() -> None:
    run = decode_run(run_of(3), LIMITS, None)
    assert [step.step_id for step in run] == [1, 2, 3]
    assert [step.input_ids.tolist() for step in run] == [[5, 6], [-1, -2], [-1, -2]]
    assert [step.positions.tolist() for step in run] == [[2, 3], [3, 4], [4, 5]]
    assert [step.slot_mapping.tolist() for step in run] == [[26, 31], [27, 4], [8, 5]]
    assert [step.context_lens.tolist() for step in run] == [[3, 4], [4, 5], [5, 6]]
    assert [len(step.copies) for step in run] == [1, 0, 0]
    for step, following in pairwise(run):
        request = run_of(1)
        for name in ("input_ids", "positions", "slot_mapping", "context_lens", "copies"):
            setattr(request, name, getattr(following, name).astype("<i4").tobytes())
        request.step_id = following.step_id
        decode_step(request, LIMITS, step)


@pytest.mark.parametrize(
    ("num_steps", "columns", "reason"),
    [
        (9, {}, "num_steps: 9 is not in 0..8"),
        (-1, {}, "num_steps: -1 is not in 0..8"),
        (2, {"samples": b"\x01\x00"}, "num_steps: a run has decodes that sample"),
        (6, {}, "block_table: fewer blocks than a sequence needs in the run"),
    ],
)
def test_runs_that_cannot_continue_by_themselves(
    num_steps: int, columns: dict[str, bytes], reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        decode_run(run_of(num_steps, **columns), LIMITS, None)


def test_runs_within_the_models_length() -> None:
    short = dataclasses.replace(LIMITS, max_model_len=5)
    with pytest.raises(InvalidArgumentError, match="num_steps: 6 tokens in the end"):
        decode_run(run_of(3), short, None)


def test_no_runs_of_prompts_or_drafted_tokens() -> None:
    for request, allowed in ((valid(), LIMITS), (drafting(), DRAFTING)):
        request.num_steps = 2
        with pytest.raises(InvalidArgumentError, match="num_steps"):
            decode_run(request, allowed, None)
