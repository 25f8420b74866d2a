"""SmolLM3 (Bakouch et al., "SmolLM3: smol, multilingual, long-context reasoner", 2025): some layers
have no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from worker_svc.layers.rotary import identity_table
from worker_svc.models import llama
from worker_svc.models.decoder import Decoder, DecoderLayer, Parts


def build(parts: Parts) -> Decoder:
    rotated, (length, _, half) = parts.config.rotated_layers, parts.cos_sin.shape
    identity = parts.loader.computed(lambda: identity_table(2 * half, length, parts.loader.device))
    without = replace(parts, cos_sin=identity)

    def layer(parts: Parts, name: str) -> DecoderLayer:
        number = int(name.rpartition(".")[2])
        return llama.layer(parts if rotated[number] else without, name)

    return Decoder(parts, layer)
