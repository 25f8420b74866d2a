"""Steps as arrays on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.graph_sizes import GraphSize
from worker_svc.step.features import FeatureArrays, PooledRows, PromptTargets
from worker_svc.step.wire import Int32s

DRAFTED = -(2**31)  # an input id: the token that the draft model proposes after the row before


@dataclass(frozen=True)
class StepArrays:
    """A step of T tokens of S sequences. It has the columns of `StepRequest` as host arrays.

    Its blocks are the parts that `kv_cache.CacheLayout` describes, of one size in all tables. If it
    has one table, all layers use that.
    """

    step_id: int
    input_ids: Int32s  # [T]; -1-r: the token sampled at row r of the previous step; or DRAFTED
    positions: Int32s  # [T]
    slot_mapping: Int32s  # [K*T] for K tables of each sequence
    query_lens: Int32s  # [S]
    context_lens: Int32s  # [S]
    block_table: Int32s  # ragged; all first tables come before the second ones
    block_table_offsets: Int32s  # [K*S+1]
    samples: NDArray[np.bool_]  # [S]
    temperatures: NDArray[np.float32]  # [S]
    seeds: NDArray[np.uint64]  # [S]
    copies: Int32s = field(default_factory=lambda: np.zeros((0, 2), np.int32))  # [C, 2] from, to
    graph: GraphSize | None = None  # of the CUDA graph from which a step with prompts runs
    # The step before in a run, whose rows continue with the tokens that they sampled there.
    follows: StepArrays | None = field(default=None, repr=False)
    # [S], the place in `last_tokens` of the token that each row samples; -1: nowhere. If empty, row
    # r has the place r.
    places: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    features: FeatureArrays | None = None
    prompt_targets: PromptTargets | None = None
    pooling: PooledRows | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tables(self) -> int:
        """The number of block tables of each sequence."""
        return (len(self.block_table_offsets) - 1) // len(self.query_lens)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether more than the sampler reads the hidden states, which no graph gives."""
        return self.prompt_targets is not None or self.pooling is not None

    @property
    def reads_every_token(self) -> bool:
        """Whether the hidden states of all tokens are read, not only those of last tokens."""
        sums = self.pooling is not None and bool(self.pooling.sums.any())
        return sums or self.prompt_targets is not None

    @property
    def first_tokens(self) -> Int32s:
        """The index [S] of each row's first token."""
        starts: Int32s = np.cumsum(self.query_lens, dtype=np.int32) - self.query_lens
        return starts

    @property
    def drafted_rows(self) -> NDArray[np.intp]:
        """The rows whose token is DRAFTED, ascending."""
        tokens = np.flatnonzero(self.input_ids == DRAFTED)
        if not len(tokens):
            return tokens
        return np.searchsorted(np.cumsum(self.query_lens), tokens, side="right")

    @property
    def decodes_only(self) -> bool:
        """Whether every sequence has one token."""
        return len(self.input_ids) == len(self.query_lens)


def made_up_step(
    query_lens: Int32s,
    context_lens: Int32s,
    block_size: int,
    block_table: Int32s | None = None,
    num_tables: int = 1,
) -> StepArrays:
    """Makes a step of tokens 0, of which every sequence samples greedily. `block_table` has a block
    for each sequence. Without it, all tokens share the first block."""
    num_blocks = np.ones_like(context_lens)
    if block_table is None:
        num_blocks = -(-context_lens // block_size)
        block_table = np.zeros(num_tables * num_blocks.sum(), np.int32)
    offsets = np.cumsum([0, *np.tile(num_blocks, num_tables)]).astype(np.int32)
    columns = query_lens, context_lens, block_table, offsets
    positions, slots = positions_and_slots(*columns, block_size)
    num_seqs = len(query_lens)
    return StepArrays(
        0,
        np.zeros(len(positions), np.int32),
        positions.astype(np.int32),
        slots.astype(np.int32),
        *columns,
        samples=np.ones(num_seqs, np.bool_),
        temperatures=np.zeros(num_seqs, np.float32),
        seeds=np.zeros(num_seqs, np.uint64),
    )


def positions_and_slots(
    query_lens: Int32s,
    context_lens: Int32s,
    block_table: Int32s,
    block_table_offsets: Int32s,
    block_size: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions [T] and slots [K*T] of a step's tokens. Of decodes, `context_lens` may be
    [N, S] of N steps; then both have a row for each step."""
    first_blocks = block_table_offsets[:-1].reshape(-1, len(query_lens))
    if len(query_lens) == (num_tokens := query_lens.sum()):  # decodes
        positions = context_lens.astype(np.int64) - 1
    else:
        shift = context_lens - np.cumsum(query_lens)
        positions = np.arange(num_tokens) + np.repeat(shift, query_lens)
        first_blocks = np.repeat(first_blocks, query_lens, axis=1)
    index, offset = np.divmod(positions[..., None, :], block_size)
    blocks = block_table[first_blocks + index].astype(np.int64)
    slots = blocks * block_size + offset
    return positions, slots.reshape(*positions.shape[:-1], -1)


def ranges(starts: Int32s, lengths: Int32s) -> NDArray[np.int64]:
    """The concatenated ranges [start, start + length), for starts and lengths [N]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    numbers: NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(
        starts + lengths - ends, lengths
    )
    return numbers


def rows_of(step: StepArrays, rows: NDArray[np.intp]) -> StepArrays:
    """The step of some rows of `step`, without what is of the whole step."""
    lens, numbers = step.query_lens[rows], np.arange(step.num_tables)[:, None]
    tokens = ranges(step.first_tokens[rows], lens)
    tables = (rows + step.num_seqs * numbers).ravel()
    starts = step.block_table_offsets[tables]
    num_blocks = step.block_table_offsets[tables + 1] - starts
    return StepArrays(
        step_id=step.step_id,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        slot_mapping=step.slot_mapping[(tokens + step.num_tokens * numbers).ravel()],
        query_lens=lens,
        context_lens=step.context_lens[rows],
        block_table=step.block_table[ranges(starts, num_blocks)],
        block_table_offsets=np.concatenate(([0], np.cumsum(num_blocks))).astype(np.int32),
        samples=step.samples[rows],
        temperatures=step.temperatures[rows],
        seeds=step.seeds[rows],
        places=step.places[rows] if len(step.places) else step.places,
    )
