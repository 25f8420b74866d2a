"""Conventions for logits that the kernels of every device share. They are the bounds on
temperatures and the keys that filters search."""

from __future__ import annotations

import torch

# Beyond a bound the distribution is the one at the bound, but float32 would overflow.
MIN_TEMPERATURE = 1e-30
MAX_TEMPERATURE = 1e30

# The bits of a key that the searches of `sampling.filters` settle at a time.
BIN_BITS = 8
BINS = 2**BIN_BITS
# The largest logit's weight. The weights of a vocabulary of 2²² tokens add up to less than 2⁶³.
LARGEST_WEIGHT = 2.0**40
SIGN = 2**31


def inverse_temperatures(temperatures: torch.Tensor) -> torch.Tensor:
    """The factors by which to multiply logits, 1 where the temperature is 0."""
    temperatures = temperatures.masked_fill(temperatures == 0, 1)
    return temperatures.clamp(MIN_TEMPERATURE, MAX_TEMPERATURE).reciprocal_()


def keys_of(logits: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 keys in [0, 2³²), in the order of the logits. −0.0 has the key of 0.0.

    Source: Herf, "Radix tricks" (2001).
    """
    bits = logits.masked_fill(logits == 0, 0).view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + SIGN)


def logits_of(keys: torch.Tensor) -> torch.Tensor:
    """The inverse of `keys_of`. A key that no logit has gives NaN."""
    return torch.where(keys < SIGN, -1 - keys, keys - SIGN).int().view(torch.float32)
