"""FlashAttention 3 (Shah et al., 2024) for steps with prompts, on Hopper GPUs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from worker_svc.attention.paged import PagedBackend, PagedMetadata, dense_block_table
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors

MODULE = "flash_attn_interface"
# Splits of the keys. If the library chose, `fwd` and the schedule could choose differently.
_SPLITS = 1


def load() -> bool:
    """Imports FlashAttention 3 if it is installed -> whether its operators are registered."""
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        return True
    try:
        importlib.import_module(MODULE)
    except (ImportError, OSError):  # missing, or built for another torch or CUDA
        return False
    return hasattr(torch.ops.flash_attn_3, "fwd")


@dataclass(frozen=True)
class FlashMetadata3(PagedMetadata):
    page_table: torch.Tensor  # [S, blocks] int32
    schedules: dict[int | None, torch.Tensor]  # by window
    max_query_len: int
    max_key_len: int  # of a full page table


class FlashAttention3(PagedBackend[FlashMetadata3]):
    """Attention in one call per layer. The GPU computes once per step, for all layers of a
    window, which multiprocessor gets which work."""

    name = "fa3"

    def plan(self, step: StepArrays, tensors: StepTensors, max_context_len: int) -> FlashMetadata3:
        shape = self.shape
        max_query_len = int(step.query_lens.max())
        # `fwd` takes the keys' maximum length from the page table's width.
        max_blocks = -(-max_context_len // self.block_size)
        max_key_len = max_blocks * self.block_size
        schedules = {
            window: torch.ops.flash_attn_3.get_scheduler_metadata(
                batch_size=step.num_seqs,
                max_seqlen_q=max_query_len,
                max_seqlen_k=max_key_len,
                num_heads=shape.num_heads,
                num_heads_k=shape.num_kv_heads,
                headdim=shape.head_dim,
                headdim_v=shape.head_dim,
                qkv_dtype=shape.dtype,
                seqused_k=tensors.context_lens,
                cu_seqlens_q=tensors.query_starts,
                page_size=self.block_size,
                is_causal=True,
                window_size_left=window - 1 if window else -1,
                num_splits=_SPLITS,
            )
            for window in {*shape.windows}
        }
        return FlashMetadata3(
            tensors,
            page_table=dense_block_table(tensors, max_blocks),
            schedules=schedules,
            max_query_len=max_query_len,
            max_key_len=max_key_len,
        )

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: FlashMetadata3,
        window: int | None = None,
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.flash_attn_3.fwd(
            q=q,
            k=cache[0],
            v=cache[1],
            cu_seqlens_q=metadata.tensors.query_starts,
            seqused_k=metadata.tensors.context_lens,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_key_len,
            page_table=metadata.page_table,
            softmax_scale=self.shape.scale,
            is_causal=True,
            window_size_left=window - 1 if window else -1,
            scheduler_metadata=metadata.schedules[window],
            num_splits=_SPLITS,
        )[0]
        return out.flatten(1)
