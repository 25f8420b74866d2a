"""Rotary position embedding with the scalings that Qwen3 configurations use."""

from __future__ import annotations

import math

import torch

from worker_svc.config import RopeConfig


def rotary_table(
    head_dim: int, max_model_len: int, rope: RopeConfig, device: torch.device
) -> torch.Tensor:
    """Cosines and sines by position, [max_model_len, 2, head_dim / 2] float32.

    Source: Su et al., "RoFormer" (2021), in the half-split layout of Hugging Face checkpoints.
    """
    inv_freq, attention_factor = inverse_frequencies(head_dim, rope)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inv_freq)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor
    return table.to(device)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """The inverse frequencies [head_dim / 2] float32, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = rope.theta**exponents
    if rope.rope_type == "yarn":
        return _yarn(head_dim, rope, frequencies)
    inv_freq = 1.0 / frequencies
    return inv_freq / rope.factor if rope.rope_type == "linear" else inv_freq, 1.0


def _yarn(head_dim: int, rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Keeps high frequencies and interpolates low ones, with a ramp between (Peng et al., "YaRN:
    Efficient Context Window Extension of Large Language Models", 2023)."""
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
