"""What the model asks of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from worker_svc.step import Step

Metadata = TypeVar("Metadata")


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one rank: its heads, not the model's."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class AttentionBackend(ABC, Generic[Metadata]):
    """Owns the layout of the paged KV cache and all that reads or writes it."""

    name: str
    default_block_size: int

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size

    @abstractmethod
    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """One uninitialized cache per layer, for `num_blocks` blocks of `block_size` tokens."""

    @abstractmethod
    def plan(self, step: Step) -> Metadata:
        """What all layers of `step` share, worked out once."""

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
    ) -> torch.Tensor:
        """Writes `k` and `v` [T, kv_heads, head_dim] to their slots of `cache`, then lets every
        query of `q` [T, heads, head_dim] see its sequence up to itself -> [T, heads * head_dim]."""
