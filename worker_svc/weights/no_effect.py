"""Recognizes tensors that a model does not have, but whose absence changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from worker_svc.errors import ModelError

# Buffers of rotary embeddings, which old checkpoints hold and which follow from config.json.
_ROTARY = re.compile(r"(.+\.)?rotary_emb\.((original_)?inv_freq|(cos|sin|cos_sin)_cached?)")
# Scales and zeros of weights, of activations and of a quantized KV cache.
_SCALE = re.compile(r"(input|output|weight|q|k|v|kv|prob|prob_output)_scale(_inv)?")
_ZERO = re.compile(r"(input|output|weight|q|k|v|kv)_zero_point")
_SCALES = "scales", "weight_scale", "weight_scale_inv"  # of the formats of quantized layers


def has_no_effect(
    name: str, has: Callable[[str], bool], read: Callable[[str], torch.Tensor]
) -> bool:
    """Whether a model may do without tensor `name`: a rotary buffer, the bias of a quantized layer
    if it is 0 (AutoGPTQ writes one for each layer), a scale of 1 or a zero point of 0.

    Args:
        has, read: as those of `WeightReader`.

    Raises:
        ModelError: the tensor is such a bias, scale or zero point, but has another value.
    """
    if _ROTARY.fullmatch(name):
        return True
    layer, _, part = name.rpartition(".")
    is_bias = part == "bias" and any(has(f"{layer}.{each}") for each in _SCALES)
    if is_bias or _ZERO.fullmatch(part):
        neutral = 0
    elif _SCALE.fullmatch(part):
        neutral = 1
    else:
        return False
    if not bool((read(name).float() == neutral).all()):
        raise ModelError(f"unknown weight: {name}: may be ignored only if all of it is {neutral}")
    return True
