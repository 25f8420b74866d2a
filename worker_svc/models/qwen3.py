"""Qwen3 (Yang et al., "Qwen3 Technical Report", 2025), the part of it that one rank computes.

T tokens of any number of sequences run as one flat batch; only attention knows which is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker_svc.attention.base import AttentionShape, Backend, QKNorm
from worker_svc.config import ModelConfig
from worker_svc.distributed import TensorParallel
from worker_svc.errors import ModelError
from worker_svc.kernels.ops import Ops
from worker_svc.layers.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabPartition,
)
from worker_svc.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker_svc.layers.norm import RMSNorm
from worker_svc.layers.rotary import rotary_table
from worker_svc.loader import Rows, WeightLoader
from worker_svc.step.tensors import StepTensors


@dataclass(frozen=True)
class Parts:
    """The parts that all layers are built with."""

    config: ModelConfig
    loader: WeightLoader
    ops: Ops
    tp: TensorParallel
    backend: Backend
    cos_sin: torch.Tensor  # `rotary_table`


class Attention:
    """Grouped-query attention with normalized queries and keys."""

    def __init__(self, parts: Parts, name: str) -> None:
        config, loader, tp = parts.config, parts.loader, parts.tp
        heads, kv_heads = local_heads(config, tp.size)
        dim = config.head_dim
        # With more ranks than key-value heads, neighbouring ranks hold the same one.
        first_kv_head = tp.rank * config.num_kv_heads // tp.size
        self.qkv_proj = ColumnParallelLinear(
            loader,
            [
                Rows(f"{name}.q_proj", tp.rank * heads * dim, heads * dim),
                Rows(f"{name}.k_proj", first_kv_head * dim, kv_heads * dim),
                Rows(f"{name}.v_proj", first_kv_head * dim, kv_heads * dim),
            ],
            config.hidden_size,
            bias=config.attention_bias,
        )
        q_norm = loader.vector(f"{name}.q_norm.weight", dim)
        k_norm = loader.vector(f"{name}.k_norm.weight", dim)
        self.qk_norm = QKNorm(q_norm, k_norm, config.rms_norm_eps, parts.cos_sin)
        self.o_proj = RowParallelLinear(
            loader,
            tp,
            f"{name}.o_proj",
            config.num_heads * dim,
            config.hidden_size,
            bias=config.attention_bias,
        )
        self._backend = parts.backend

    def __call__(self, x: torch.Tensor, cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        qkv = self.qkv_proj(x)
        q = self._backend.norm_rope_store(qkv, self.qk_norm, cache, metadata)
        return self.o_proj(self._backend.attend(q, cache, metadata))


class MLP:
    """The gated feed-forward layer: down(silu(gate(x)) · up(x))."""

    def __init__(self, parts: Parts, name: str) -> None:
        config, loader, tp = parts.config, parts.loader, parts.tp
        share = config.intermediate_size // tp.size
        self.gate_up_proj = ColumnParallelLinear(
            loader,
            [
                Rows(f"{name}.gate_proj", tp.rank * share, share),
                Rows(f"{name}.up_proj", tp.rank * share, share),
            ],
            config.hidden_size,
            bias=False,
        )
        self.down_proj = RowParallelLinear(
            loader,
            tp,
            f"{name}.down_proj",
            config.intermediate_size,
            config.hidden_size,
            bias=False,
        )
        self._ops = parts.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down_proj(self._ops.silu_and_multiply(self.gate_up_proj(x)))


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the last sum is left to the next layer's norm,
    which does both in one pass."""

    def __init__(self, parts: Parts, name: str) -> None:
        self.input_norm = _norm(parts, f"{name}.input_layernorm")
        self.attention = Attention(parts, f"{name}.self_attn")
        self.post_attention_norm = _norm(parts, f"{name}.post_attention_layernorm")
        self.mlp = MLP(parts, f"{name}.mlp")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: torch.Tensor, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the residual to add it to -> the same for the next layer, all [T, hidden]."""
        x, residual = self.input_norm(x, residual)
        x = self.attention(x, cache, metadata)
        x, residual = self.post_attention_norm(x, residual)
        return self.mlp(x), residual


class Qwen3ForCausalLM:
    """Reads itself from a checkpoint.

    Raises:
        ModelError: a weight is missing, unknown or of another shape, or the model cannot be split
            across this many ranks.
    """

    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        max_model_len: int,
        ops: Ops,
        tp: TensorParallel,
        backend: Backend,
    ) -> None:
        cos_sin = rotary_table(config.head_dim, max_model_len, config.rope, loader.device)
        parts = Parts(config, loader, ops, tp, backend, cos_sin)
        vocab = VocabPartition(config.vocab_size, tp.rank, tp.size)
        embed_name, head_name = "model.embed_tokens", "lm_head"
        self.embed_tokens = VocabParallelEmbedding(
            loader, ops, tp, vocab, embed_name, config.hidden_size
        )
        self.layers = [DecoderLayer(parts, f"model.layers.{i}") for i in range(config.num_layers)]
        self.norm = _norm(parts, "model.norm")
        if config.tie_word_embeddings:
            loader.skip(head_name)  # some checkpoints carry a copy
            head = loader.tied_head(self.embed_tokens.weight)
        else:
            head = loader.head(vocab.rows(head_name), vocab.shard_size, config.hidden_size)
        self.lm_head = VocabParallelHead(head)
        loader.finish()

    def hidden_states(
        self,
        tensors: StepTensors,
        last_tokens: torch.Tensor,
        caches: Sequence[torch.Tensor],
        metadata: Any,
        *,
        every_token: bool = False,
    ) -> torch.Tensor:
        """A step, the tokens [R] int32 that the previous step sampled, a cache per layer and the
        backend's plan of the step -> the input of `lm_head`: the normalized hidden states
        [S, hidden] after each sequence's last token, or [T, hidden] after every token."""
        x, residual = self.embed_tokens(tensors.input_ids, last_tokens), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, cache, metadata)
        few = len(tensors.context_lens) < len(tensors.input_ids) and not every_token
        if residual is not None and few:
            last = tensors.query_starts[1:] - 1
            x, residual = x[last], residual[last]
        x, _ = self.norm(x, residual)
        return x


def _norm(parts: Parts, name: str) -> RMSNorm:
    config = parts.config
    return RMSNorm(parts.loader, parts.ops, name, config.hidden_size, config.rms_norm_eps)


def attention_shape(config: ModelConfig, ranks: int, device: torch.device) -> AttentionShape:
    """The shape that one of `ranks` ranks asks of its attention backend.

    Raises:
        ModelError: the model cannot be split across that many.
    """
    heads, kv_heads = local_heads(config, ranks)
    if config.intermediate_size % ranks:
        raise ModelError(
            f"intermediate_size: {config.intermediate_size} cannot be split over tp = {ranks} ranks"
        )
    return AttentionShape(config.num_layers, heads, kv_heads, config.head_dim, config.dtype, device)


def local_heads(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """The numbers of query heads and key-value heads of a rank.

    Raises:
        ModelError: they cannot be split across `ranks`.
    """
    if config.num_heads % ranks:
        raise ModelError(
            f"num_attention_heads: {config.num_heads} cannot be split over tp = {ranks} ranks"
        )
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        raise ModelError(
            f"num_key_value_heads: {config.num_kv_heads} cannot be split or copied over "
            f"tp = {ranks} ranks"
        )
    return config.num_heads // ranks, max(config.num_kv_heads // ranks, 1)
