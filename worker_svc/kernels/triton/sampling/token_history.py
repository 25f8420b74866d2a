"""The tokens of sequences, cached by slot like keys and values, and penalties for these tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel

# Arguments that may be views of one buffer, see `paged_attention`.
UNALIGNED = ["block_table", "table_offsets", "rows", "context_lens"]

STORED = 256  # tokens per program
# Positions that a program processes at a time, and programs per sequence.
TILE = 256
PROGRAMS = 4


def store_tokens(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    input_ids: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """See `kernels.ops.Ops`."""
    size = len(slot_mapping)
    _store_tokens_kernel[(triton.cdiv(size, STORED),)](
        cache, slot_mapping, input_ids, last_tokens, size, STORED=STORED
    )


def penalize(
    logits: torch.Tensor,
    start: int,
    count: int,
    tokens: torch.Tensor,
    block_size: int,
    block_table: torch.Tensor,
    table_offsets: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `kernels.ops.Ops.penalize`; rows of logits may be strided.

    First every position marks its token: it sets the lowest bit for the prompt, and adds 2 if the
    token was generated. The order does not change the result. Then one of a token's positions
    takes the mark and penalizes the token.
    """
    if count == 0:  # this rank has no tokens
        return
    seen = torch.zeros(len(rows), count, dtype=torch.int32, device=logits.device)
    grid = (PROGRAMS, len(rows))
    history = (tokens, block_table, table_offsets, rows, context_lens)
    _mark_tokens_kernel[grid](
        seen, start, count, *history, prompt_lens, block_size, PROGRAMS=PROGRAMS, TILE=TILE
    )
    _penalize_kernel[grid](
        logits,
        logits.stride(0),
        seen,
        start,
        count,
        *history,
        repetition,
        presence,
        frequency,
        block_size,
        PROGRAMS=PROGRAMS,
        TILE=TILE,
    )


@kernel(
    do_not_specialize=["size"],
    do_not_specialize_on_alignment=["slot_mapping", "input_ids", "last_tokens"],
)
def _store_tokens_kernel(
    cache: tl.tensor,
    slot_mapping: tl.tensor,
    input_ids: tl.tensor,
    last_tokens: tl.tensor,
    size: tl.tensor,
    STORED: tl.constexpr,
) -> None:
    places = tl.program_id(0) * STORED + tl.arange(0, STORED)
    slots = tl.load(slot_mapping + places, mask=places < size, other=-1)
    kept = slots >= 0
    given = tl.load(input_ids + places, mask=kept, other=0)
    sampled = tl.load(last_tokens - 1 - given, mask=given < 0, other=0)
    tl.store(cache + slots, tl.where(given < 0, sampled, given), mask=kept)


@triton.jit
def _columns(
    tokens: tl.tensor,
    block_table: tl.tensor,
    position: tl.tensor,
    context: tl.tensor,
    block_size: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The columns of the tokens at `position`, and whether this rank has these columns."""
    known = position < context
    block = tl.load(block_table + position // block_size, mask=known, other=0).to(tl.int64)
    slot = block * block_size + position % block_size
    column = tl.load(tokens + slot, mask=known, other=-1) - start
    return column, known & (column >= 0) & (column < count)


@kernel(
    do_not_specialize=["start", "count"],
    do_not_specialize_on_alignment=[*UNALIGNED, "prompt_lens"],
)
def _mark_tokens_kernel(
    seen: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    block_table: tl.tensor,
    table_offsets: tl.tensor,
    rows: tl.tensor,
    context_lens: tl.tensor,
    prompt_lens: tl.tensor,
    block_size: tl.tensor,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    f = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + f)
    context = tl.load(context_lens + row)
    prompt = tl.load(prompt_lens + f)
    table = block_table + tl.load(table_offsets + row)
    for first in range(tl.program_id(0) * TILE, context, PROGRAMS * TILE):
        position = first + tl.arange(0, TILE)
        column, here = _columns(tokens, table, position, context, block_size, start, count)
        places = seen + f * count + column
        tl.atomic_or(places, 1, mask=here & (position < prompt), sem="relaxed")
        tl.atomic_add(places, 2, mask=here & (position >= prompt), sem="relaxed")


@kernel(
    do_not_specialize=["start", "count"],
    do_not_specialize_on_alignment=[*UNALIGNED, "repetition", "presence", "frequency"],
)
def _penalize_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    seen: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    block_table: tl.tensor,
    table_offsets: tl.tensor,
    rows: tl.tensor,
    context_lens: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    block_size: tl.tensor,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    f = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + f)
    context = tl.load(context_lens + row)
    table = block_table + tl.load(table_offsets + row)
    factor = tl.load(repetition + f)
    once, each = tl.load(presence + f), tl.load(frequency + f)
    for first in range(tl.program_id(0) * TILE, context, PROGRAMS * TILE):
        position = first + tl.arange(0, TILE)
        column, here = _columns(tokens, table, position, context, block_size, start, count)
        found = tl.atomic_xchg(seen + f * count + column, 0, mask=here, sem="relaxed")
        chosen = here & (found > 0)
        times = found >> 1
        target = logits + f * logits_stride + column
        logit = tl.load(target, mask=chosen, other=0)
        logit = tl.where(logit > 0, logit / factor, logit * factor)
        loss = each * times.to(tl.float32) + once
        tl.store(target, tl.where(times > 0, logit - loss, logit), mask=chosen)
