"""Qwen2 and Qwen2.5 (Yang et al., "Qwen2 Technical Report", 2024): queries, keys and values have
biases."""

from __future__ import annotations

from worker_svc.models.decoder import MLP, Attention, Decoder, DecoderLayer, Parts


def build(parts: Parts) -> Decoder:
    return Decoder(parts, _layer)


def _layer(parts: Parts, name: str) -> DecoderLayer:
    return DecoderLayer(
        parts,
        name,
        Attention(parts, f"{name}.self_attn", input_bias=True, output_bias=False),
        MLP(parts, f"{name}.mlp"),
    )
