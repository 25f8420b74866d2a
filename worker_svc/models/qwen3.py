"""Qwen3 (Yang et al., "Qwen3 Technical Report", 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from worker_svc.models.decoder import MLP, Attention, Parts, last_of_each
from worker_svc.step.tensors import StepTensors


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). Queries and keys are normalized.

    The next layer's norm computes the last sum, because a norm adds and normalizes in one pass.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        attention, bias = f"{name}.self_attn", parts.config.attention_bias
        qk_norm = parts.qk_norm(f"{attention}.q_norm", f"{attention}.k_norm")
        self.input_norm = parts.norm(f"{name}.input_layernorm")
        self.attention = Attention(parts, attention, qk_norm, input_bias=bias, output_bias=bias)
        self.post_attention_norm = parts.norm(f"{name}.post_attention_layernorm")
        self.mlp = MLP(parts, f"{name}.mlp")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: torch.Tensor, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the residual to add to it -> x and residual for the next layer, all [T, hidden]."""
        x, residual = self.input_norm(x, residual)
        x = self.attention(x, cache, metadata)
        x, residual = self.post_attention_norm(x, residual)
        return self.mlp(x), residual


class Qwen3ForCausalLM:
    """Implements `registry.Model`."""

    def __init__(self, parts: Parts) -> None:
        layers = range(parts.config.num_layers)
        self.embed_tokens = parts.embedding("model.embed_tokens")
        self.layers = [DecoderLayer(parts, f"model.layers.{i}") for i in layers]
        self.norm = parts.norm("model.norm")
        self.lm_head = parts.head("lm_head", self.embed_tokens)

    def hidden_states(
        self,
        tensors: StepTensors,
        last_tokens: torch.Tensor,
        caches: Sequence[torch.Tensor],
        metadata: Any,
        *,
        every_token: bool = False,
    ) -> torch.Tensor:
        x, residual = self.embed_tokens(tensors.input_ids, last_tokens), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, cache, metadata)
        if residual is not None and not every_token:
            x, residual = last_of_each(tensors, x, residual)
        x, _ = self.norm(x, residual)
        return x
