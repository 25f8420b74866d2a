"""Qwen3 (Yang et al., "Qwen3 Technical Report", 2025), the part of it that one rank computes.

T tokens of any number of sequences run as one flat batch; only attention knows which is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from worker_svc.attention.base import AttentionBackend, AttentionShape
from worker_svc.config import ModelConfig
from worker_svc.distributed import TensorParallel
from worker_svc.errors import ModelError
from worker_svc.kernels.cpu_fused import norm_and_rotate, silu_and_multiply
from worker_svc.layers.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabPartition,
    read_vocab_shard,
)
from worker_svc.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows
from worker_svc.layers.norm import RMSNorm
from worker_svc.layers.rotary import RotaryEmbedding
from worker_svc.weights import WeightReader

Backend = AttentionBackend[Any]


class Attention:
    """Grouped-query attention with normalized queries and keys."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        tp: TensorParallel,
        backend: Backend,
        name: str,
    ) -> None:
        heads, kv_heads = local_heads(config, tp.size)
        dim = config.head_dim
        # With more ranks than key-value heads, neighbouring ranks hold the same one.
        first_kv_head = tp.rank * config.num_kv_heads // tp.size
        self.qkv_proj = ColumnParallelLinear(
            reader,
            [
                Rows(f"{name}.q_proj", tp.rank * heads * dim, heads * dim),
                Rows(f"{name}.k_proj", first_kv_head * dim, kv_heads * dim),
                Rows(f"{name}.v_proj", first_kv_head * dim, kv_heads * dim),
            ],
            config.hidden_size,
            bias=config.attention_bias,
        )
        self.q_norm = RMSNorm(reader, f"{name}.q_norm", dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(reader, f"{name}.k_norm", dim, config.rms_norm_eps)
        self.o_proj = RowParallelLinear(
            reader,
            tp,
            f"{name}.o_proj",
            config.num_heads * dim,
            config.hidden_size,
            bias=config.attention_bias,
        )
        self._backend = backend
        self._heads, self._kv_heads = heads, kv_heads
        self._head_dim = dim

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self._head_dim)  # [T, heads, head_dim]
        heads, kv_heads = self._heads, self._kv_heads
        q = norm_and_rotate(qkv, 0, heads, self.q_norm.weight, self.q_norm.eps, cos_sin)
        k = norm_and_rotate(qkv, heads, kv_heads, self.k_norm.weight, self.k_norm.eps, cos_sin)
        v = qkv[:, heads + kv_heads :]
        return self.o_proj(self._backend.attend(q, k, v, cache, metadata), residual)


class MLP:
    """The gated feed-forward layer: down(silu(gate(x)) · up(x))."""

    def __init__(
        self, reader: WeightReader, config: ModelConfig, tp: TensorParallel, name: str
    ) -> None:
        share = config.intermediate_size // tp.size
        self.gate_up_proj = ColumnParallelLinear(
            reader,
            [
                Rows(f"{name}.gate_proj", tp.rank * share, share),
                Rows(f"{name}.up_proj", tp.rank * share, share),
            ],
            config.hidden_size,
            bias=False,
        )
        self.down_proj = RowParallelLinear(
            reader,
            tp,
            f"{name}.down_proj",
            config.intermediate_size,
            config.hidden_size,
            bias=False,
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_multiply(self.gate_up_proj(x)), residual)


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        tp: TensorParallel,
        backend: Backend,
        name: str,
    ) -> None:
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(reader, f"{name}.input_layernorm", config.hidden_size, eps)
        self.attention = Attention(reader, config, tp, backend, f"{name}.self_attn")
        self.post_attention_norm = RMSNorm(
            reader, f"{name}.post_attention_layernorm", config.hidden_size, eps
        )
        self.mlp = MLP(reader, config, tp, f"{name}.mlp")

    def __call__(
        self, x: torch.Tensor, cos_sin: torch.Tensor, cache: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        x = self.attention(self.input_norm(x), x, cos_sin, cache, metadata)
        return self.mlp(self.post_attention_norm(x), x)


class Qwen3ForCausalLM:
    """Reads itself from a checkpoint.

    Raises:
        ModelError: a weight is missing, unknown or of another shape, or the model cannot be cut
            over this many ranks.
    """

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        max_model_len: int,
        tp: TensorParallel,
        backend: Backend,
    ) -> None:
        vocab = VocabPartition(config.vocab_size, tp.rank, tp.size)
        embed_name, head_name = "model.embed_tokens.weight", "lm_head.weight"
        self.embed_tokens = VocabParallelEmbedding(
            reader, tp, vocab, embed_name, config.hidden_size
        )
        self.layers = [
            DecoderLayer(reader, config, tp, backend, f"model.layers.{i}")
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(reader, "model.norm", config.hidden_size, config.rms_norm_eps)
        if config.tie_word_embeddings:
            reader.skip(head_name)  # some checkpoints carry a copy
            head = self.embed_tokens.weight
        else:
            head = read_vocab_shard(reader, vocab, head_name, config.hidden_size)
        self.lm_head = VocabParallelHead(head, vocab)
        self.rotary = RotaryEmbedding(config.head_dim, max_model_len, config.rope, reader.device)
        reader.check_all_read()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[torch.Tensor],
        metadata: Any,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """input_ids and positions [T] int64, a cache per layer, the backend's plan of the step, the
        tokens [N] whose logits are wanted -> logits [N, shard_size] of this rank."""
        x = self.embed_tokens(input_ids)
        cos_sin = self.rotary.lookup(positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cos_sin, cache, metadata)
        return self.lm_head(self.norm(x[logit_rows]))


def attention_shape(config: ModelConfig, ranks: int, device: torch.device) -> AttentionShape:
    """What one of `ranks` ranks asks of its attention backend.

    Raises:
        ModelError: the model cannot be cut into that many.
    """
    heads, kv_heads = local_heads(config, ranks)
    if config.intermediate_size % ranks:
        raise ModelError(
            f"intermediate_size: {config.intermediate_size} cannot be cut over tp = {ranks} ranks"
        )
    return AttentionShape(config.num_layers, heads, kv_heads, config.head_dim, config.dtype, device)


def local_heads(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Query heads and key-value heads of a rank.

    Raises:
        ModelError: they cannot be cut into `ranks`.
    """
    if config.num_heads % ranks:
        raise ModelError(
            f"num_attention_heads: {config.num_heads} cannot be cut over tp = {ranks} ranks"
        )
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        raise ModelError(
            f"num_key_value_heads: {config.num_kv_heads} cannot be cut or copied over "
            f"tp = {ranks} ranks"
        )
    return config.num_heads // ranks, max(config.num_kv_heads // ranks, 1)
