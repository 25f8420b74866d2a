"""Phi-3 and Phi-4 (Abdin et al., "Phi-3 Technical Report", 2024): q, k and v are one matrix, and so
are gate and up. In Phi-4-mini a part of each head is rotated."""

from __future__ import annotations

from worker_svc.models.decoder import MLP, Attention, Decoder, DecoderLayer, Parts


def build(parts: Parts) -> Decoder:
    return Decoder(parts, _layer)


def _layer(parts: Parts, name: str) -> DecoderLayer:
    attention = f"{name}.self_attn"
    return DecoderLayer(
        parts,
        name,
        Attention(parts, attention, input_bias=False, output_bias=False, fused=True),
        MLP(parts, f"{name}.mlp", fused=True),
    )
