"""Gemma 3 (Gemma Team, "Gemma 3 Technical Report", 2025): norms before and after attention and MLP,
with factors of 1 + weight. Most layers have windows. Embeddings are scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from worker_svc.models.decoder import MLP, Attention, Decoder, DecoderLayer, Parts


def build(parts: Parts) -> Decoder:
    config = parts.config
    # The checkpoints were trained with a factor that is rounded to the model's dtype.
    scale = float(torch.tensor(config.hidden_size**0.5, dtype=config.dtype))
    config = replace(config, embedding_scale=scale)
    return Decoder(replace(parts, config=config, norm_offset=1), _Gemma3Layer)


class _Gemma3Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, parts: Parts, name: str) -> None:
        attention, bias = f"{name}.self_attn", parts.config.attention_bias
        qk_norm = parts.qk_norm(f"{attention}.q_norm", f"{attention}.k_norm")
        super().__init__(
            parts,
            name,
            Attention(parts, attention, qk_norm, input_bias=bias, output_bias=bias),
            MLP(parts, f"{name}.mlp"),
            middle_norm="pre_feedforward_layernorm",
        )
        self._after_attention = parts.norm(f"{name}.post_attention_layernorm")
        self._after_mlp = parts.norm(f"{name}.post_feedforward_layernorm")

    def attend(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: torch.Tensor, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super().attend(x, residual, cache, metadata)
        return self._after_attention(x, None)[0], residual

    def transform(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super().transform(x, residual)
        return self._after_mlp(x, None)[0], residual
