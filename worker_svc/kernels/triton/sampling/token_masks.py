"""Masks of tokens that may not be sampled, one bit each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel

TILE = 2048
NUM_WARPS = 4


def apply_masks(
    logits: torch.Tensor, start: int, count: int, masked: torch.Tensor, masks: torch.Tensor
) -> None:
    """See `kernels.ops.Ops`; rows of logits may be strided."""
    if count:  # a rank may have no tokens
        _apply_masks_kernel[(triton.cdiv(count, TILE), len(masked))](
            logits,
            logits.stride(0),
            start,
            count,
            masked,
            masks,
            masks.shape[1],
            TILE=TILE,
            num_warps=NUM_WARPS,
        )


@kernel(
    do_not_specialize=["start", "count", "num_words"],
    do_not_specialize_on_alignment=["masked", "masks"],
)
def _apply_masks_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    masked: tl.tensor,
    masks: tl.tensor,
    num_words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(masked + place).to(tl.int64)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tokens = start + columns
    inside = columns < count
    words = tl.load(masks + place * num_words + tokens // 32, mask=inside, other=-1)
    excluded = ((words >> (tokens % 32)) & 1) == 0
    # The kernel writes only the logits of excluded tokens, so it need not read any.
    target = logits + row * logits_stride + columns
    tl.store(target, tl.full([TILE], float("-inf"), tl.float32), mask=inside & excluded)
