"""The interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from worker_svc.kv_cache import CacheLayout, NewTensor
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors
from worker_svc.step.wire import Int32s

Metadata = TypeVar("Metadata")
KvDtype = Literal["auto", "int8", "fp8"]
KV_SCALE_BYTES = 4


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one rank's attention. Heads are counted per rank, not per model."""

    # Of the layers: how many of the last tokens they see; None: all.
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    # The cache's. auto means `dtype`; others add a float32 scale per token and KV head.
    kv_dtype: KvDtype = "auto"
    multiplier: float | None = None  # of the scores, if not that of the heads' size
    # Tokens of the longest sequence whose blocks may be freed; 0: no block is freed before the end.
    max_model_len: int = 0
    stage: range | None = None  # the numbers of this rank's layers; None: all

    @property
    def cache_bytes_per_token(self) -> int:
        """The size of one token's keys and values in a layer."""
        head_bytes = self.head_dim + KV_SCALE_BYTES
        if self.kv_dtype == "auto":
            head_bytes = self.head_dim * self.dtype.itemsize
        return 2 * self.num_kv_heads * head_bytes

    @property
    def scale(self) -> float:
        """The factor on the scores before the softmax."""
        return float(self.head_dim**-0.5) if self.multiplier is None else self.multiplier


class QKNorm(NamedTuple):
    """The normalization of a layer's queries and keys, head by head, before they are rotated."""

    q_weight: torch.Tensor  # [head_dim]
    k_weight: torch.Tensor  # [head_dim]
    eps: float


class AttentionBackend(ABC, Generic[Metadata]):
    """Owns the layout of the paged KV cache and everything that reads or writes it. To a backend, a
    block is a part of `layout`: `block_size` tokens of one layer."""

    name: str

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size
        self.layout = CacheLayout.of(shape.windows, block_size, shape.max_model_len, shape.stage)

    def allocate(self, num_blocks: int, new: NewTensor | None = None) -> list[torch.Tensor]:
        """Allocates the tensors of a cache of `num_blocks` blocks, by `new` if it is given."""
        shape, dtype = self.cache_shape(num_blocks * self.layout.paging.num_parts)
        return [(new or self._new)(shape, dtype) for _ in range(self.layout.num_tensors)]

    @property
    def block_bytes(self) -> int:
        """The size of a block."""
        layout = self.layout
        num_tokens = layout.num_tensors * layout.paging.slots_per_block
        return num_tokens * self.shape.cache_bytes_per_token

    @abstractmethod
    def cache_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of a tensor with so many blocks of one layer. All its bytes may be
        zero or any that the backend has written."""

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # Zeros, because a kernel may load the unused rest of a block and give it weight 0. A NaN
        # there would survive the multiplication.
        return torch.zeros(tuple(shape), dtype=dtype, device=self.shape.device)

    def plan_column(self, step: StepArrays) -> Int32s:
        """Returns a column that `plan` needs on the device in addition to the step's columns. If
        the step only decodes, the column's length depends only on the number of sequences."""
        return step.query_lens[:0]

    @abstractmethod
    def plan(self, step: StepArrays, tensors: StepTensors, max_context_len: int) -> Metadata:
        """Computes once the metadata that all layers of `step` share.

        On a GPU, the plan of a step that only decodes uses only its number of sequences. The plan
        stays valid when a later step of as many sequences overwrites `tensors`, with contexts up to
        `max_context_len`.
        """

    @abstractmethod
    def rope_store(
        self,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
    ) -> torch.Tensor:
        """qkv [T, (heads + 2 · kv_heads) · head_dim] -> the queries [T, heads, head_dim].

        Normalizes queries and keys if there is a norm, and rotates them by cos_sin
        (`layers.rotary.rotary_table`). Stores keys and values in their slots of `cache`.
        """

    @abstractmethod
    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, metadata: Metadata, window: int | None = None
    ) -> torch.Tensor:
        """Computes causal attention of the queries `q` [T, heads, head_dim], each over its own
        sequence -> [T, heads * head_dim]. With a window of the shape's, a query sees itself and the
        window - 1 positions before it."""


Backend = AttentionBackend[Any]
