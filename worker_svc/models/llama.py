"""Llama 2 and 3 (Touvron et al., "Llama 2", 2023; Grattafiori et al., "The Llama 3 Herd of Models",
2024), and models of their form, such as Mistral and SmolLM2."""

from __future__ import annotations

from worker_svc.models.decoder import MLP, Attention, Decoder, DecoderLayer, Parts


def build(parts: Parts) -> Decoder:
    return Decoder(parts, layer)


def layer(parts: Parts, name: str) -> DecoderLayer:
    config, bias = parts.config, parts.config.attention_bias
    return DecoderLayer(
        parts,
        name,
        Attention(parts, f"{name}.self_attn", input_bias=bias, output_bias=bias),
        MLP(parts, f"{name}.mlp", bias=config.mlp_bias),
    )
