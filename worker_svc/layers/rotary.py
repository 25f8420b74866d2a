"""Rotary position embedding and its scalings for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of a rotary embedding. None stands for yarn's default."""

    rope_type: str  # one of `ROPE_TYPES`
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # yarn, llama3 and longrope
    attention_factor: float | None = None  # yarn and longrope
    # yarn
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # llama3
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    frequency_factors: tuple[float, ...] = ()  # factors
    # longrope
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    llama_4_scaling_beta: float = 0.0  # scales queries from the original maximum on
    partial_rotary_factor: float = 1.0  # of a head's channels, the first ones are rotated

    def is_long(self, max_model_len: int) -> bool:
        """Whether longrope uses its factors for long contexts."""
        is_longrope = self.rope_type == "longrope"
        return is_longrope and max_model_len > self.original_max_position_embeddings

    def rotated_size(self, head_dim: int) -> int:
        """How many channels of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)


def rotary_table(
    head_dim: int, max_model_len: int, rope: RopeConfig | None, device: torch.device
) -> torch.Tensor:
    """Cosines and sines by position, [max_model_len, 2, head_dim / 2] float32. Channels that are
    not rotated come last, with an angle of 0. Without `rope`, none are rotated.

    Source: Su et al., "RoFormer" (2021), in the half-split layout of Hugging Face checkpoints.
    """
    table = torch.zeros(max_model_len, 2, head_dim // 2, device=device)
    table[:, 0] = 1
    if rope is None:
        return table
    if rope.rope_type == "longrope":
        factors = rope.long_factor if rope.is_long(max_model_len) else rope.short_factor
        rope = replace(rope, frequency_factors=factors)
    size = rope.rotated_size(head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    scaling, _ = ROPE_TYPES[rope.rope_type]
    inv_freq, factor = scaling(rope, rope.theta**exponents)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inv_freq)
    table[:, :, : size // 2] = torch.stack((angles.cos(), angles.sin()), dim=1) * factor
    return table


def _default(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    return 1.0 / frequencies, 1.0


def _linear(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    return 1.0 / frequencies / rope.factor, 1.0


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Keeps high frequencies and interpolates low ones, with a ramp between (Peng et al., "YaRN:
    Efficient Context Window Extension of Large Language Models", 2023)."""
    head_dim = 2 * len(frequencies)
    low = _correction_dim(rope.beta_fast, head_dim, rope)
    high = _correction_dim(rope.beta_slow, head_dim, rope)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    inv_freq = (1.0 / (rope.factor * frequencies)) * (1 - kept) + (1.0 / frequencies) * kept
    return inv_freq, _yarn_attention_factor(rope)


def _correction_dim(rotations: float, head_dim: int, rope: RopeConfig) -> float:
    """The dimension whose wave makes `rotations` turns over the original context."""
    wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Interpolates waves that turn less than `low_freq_factor` times over the original context, and
    keeps those that turn more than `high_freq_factor` times, with a ramp between.

    Source: `apply_scaling` of Meta's llama-models.
    """
    inv_freq = 1.0 / frequencies
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * (1 - kept) + inv_freq * kept, 1.0


def _factors(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Divides each frequency by a factor of its own, which is how GGUF files have llama3."""
    return 1.0 / (frequencies * torch.tensor(rope.frequency_factors)), 1.0


def _longrope(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Divides each frequency by a factor of its own, and scales attention (Ding et al., "LongRoPE",
    2024). Which factors, depends on the longest sequence that is served."""
    inv_freq, factor = _factors(rope, frequencies)[0], rope.attention_factor
    if factor is None:
        original = math.log(rope.original_max_position_embeddings)
        factor = math.sqrt(1 + math.log(rope.factor) / original) if rope.factor > 1 else 1.0
    return inv_freq, factor


# Powers of theta [head_dim / 2] -> the inverse frequencies, and a factor on cosines and sines.
Scaling = Callable[[RopeConfig, torch.Tensor], tuple[torch.Tensor, float]]
# The scalings, and the fields that config.json must have for each.
ROPE_TYPES: dict[str, tuple[Scaling, tuple[str, ...]]] = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "yarn": (_yarn, ("factor",)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "factors": (_factors, ("frequency_factors",)),
    "longrope": (_longrope, ("short_factor", "long_factor")),
}
