"""OLMo 2 and 3 (OLMo Team, "2 OLMo 2 Furious", 2024, and "Olmo 3", 2025): norms after attention and
MLP only, and norms of all queries and keys together."""

from __future__ import annotations

from worker_svc.models.decoder import MLP, Attention, Decoder, Parts, PostNormLayer


def build(parts: Parts) -> Decoder:
    return Decoder(parts, _layer)


def _layer(parts: Parts, name: str) -> PostNormLayer:
    attention, bias = f"{name}.self_attn", parts.config.attention_bias
    norm = parts.joint_norm(f"{attention}.q_norm", f"{attention}.k_norm")
    return PostNormLayer(
        parts,
        name,
        Attention(parts, attention, joint_norm=norm, input_bias=bias, output_bias=bias),
        MLP(parts, f"{name}.mlp"),
        None,
        None,
    )
