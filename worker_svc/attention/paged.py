"""The paged KV cache on a GPU, in the layout that FlashAttention 2 and 3 and Triton all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from worker_svc.attention.base import KV_SCALE_BYTES, AttentionBackend, QKNorm
from worker_svc.kernels.triton.rope_store import rope_store
from worker_svc.step.tensors import StepTensors


@dataclass(frozen=True)
class PagedMetadata:
    tensors: StepTensors


Metadata = TypeVar("Metadata", bound=PagedMetadata)


class PagedBackend(AttentionBackend[Metadata]):
    """A cache of layout [2, blocks, block_size, kv_heads, head_dim] in the model's dtype. Only the
    Triton kernels also read a cache in 8 bits, see `kernels.triton.quantized_cache`."""

    def cache_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        s = self.shape
        columns = s.head_dim + (0 if s.kv_dtype == "auto" else KV_SCALE_BYTES)
        dtype = {"auto": s.dtype, "int8": torch.int8, "fp8": torch.uint8}[s.kv_dtype]
        return (2, num_blocks, self.block_size, s.num_kv_heads, columns), dtype

    def rope_store(
        self,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
    ) -> torch.Tensor:
        return rope_store(
            qkv,
            self.shape.num_heads,
            norm,
            cos_sin,
            metadata.tensors.positions,
            metadata.tensors.slot_mapping,
            cache,
        )


def dense_block_table(tensors: StepTensors, max_blocks: int) -> torch.Tensor:
    """The ragged block table as [S, max_blocks] int32, zeros after a sequence's last block."""
    starts, ends = tensors.table_offsets[:-1, None], tensors.table_offsets[1:, None]
    index = starts + torch.arange(max_blocks, dtype=torch.int32, device=starts.device)
    blocks = tensors.block_table[index.clamp(max=len(tensors.block_table) - 1)]
    return torch.where(index < ends, blocks, 0)
