"""Conventions for logits in the kernels of every device: bounds on the temperature that divides
them, and the keys that filters search."""

from __future__ import annotations

import torch

# Beyond these bounds the distribution is the same as at them, but float32 overflows.
MIN_TEMPERATURE = 1e-30
MAX_TEMPERATURE = 1e30

# Bits of a logit's key that the searches of `sampling.filters` settle at a time.
BIN_BITS = 8
BINS = 2**BIN_BITS
# The largest logit's weight: those of a vocabulary of 2²² tokens add up to less than 2⁶³.
LARGEST_WEIGHT = 2.0**40
SIGN = 2**31


def inverse_temperatures(temperatures: torch.Tensor) -> torch.Tensor:
    """The factors to multiply logits by; 1 where the temperature is 0."""
    temperatures = temperatures.masked_fill(temperatures == 0, 1)
    return temperatures.clamp(MIN_TEMPERATURE, MAX_TEMPERATURE).reciprocal_()


def keys_of(logits: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in [0, 2³²) of the same order; −0.0 has the key of 0.0. (Herf, "Radix
    tricks", 2001.)"""
    bits = logits.masked_fill(logits == 0, 0).view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + SIGN)


def logits_of(keys: torch.Tensor) -> torch.Tensor:
    """The inverse of `keys_of`; keys that no logit has give NaN."""
    return torch.where(keys < SIGN, -1 - keys, keys - SIGN).int().view(torch.float32)
