"""Gemma 3 (Gemma Team, "Gemma 3 Technical Report", 2025): norms before and after attention and MLP,
with factors of 1 + weight. Most layers have windows. Embeddings are scaled."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker_svc.errors import ModelError
from worker_svc.models.decoder import MLP, Attention, Decoder, Parts, PostNormLayer


def build(parts: Parts) -> Decoder:
    config = parts.config
    if config.dtype == torch.float16:  # its hidden states become larger than 65,504
        raise ModelError("dtype: float16 is too narrow for Gemma 3; use bfloat16")
    # The checkpoints were trained with a factor that is rounded to the model's dtype.
    scale = float(torch.tensor(config.hidden_size**0.5, dtype=config.dtype))
    config = replace(config, embedding_scale=scale)
    return Decoder(replace(parts, config=config, norm_offset=1), _layer)


def _layer(parts: Parts, name: str) -> PostNormLayer:
    attention, bias = f"{name}.self_attn", parts.config.attention_bias
    qk_norm = parts.qk_norm(f"{attention}.q_norm", f"{attention}.k_norm")
    return PostNormLayer(
        parts,
        name,
        Attention(parts, attention, qk_norm, input_bias=bias, output_bias=bias),
        MLP(parts, f"{name}.mlp"),
        "input_layernorm",
        "pre_feedforward_layernorm",
    )
