"""The parts that families of decoders share, each as one rank's share.

T tokens of any number of sequences run as one flat batch. Only attention knows which token belongs
to which sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker_svc.attention.base import AttentionShape, Backend, KvDtype, QKNorm
from worker_svc.errors import ModelError
from worker_svc.kernels.ops import Experts, Ops
from worker_svc.layers.embedding import VocabParallelEmbedding, VocabParallelHead, VocabPartition
from worker_svc.layers.experts import MixtureOfExperts
from worker_svc.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker_svc.layers.norm import JointNorm, RMSNorm, norm_weight
from worker_svc.layers.rotary import RopeConfig
from worker_svc.loader import Rows, WeightLoader
from worker_svc.models.config import ModelConfig
from worker_svc.ranks.distributed import Pipeline, TensorParallel
from worker_svc.step.tensors import StepTensors

# The names of weights in a checkpoint.
EMBEDDING, LAYERS, NORM, HEAD = "model.embed_tokens", "model.layers", "model.norm", "lm_head"


@dataclass(frozen=True)
class Parts:
    """Makes layers, and holds the objects with which every layer is built. The `name` of a layer is
    the name of its weights in the checkpoint."""

    config: ModelConfig
    loader: WeightLoader
    ops: Ops
    tp: TensorParallel
    backend: Backend
    tables: Mapping[RopeConfig | None, torch.Tensor]  # `rotary_table`, by what it is made of
    pipeline: Pipeline
    stage: range  # the numbers of this rank's layers
    norm_offset: int = 0  # added to the weights of norms
    number: int = 0  # of the layer whose parts these are

    def of_layer(self, number: int) -> Parts:
        return replace(self, number=number)

    def norm(self, name: str, scale: float = 1.0) -> RMSNorm:
        config = self.config
        weight = norm_weight(self.loader, name, config.hidden_size, self.norm_offset, scale)
        return RMSNorm(self.ops, weight, config.rms_norm_eps)

    def qk_norm(self, q_name: str, k_name: str) -> QKNorm:
        """The norm that `Attention` takes."""
        dim, offset = self.config.head_dim, self.norm_offset
        q_weight, k_weight = (
            norm_weight(self.loader, name, dim, offset) for name in (q_name, k_name)
        )
        return QKNorm(q_weight, k_weight, self.config.rms_norm_eps)

    def joint_norm(self, q_name: str, k_name: str) -> JointNorm:
        """The norm over all heads that `Attention` takes."""
        config, tp = self.config, self.tp
        sizes = tuple(count * config.head_dim for count in local_heads(config, tp.size))
        starts = tp.rank * sizes[0], _first_kv_head(config, tp) * config.head_dim
        weights = [
            self.loader.vector(f"{name}.weight", size, start)
            for name, size, start in zip((q_name, k_name), sizes, starts, strict=True)
        ]
        weight = self.loader.computed(lambda: torch.cat(weights))
        return JointNorm(self.ops, tp, weight, (sizes[0], sizes[1]), config.rms_norm_eps)

    def embedding(self, name: str) -> VocabParallelEmbedding:
        sizes = self._vocab, name, self.config.hidden_size, self.config.embedding_scale
        return VocabParallelEmbedding(self.loader, self.ops, self.tp, *sizes)

    def head(self, name: str, embedding: VocabParallelEmbedding | None) -> VocabParallelHead:
        """Makes the output head, with the weights of the embedding if the configuration ties them.
        Some checkpoints hold a copy, which is not loaded. If it differs, it is the head, because
        transformers 5 does not tie such weights either. The embedding may be on another stage."""
        config, vocab = self.config, self._vocab
        rows = vocab.rows(name)
        if config.tie_word_embeddings and not self.loader.differs(rows, EMBEDDING):
            if embedding:
                return VocabParallelHead(self.loader.tied_head(embedding.weight))
            rows = vocab.rows(EMBEDDING)
        weight = self.loader.head(rows, vocab.shard_size, config.hidden_size)
        return VocabParallelHead(weight)

    @property
    def _vocab(self) -> VocabPartition:
        return VocabPartition(self.config.vocab_size, self.tp.rank, self.tp.size)


class Attention:
    """Grouped-query attention whose queries and keys are rotated, after `norm` if there is one.

    Args:
        joint_norm: a norm over all heads.
        input_bias: whether q, k and v have biases.
        output_bias: whether the output projection has one.
        fused: whether the checkpoint has q, k and v in one matrix, `qkv_proj`.
    """

    def __init__(
        self,
        parts: Parts,
        name: str,
        norm: QKNorm | None = None,
        *,
        joint_norm: JointNorm | None = None,
        input_bias: bool,
        output_bias: bool,
        fused: bool = False,
    ) -> None:
        config, loader, tp = parts.config, parts.loader, parts.tp
        heads, kv_heads = local_heads(config, tp.size)
        dim = config.head_dim
        first_kv_head = _first_kv_head(config, tp)
        names, starts = [f"{name}.{each}_proj" for each in "qkv"], [0, 0, 0]
        if fused:
            names = [f"{name}.qkv_proj"] * 3
            starts = [0, config.num_heads * dim, (config.num_heads + config.num_kv_heads) * dim]
        if (norm or joint_norm) and config.rope.rotated_size(dim) != dim:
            raise ModelError("partial_rotary_factor: must be 1 in heads that are normalized")
        q, k = (
            _rotated_rows(Rows(names[i], starts[i] + first * dim, count * dim), config)
            for i, first, count in ((0, tp.rank * heads, heads), (1, first_kv_head, kv_heads))
        )
        v = Rows(names[2], starts[2] + first_kv_head * dim, kv_heads * dim)
        self.qkv_proj = ColumnParallelLinear(
            loader, [*q, *k, v], config.hidden_size, bias=input_bias
        )
        self.o_proj = RowParallelLinear(
            loader,
            tp,
            f"{name}.o_proj",
            config.num_heads * dim,
            config.hidden_size,
            bias=output_bias,
        )
        self._norm, self._joint_norm = norm, joint_norm
        self._window, rope = config.layers[parts.number]
        self._table = parts.backend.layout.places[parts.number - parts.stage.start].table
        self._cos_sin = parts.tables[rope]
        self._backend = parts.backend

    def __call__(self, x: torch.Tensor, cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        qkv = self.qkv_proj(x)
        if self._joint_norm:
            qkv = self._joint_norm(qkv)
        of_table = metadata[self._table]
        q = self._backend.rope_store(qkv, self._norm, self._cos_sin, cache, of_table)
        return self.o_proj(self._backend.attend(q, cache, of_table, self._window))


class MLP:
    """The gated feed-forward layer: down(activation(gate(x)) · up(x)).

    Args:
        fused: whether the checkpoint has gate and up in one matrix, `gate_up_proj`.
    """

    def __init__(self, parts: Parts, name: str, *, bias: bool = False, fused: bool = False) -> None:
        config, loader, tp = parts.config, parts.loader, parts.tp
        share = config.intermediate_size // tp.size
        gate = Rows(f"{name}.gate_proj", tp.rank * share, share)
        up = Rows(f"{name}.up_proj", tp.rank * share, share)
        if fused:
            gate = replace(gate, name=f"{name}.gate_up_proj")
            up = replace(gate, start=config.intermediate_size + gate.start)
        self.gate_up_proj = ColumnParallelLinear(loader, [gate, up], config.hidden_size, bias=bias)
        self.down_proj = RowParallelLinear(
            loader,
            tp,
            f"{name}.down_proj",
            config.intermediate_size,
            config.hidden_size,
            bias=bias,
        )
        self._ops, self._activation = parts.ops, config.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        gate_up = self.gate_up_proj(x)
        return self.down_proj(self._ops.activate_and_multiply(gate_up, self._activation))


def feed_forward(parts: Parts, name: str) -> MLP | MixtureOfExperts:
    """Makes the MLP of a layer, or the mixture of experts that takes its place."""
    config, tp, experts = parts.config, parts.tp, parts.config.experts
    if experts is None or parts.number not in experts.layers:
        return MLP(parts, name)
    count = experts.count
    own = range(tp.rank * count // tp.size, (tp.rank + 1) * count // tp.size)
    mixture = Experts(count, own, experts.per_token, experts.normalized, config.activation)
    sizes = config.hidden_size, experts.size
    return MixtureOfExperts(parts.loader, parts.ops, tp, name, mixture, *sizes)


def _rotated_rows(rows: Rows, config: ModelConfig) -> list[Rows]:
    """The rows of whole heads of q or k, in an order in which the channels that are rotated with
    each other are half a head apart. If the whole head is rotated, they are."""
    dim = config.head_dim
    size = config.rope.rotated_size(dim)
    if size == dim:
        return [rows]
    half, rest = size // 2, (dim - size) // 2
    pieces = ((0, half), (size, rest), (half, half), (size + rest, rest))
    return [
        Rows(rows.name, head + start, count)
        for head in range(rows.start, rows.start + rows.count, dim)
        for start, count in pieces
    ]


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The next layer's norm computes the last sum, because a norm adds and normalizes in one pass.

    Args:
        input_norm, middle_norm: the names of the norms before `attention` and `mlp`, if there are
            any.
    """

    def __init__(
        self,
        parts: Parts,
        name: str,
        attention: Attention,
        mlp: MLP | MixtureOfExperts,
        input_norm: str | None = "input_layernorm",
        middle_norm: str | None = "post_attention_layernorm",
    ) -> None:
        def norm(own_name: str | None) -> RMSNorm:
            return parts.norm(f"{name}.{own_name}") if own_name else RMSNorm(parts.ops, None, 0.0)

        self.input_norm = norm(input_norm)
        self.attention = attention
        self.middle_norm = norm(middle_norm)
        self.mlp = mlp

    def attend(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: torch.Tensor, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first sum: x and the residual to add to it -> x and residual, all [T, hidden]."""
        x, residual = self.input_norm(x, residual)
        return self.attention(x, cache, metadata), residual

    def transform(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The second sum, for any of the rows: x and residual -> those for the next layer."""
        x, residual = self.middle_norm(x, residual)
        return self.mlp(x), residual


class PostNormLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self,
        parts: Parts,
        name: str,
        attention: Attention,
        mlp: MLP,
        input_norm: str | None,
        middle_norm: str | None,
    ) -> None:
        super().__init__(parts, name, attention, mlp, input_norm, middle_norm)
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


class Decoder:
    """Embedding, layers, a norm and the output head, of which one rank computes its part. In a
    pipeline, the first stage has the embedding, the last one norm and head, and each has some of
    the layers.

    Args:
        layer: makes a layer from the name of its weights.
    """

    def __init__(self, parts: Parts, layer: Callable[[Parts, str], DecoderLayer]) -> None:
        pipeline = parts.pipeline
        self.embed_tokens = parts.embedding(EMBEDDING) if pipeline.is_first else None
        self.layers = [layer(parts.of_layer(n), f"{LAYERS}.{n}") for n in parts.stage]
        self.norm = RMSNorm(parts.ops, None, 0.0)  # only adds the residual
        self.lm_head: VocabParallelHead | None = None
        if pipeline.is_last:
            self.norm = parts.norm(NORM, parts.config.output_scale)
            self.lm_head = parts.head(HEAD, self.embed_tokens)
        self._ops, self._pipeline, self._config = parts.ops, pipeline, parts.config

    def hidden_states(
        self,
        tensors: StepTensors,
        last_tokens: torch.Tensor,
        caches: Sequence[torch.Tensor],
        metadata: Any,
        *,
        every_token: bool = False,
    ) -> torch.Tensor:
        """Runs the layers on a step -> the input of `lm_head`, which is the normalized hidden
        states [S, hidden] of each sequence's last token, or [T, hidden] of every token. A stage
        that is not the last one passes those of every token on, and returns them.

        last_tokens [R] int32 are the tokens that the previous step sampled. caches has one cache
        per layer, and metadata is the backend's plan of the step for each block table.
        """
        if self.embed_tokens:
            x = self.embed_tokens(tensors.input_ids, last_tokens)
        else:
            size, dtype = self._config.hidden_size, self._config.dtype
            x = self._pipeline.receive(self._ops.new_rows(tensors.input_ids, size, dtype))
        residual, picks = None, not every_token and self._pipeline.is_last
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer.attend(x, residual, cache, metadata)
            if layer is self.layers[-1] and picks:
                x = self._ops.last_rows(x, tensors.query_starts)
                residual = self._ops.last_rows(residual, tensors.query_starts)
            x, residual = layer.transform(x, residual)
        x, _ = self.norm(x, residual)
        return x if self._pipeline.is_last else self._pipeline.send(x)


def attention_shape(
    config: ModelConfig,
    ranks: int,
    device: torch.device,
    kv_dtype: KvDtype = "auto",
    max_model_len: int = 0,
    stage: range | None = None,
) -> AttentionShape:
    """The shape of attention on one of `ranks` ranks. For `max_model_len` and `stage`, see there.

    Raises:
        ModelError: the model cannot be split across that many ranks.
    """
    heads, kv_heads = local_heads(config, ranks)
    if config.experts and config.experts.count < ranks:
        raise ModelError(
            f"num_experts: {config.experts.count} cannot be split over tp = {ranks} ranks"
        )
    if config.has_mlp and config.intermediate_size % ranks:
        raise ModelError(
            f"intermediate_size: {config.intermediate_size} cannot be split over tp = {ranks} ranks"
        )
    return AttentionShape(
        tuple(layer.window for layer in config.layers),
        heads,
        kv_heads,
        config.head_dim,
        config.dtype,
        device,
        kv_dtype,
        config.attention_multiplier,
        max_model_len,
        stage,
    )


def _first_kv_head(config: ModelConfig, tp: TensorParallel) -> int:
    # With more ranks than key-value heads, neighbouring ranks hold copies of one head.
    return tp.rank * config.num_kv_heads // tp.size


def local_heads(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """The numbers of query heads and key-value heads of a rank.

    Raises:
        ModelError: the heads cannot be split across `ranks` ranks.
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
