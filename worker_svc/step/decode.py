"""Decodes steps into checked arrays. Only this module, `features` and `server` use protobuf."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shared.errors import FailedPreconditionError, InvalidArgumentError
from shared.graph_sizes import GraphSize, graph_size
from shared.paging import Paging
from shared.pb.worker_pb2 import StepRequest
from worker_svc.step.arrays import DRAFTED, StepArrays, positions_and_slots, ranges
from worker_svc.step.features import (
    decode_features,
    decode_pooling,
    decode_prompt_targets,
)
from worker_svc.step.wire import (
    FLOAT32,
    INT32,
    UINT8,
    UINT64,
    Int32s,
    check_length,
    check_offsets,
    check_range,
    decode_column,
)

MAX_RUN = 8  # steps of one message


@dataclass(frozen=True)
class StepLimits:
    """Limits on the steps of the current epoch."""

    vocab_size: int
    num_blocks: int
    paging: Paging
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafts: bool = False  # whether there is a draft model
    graph_tokens: int = 0  # the maximum of prompt tokens in a step that runs from a CUDA graph


def decode_step(
    request: StepRequest, limits: StepLimits, previous: StepArrays | None
) -> StepArrays:
    """Decodes and checks a step. `previous` is the previous step of the epoch, if there is one.

    Raises:
        FailedPreconditionError: the step is out of order.
        InvalidArgumentError: a column is malformed. The message names the column.
    """
    expected_id = previous.step_id + 1 if previous else 1
    if request.step_id != expected_id:
        raise FailedPreconditionError(f"step_id: {request.step_id}, expected {expected_id}")
    samples = decode_column("samples", request.samples, UINT8)
    step = StepArrays(
        step_id=request.step_id,
        input_ids=decode_column("input_ids", request.input_ids, INT32),
        positions=decode_column("positions", request.positions, INT32),
        slot_mapping=decode_column("slot_mapping", request.slot_mapping, INT32),
        query_lens=decode_column("query_lens", request.query_lens, INT32),
        context_lens=decode_column("context_lens", request.context_lens, INT32),
        block_table=decode_column("block_table", request.block_table, INT32),
        block_table_offsets=decode_column(
            "block_table_offsets", request.block_table_offsets, INT32
        ),
        samples=samples.view(np.bool_),
        temperatures=decode_column("temperatures", request.temperatures, FLOAT32),
        seeds=decode_column("seeds", request.seeds, UINT64),
        copies=_decode_copies(request.copies, limits),
    )
    if samples.max(initial=0) > 1:
        raise InvalidArgumentError("samples", "not 0 or 1")
    _check_lengths(step, limits)
    _check_sequences(step, limits)
    _check_block_table(step, limits)
    step = _in_parts(step, limits.paging)
    _check_tokens(step, limits)
    _check_input_ids(step, limits, previous)
    _check_drafted(step, limits)
    step = _with_features(step, request, limits)
    return replace(step, graph=_graph_size(step, limits)) if request.graph else step


def decode_run(
    request: StepRequest, limits: StepLimits, previous: StepArrays | None
) -> list[StepArrays]:
    """Decodes and checks the steps of a message, as `decode_step` does."""
    step, num_steps = decode_step(request, limits, previous), request.num_steps
    if num_steps in (0, 1):
        return [step]
    _check_run(step, num_steps, limits)
    context_lens = step.context_lens + np.arange(1, num_steps, dtype=np.int32)[:, None]
    table = step.block_table, step.block_table_offsets
    size = limits.paging.part_size
    positions, slots = positions_and_slots(step.query_lens, context_lens, *table, size)
    later = context_lens, positions.astype(np.int32), slots.astype(np.int32)
    run = [step]
    for lens, places, written in zip(*later, strict=True):
        following = replace(
            run[-1],
            step_id=run[-1].step_id + 1,
            input_ids=-1 - np.arange(step.num_seqs, dtype=np.int32),
            positions=places,
            slot_mapping=written,
            context_lens=lens,
            copies=step.copies[:0],
            follows=run[-1],
        )
        run.append(following)
    return run


def _check_run(step: StepArrays, num_steps: int, limits: StepLimits) -> None:
    """Checks that the rows of a step can continue by themselves."""
    if not 1 < num_steps <= MAX_RUN:
        raise InvalidArgumentError("num_steps", f"{num_steps} is not in 0..{MAX_RUN}")
    features = step.features
    if (
        not (step.decodes_only and step.samples.all())
        or len(step.drafted_rows)
        or step.reads_hidden_states
        or (features is not None and len(features.masked))
    ):
        raise InvalidArgumentError("num_steps", "a run has decodes that sample, without masks")
    context_lens = step.context_lens + (num_steps - 1)
    _check_limit("num_steps", context_lens.max(), "tokens in the end", limits.max_model_len)
    room = np.diff(step.block_table_offsets) * limits.paging.part_size
    if (room < np.tile(context_lens, step.num_tables)).any():
        raise InvalidArgumentError("block_table", "fewer blocks than a sequence needs in the run")


def _with_features(step: StepArrays, request: StepRequest, limits: StepLimits) -> StepArrays:
    features, targets, pooling = None, None, None
    if request.HasField("features"):
        features = decode_features(
            request.features, step.samples, step.context_lens, limits.vocab_size
        )
    if request.HasField("prompt_logprobs"):
        targets = decode_prompt_targets(request.prompt_logprobs, step.query_lens, limits.vocab_size)
    if request.HasField("pooling"):
        pooling = decode_pooling(request.pooling, step.samples, limits.vocab_size)
    if features is None and targets is None and pooling is None:
        return step
    return replace(step, features=features, prompt_targets=targets, pooling=pooling)


def _graph_size(step: StepArrays, limits: StepLimits) -> GraphSize:
    """The size of the graph from which a step is to run."""
    if step.features is not None or step.reads_hidden_states:
        raise InvalidArgumentError("graph", "the step has features, prompt targets or pooling")
    prompts = step.query_lens[step.query_lens > 1]
    decodes, tokens = step.num_seqs - len(prompts), int(prompts.sum())
    size = graph_size(decodes, len(prompts), tokens, limits.max_num_seqs, limits.graph_tokens)
    if size is None:
        raise InvalidArgumentError(
            "graph",
            f"no graph holds {decodes} decodes and {len(prompts)} prompts of {tokens} tokens; the "
            f"limit is {limits.graph_tokens} tokens",
        )
    return size


def _decode_copies(data: bytes, limits: StepLimits) -> Int32s:
    blocks = decode_column("copies", data, INT32)
    if not len(blocks):
        return blocks.reshape(0, 2)
    if len(blocks) % 2:
        raise InvalidArgumentError("copies", f"{len(blocks)} entries, not pairs")
    check_range("copies", blocks, 0, limits.num_blocks - 1)
    copies = blocks.reshape(-1, 2)
    sources, destinations = copies.T
    written, times = np.unique(destinations, return_counts=True)
    if len(twice := written[times > 1]):
        raise InvalidArgumentError("copies", f"block {twice[0]} is copied to twice")
    if len(both := np.intersect1d(written, sources)):
        raise InvalidArgumentError("copies", f"block {both[0]} is copied to and from")
    return copies


def _in_parts(step: StepArrays, paging: Paging) -> StepArrays:
    """Replaces blocks by their parts, see `kv_cache.CacheLayout`: in the table with the larger
    blocks by all of them, in the other one by the first."""
    count = paging.num_parts
    if count == 1:
        return step
    parts = np.repeat([paging.num_parts_of(kind) for kind in paging.tables], step.num_seqs)
    num_blocks, first_to_last = np.diff(step.block_table_offsets), np.arange(count, dtype=np.int32)
    return replace(
        step,
        block_table=ranges(step.block_table * count, parts.repeat(num_blocks)).astype(np.int32),
        block_table_offsets=np.cumsum([0, *num_blocks * parts]).astype(np.int32),
        copies=(step.copies[:, None] * count + first_to_last[:, None]).reshape(-1, 2),
    )


def _check_lengths(step: StepArrays, limits: StepLimits) -> None:
    if step.num_seqs == 0:
        raise InvalidArgumentError("query_lens", "a step has at least one sequence")
    for name in ("context_lens", "samples", "temperatures", "seeds"):
        check_length(name, getattr(step, name), step.num_seqs)
    check_length("positions", step.positions, step.num_tokens)
    num_slots = len(limits.paging.tables) * step.num_tokens
    check_length("slot_mapping", step.slot_mapping, num_slots)


def _check_limit(name: str, count: int, unit: str, limit: int) -> None:
    if count > limit:
        raise InvalidArgumentError(name, f"{count} {unit}, the limit is {limit}")


def _check_sequences(step: StepArrays, limits: StepLimits) -> None:
    _check_limit("query_lens", step.num_seqs, "sequences", limits.max_num_seqs)
    _check_limit("input_ids", step.num_tokens, "tokens", limits.max_num_batched_tokens)
    if step.query_lens.min() < 1:
        raise InvalidArgumentError("query_lens", "every sequence has at least one token")
    if (total := int(step.query_lens.sum(dtype=np.int64))) != step.num_tokens:
        raise InvalidArgumentError(
            "query_lens", f"sum {total}, but input_ids has {step.num_tokens} tokens"
        )
    if (step.context_lens < step.query_lens).any():
        raise InvalidArgumentError("context_lens", "less than the tokens of this step")
    _check_limit("context_lens", step.context_lens.max(), "tokens", limits.max_model_len)
    # A NaN also fails the comparison.
    if not ((step.temperatures >= 0) & np.isfinite(step.temperatures)).all():
        raise InvalidArgumentError("temperatures", "not finite, or negative")


def _check_block_table(step: StepArrays, limits: StepLimits) -> None:
    offsets, kinds = step.block_table_offsets, limits.paging.tables
    num_rows = len(kinds) * step.num_seqs
    check_offsets("block_table_offsets", offsets, num_rows, len(step.block_table))
    counts = np.diff(offsets).reshape(-1, step.num_seqs)
    for kind, num_blocks in zip(kinds, counts, strict=True):
        if (num_blocks.astype(np.int64) * kind.block_size < step.context_lens).any():
            raise InvalidArgumentError("block_table", "fewer blocks than the context of a sequence")
        max_blocks = -(-limits.max_model_len // kind.block_size)
        _check_limit("block_table", num_blocks.max(), "blocks of one sequence", max_blocks)
    # As an unsigned number, a negative block is too large.
    if step.block_table.view("<u4").max() >= limits.num_blocks:
        raise InvalidArgumentError(
            "block_table", f"a block out of range; there are {limits.num_blocks}"
        )


def _check_tokens(step: StepArrays, limits: StepLimits) -> None:
    """Checks positions and slots. They follow from the other columns, so a difference shows that
    the sender has miscounted."""
    positions, slots = positions_and_slots(
        step.query_lens,
        step.context_lens,
        step.block_table,
        step.block_table_offsets,
        limits.paging.part_size,
    )
    if (positions != step.positions).any():
        raise InvalidArgumentError("positions", "not the last query_lens positions of context_lens")
    if (slots != step.slot_mapping).any():
        raise InvalidArgumentError(
            "slot_mapping", "not the slots of these positions in the sequence's block_table"
        )


def _check_input_ids(step: StepArrays, limits: StepLimits, previous: StepArrays | None) -> None:
    ids = step.input_ids
    if ids.max() >= limits.vocab_size:
        raise InvalidArgumentError(
            "input_ids", f"{ids.max()} is out of range; the vocabulary has {limits.vocab_size}"
        )
    rows = -1 - ids[(ids < 0) & (ids != DRAFTED)]
    if not len(rows):
        return
    if previous is None or rows.max() >= previous.num_seqs:
        raise InvalidArgumentError(
            "input_ids", f"row {rows.max()} of the previous step, which has no such row"
        )
    if not previous.samples[rows].all():
        raise InvalidArgumentError("input_ids", "a row of the previous step that sampled nothing")


def _check_drafted(step: StepArrays, limits: StepLimits) -> None:
    """Checks that each row whose token is DRAFTED continues the row before."""
    rows = step.drafted_rows
    if not len(rows):
        return
    if not limits.drafts:
        raise InvalidArgumentError("input_ids", "a drafted token, but there is no draft model")
    if rows[0] == 0:
        raise InvalidArgumentError("input_ids", "a drafted token in the first row")
    before, lens, offsets = rows - 1, step.query_lens, step.block_table_offsets
    if (lens[rows] != 1).any() or (lens[before] != 1).any():
        raise InvalidArgumentError("input_ids", "a drafted token in, or after, a row of several")
    if not step.samples[before].all():
        raise InvalidArgumentError("input_ids", "a drafted token after a row that samples nothing")
    if (step.context_lens[rows] - step.context_lens[before] != 1).any():
        raise InvalidArgumentError("input_ids", "a drafted token not at the next position")
    num_blocks = offsets[rows] - offsets[before]
    if (num_blocks > offsets[rows + 1] - offsets[rows]).any() or (
        step.block_table[ranges(offsets[before], num_blocks)]
        != step.block_table[ranges(offsets[rows], num_blocks)]
    ).any():
        raise InvalidArgumentError("input_ids", "a drafted token in blocks of another sequence")
