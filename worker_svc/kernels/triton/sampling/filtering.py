"""The searches of `sampling.filters` on a GPU, one histogram after another.

A histogram is one pass over the logits at the speed of memory. Hardly any logit is in its range,
and each other logit costs a comparison. Counts are summed per tile before they are added in memory.
Weights are added in memory one by one, as integers, so that their order does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels import logits as definitions
from worker_svc.kernels.triton.launch import kernel

BINS = tl.constexpr(definitions.BINS)
LARGEST_WEIGHT = tl.constexpr(definitions.LARGEST_WEIGHT)
BIN_BITS = tl.constexpr(definitions.BIN_BITS)
SIGN = tl.constexpr(definitions.SIGN)

# Logits per program, as in `sampling`: enough loads in flight to hide the latency of memory.
TILE = 4096
NUM_WARPS = 4

# Arguments of which a program reads one entry, so that their alignment does not matter.
UNALIGNED = ["rows", "low", "shifts"]


def weigh_by_key(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: int,
    maxima: torch.Tensor | None,
    scales: torch.Tensor | None,
    low: torch.Tensor,
    shifts: torch.Tensor,
    bins: torch.Tensor,
) -> None:
    """See `kernels.ops.Ops`; rows of logits may be strided."""
    if num_tokens:  # a rank may have none
        _weigh_by_key_kernel[(triton.cdiv(num_tokens, TILE), len(rows))](
            logits,
            logits.stride(0),
            rows,
            num_tokens,
            maxima,
            scales,
            low,
            shifts,
            bins,
            TILE=TILE,
            num_warps=NUM_WARPS,
        )


def pick_bins(
    bins: torch.Tensor,
    targets: torch.Tensor,
    low: torch.Tensor,
    shifts: torch.Tensor,
    above: torch.Tensor,
) -> None:
    """See `kernels.ops.Ops`; all contiguous."""
    _pick_bins_kernel[(len(bins),)](bins, targets, low, shifts, above, num_warps=1)


@kernel(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=[*UNALIGNED, "maxima", "scales"],
)
def _weigh_by_key_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    rows: tl.tensor,
    num_tokens: tl.tensor,
    maxima: tl.tensor,
    scales: tl.tensor,
    low: tl.tensor,
    shifts: tl.tensor,
    bins: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Adds the number of logits of each bin, or their weights if there are maxima and scales."""
    place = tl.program_id(1).to(tl.int64)
    shift = tl.load(shifts + place)
    if shift >= 0:
        row = logits + tl.load(rows + place).to(tl.int64) * logits_stride
        columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
        values = tl.load(row + columns, mask=columns < num_tokens, other=float("-inf"))
        number, inside = _number(values, tl.load(low + place), shift)
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            if maxima is None:
                counts = tl.histogram(number, BINS, mask=inside).to(tl.int64)
                targets = bins + place * BINS + tl.arange(0, BINS)
                tl.atomic_add(targets, counts, mask=counts > 0, sem="relaxed")
            else:
                exponents = (values - tl.load(maxima + place)) * tl.load(scales + place)
                exponents = tl.where(inside, exponents, float("-inf"))
                weights = (tl.exp(exponents) * LARGEST_WEIGHT).to(tl.int64)
                targets = bins + place * BINS + number
                tl.atomic_add(targets, weights, mask=inside & (weights > 0), sem="relaxed")


@kernel(do_not_specialize_on_alignment=[*UNALIGNED, "targets", "above"])
def _pick_bins_kernel(
    bins: tl.tensor, targets: tl.tensor, low: tl.tensor, shifts: tl.tensor, above: tl.tensor
) -> None:
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(shifts + row)
    if shift >= 0:
        numbers = tl.arange(0, BINS)
        weights = tl.load(bins + row * BINS + numbers)
        before = tl.load(above + row)
        target = tl.load(targets + row)
        at_least = before + tl.sum(weights, axis=0) - tl.cumsum(weights, axis=0) + weights
        number = tl.max(tl.where(at_least >= target, numbers, 0), axis=0)
        reached = tl.sum(tl.where(numbers == number, at_least, 0), axis=0)
        weight = tl.sum(tl.where(numbers == number, weights, 0), axis=0)
        settled = (shift == 0) | (reached == target)
        tl.store(low + row, tl.load(low + row) + (number.to(tl.int64) << shift))
        tl.store(above + row, reached - weight)
        tl.store(shifts + row, tl.where(settled, -1, tl.maximum(shift - BIN_BITS, 0)))


@triton.jit
def _number(values: tl.tensor, low: tl.tensor, shift: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The number of each logit's bin, int32, and whether the logit is in a bin."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -SIGN, 0, bits)  # -0.0
    keys = tl.where(bits < 0, -1 - bits, bits ^ -SIGN).to(tl.uint32, bitcast=True)
    lowest = low.to(tl.uint32)
    number = (keys - lowest) >> shift.to(tl.uint32)
    inside = (keys >= lowest) & (number < BINS) & (values > float("-inf"))
    return tl.where(inside, number.to(tl.int32), 0), inside
