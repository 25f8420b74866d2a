"""The steps of the searches in `filters`, in PyTorch: what `kernels.filtering` has to equal on a
GPU and `kernels.cpu_filtering` on a CPU. It knows no Triton."""

from __future__ import annotations

import torch

from worker_svc.kernels.ops import BIN_BITS

BINS = 2**BIN_BITS
# Of the largest logit: weights of a vocabulary of 2²² tokens add up to less than 2⁶³.
LARGEST_WEIGHT = 2.0**40
SIGN = 2**31


def keys_of(logits: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in [0, 2³²) of the same order; −0.0 has the key of 0.0. (Herf, "Radix
    tricks", 2001.)"""
    bits = logits.masked_fill(logits == 0, 0).view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + SIGN)


def logits_of(keys: torch.Tensor) -> torch.Tensor:
    """The inverse of `keys_of`; keys that no logit has are those of NaN."""
    return torch.where(keys < SIGN, -1 - keys, keys - SIGN).int().view(torch.float32)


def count_by_key_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: int,
    low: torch.Tensor,
    shifts: torch.Tensor,
    bins: torch.Tensor,
) -> None:
    logits = logits[rows, :num_tokens]
    _add_to_bins(logits, torch.ones_like(logits, dtype=torch.int64), low, shifts, bins)


def weigh_by_key_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: int,
    maxima: torch.Tensor,
    scales: torch.Tensor,
    low: torch.Tensor,
    shifts: torch.Tensor,
    bins: torch.Tensor,
) -> None:
    logits = logits[rows, :num_tokens]
    weights = (logits - maxima[:, None]).mul_(scales[:, None]).exp_().mul_(LARGEST_WEIGHT)
    _add_to_bins(logits, weights.nan_to_num_(0).long(), low, shifts, bins)


def pick_bins_reference(
    bins: torch.Tensor,
    targets: torch.Tensor,
    low: torch.Tensor,
    shifts: torch.Tensor,
    above: torch.Tensor,
) -> None:
    is_open = shifts >= 0
    at_least = bins.flip(1).cumsum(1).flip(1).add_(above[:, None])
    number = (at_least >= targets[:, None]).sum(1, keepdim=True).sub_(1).clamp_(min=0)
    weight = bins.gather(1, number).squeeze(1)
    reached = at_least.gather(1, number).squeeze(1)
    low += torch.where(is_open, number.squeeze(1) << shifts.clamp(min=0), 0)
    above.copy_(torch.where(is_open, reached - weight, above))
    settled = (shifts == 0) | (reached == targets)
    following = torch.where(settled, -1, (shifts - BIN_BITS).clamp(min=0))
    shifts.copy_(torch.where(is_open, following, shifts))


def _add_to_bins(
    logits: torch.Tensor,
    weights: torch.Tensor,
    low: torch.Tensor,
    shifts: torch.Tensor,
    bins: torch.Tensor,
) -> None:
    number = (keys_of(logits) - low[:, None]) >> shifts.clamp(min=0)[:, None]
    inside = (number >= 0) & (number < BINS) & (logits > -torch.inf) & (shifts >= 0)[:, None]
    bins.scatter_add_(1, number.clamp_(0, BINS - 1), weights.masked_fill_(~inside, 0))
