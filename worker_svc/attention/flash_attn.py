"""FlashAttention 2 (Dao, 2023) for steps with prompts, on Ampere GPUs and newer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from worker_svc.attention.base import AttentionShape
from worker_svc.attention.paged import PagedBackend, PagedMetadata, dense_block_table
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors

MODULE = "flash_attn"
BLOCK_SIZE_MULTIPLE = 256  # tokens; the kernel takes no other block sizes


def load() -> bool:
    """Imports FlashAttention 2 if it is installed -> whether it has the kernel."""
    try:
        return hasattr(importlib.import_module(MODULE), "flash_attn_varlen_func")
    except (ImportError, OSError):  # missing, or built for another torch or CUDA
        return False


@dataclass(frozen=True)
class FlashMetadata2(PagedMetadata):
    block_table: torch.Tensor  # [S, blocks] int32
    context_starts: torch.Tensor  # [S+1] int32
    max_query_len: int
    max_context_len: int


class FlashAttention2(PagedBackend[FlashMetadata2]):
    """Attention in one call per layer."""

    name = "flash_attn"

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        super().__init__(shape, block_size)
        self._kernels: Any = importlib.import_module(MODULE)

    def plan(self, step: StepArrays, tensors: StepTensors, max_context_len: int) -> FlashMetadata2:
        return FlashMetadata2(
            tensors,
            block_table=dense_block_table(tensors, -(-max_context_len // self.block_size)),
            context_starts=F.pad(tensors.context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_query_len=int(step.query_lens.max()),
            max_context_len=max_context_len,
        )

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: FlashMetadata2,
        window: int | None = None,
    ) -> torch.Tensor:
        keys, values = cache
        out: torch.Tensor = self._kernels.flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=metadata.tensors.query_starts,
            cu_seqlens_k=metadata.context_starts,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_context_len,
            softmax_scale=self.shape.scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            block_table=metadata.block_table,
        )
        return out.flatten(1)
