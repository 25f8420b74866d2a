"""Qwen3 (Yang et al., "Qwen3 Technical Report", 2025): queries and keys are normalized. Some models
have mixtures of experts."""

from __future__ import annotations

from worker_svc.models.decoder import Attention, Decoder, DecoderLayer, Parts, feed_forward


def build(parts: Parts) -> Decoder:
    return Decoder(parts, _layer)


def _layer(parts: Parts, name: str) -> DecoderLayer:
    attention, bias = f"{name}.self_attn", parts.config.attention_bias
    qk_norm = parts.qk_norm(f"{attention}.q_norm", f"{attention}.k_norm")
    return DecoderLayer(
        parts,
        name,
        Attention(parts, attention, qk_norm, input_bias=bias, output_bias=bias),
        feed_forward(parts, f"{name}.mlp"),
    )
