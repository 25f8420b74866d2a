"""The paged KV cache on a GPU, in the layout that FlashAttention 2 and 3 and Triton all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from worker_svc.attention.base import KV_SCALE_BYTES, AttentionBackend, QKNorm
from worker_svc.kernels.triton.rope_store import rope_store
from worker_svc.step.decode import Step
from worker_svc.step.tensors import StepTensors
from worker_svc.step.wire import Int32s


@dataclass(frozen=True)
class PagedMetadata:
    tensors: StepTensors


Metadata = TypeVar("Metadata", bound=PagedMetadata)


class PagedBackend(AttentionBackend[Metadata]):
    """A cache of layout [2, blocks, block_size, kv_heads, head_dim] in the model's dtype. Only the
    Triton kernels also read a cache in 8 bits, see `kernels.triton.quantized_cache`."""

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        s = self.shape
        columns = s.head_dim + (KV_SCALE_BYTES if s.kv_dtype == "int8" else 0)
        dtype = {"auto": s.dtype, "int8": torch.int8, "fp8": torch.uint8}[s.kv_dtype]
        size = (2, num_blocks, self.block_size, s.num_kv_heads, columns)
        # Zeros, because a kernel may load the unused rest of a block and give it weight 0. A NaN
        # there would survive the multiplication.
        return [torch.zeros(size, dtype=dtype, device=s.device) for _ in range(s.num_layers)]

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


@dataclass(frozen=True)
class PhaseMetadata(PagedMetadata):
    backend: PagedBackend[Any]
    metadata: PagedMetadata


class PerPhase(PagedBackend[PhaseMetadata]):
    """Uses one backend for steps with prompts and another for steps that only decode, on one cache.
    Its name is the name of the backend for prompts."""

    def __init__(self, prompts: PagedBackend[Any], decodes: PagedBackend[Any]) -> None:
        super().__init__(prompts.shape, prompts.block_size)
        self.name = prompts.name
        self._prompts = prompts
        self._decodes = decodes

    def plan_column(self, step: Step) -> Int32s:
        return self._backend(step).plan_column(step)

    def plan(self, step: Step, tensors: StepTensors, max_context_len: int) -> PhaseMetadata:
        backend = self._backend(step)
        return PhaseMetadata(tensors, backend, backend.plan(step, tensors, max_context_len))

    def attend(self, q: torch.Tensor, cache: torch.Tensor, metadata: PhaseMetadata) -> torch.Tensor:
        return metadata.backend.attend(q, cache, metadata.metadata)

    def _backend(self, step: Step) -> PagedBackend[Any]:
        return self._decodes if step.decodes_only else self._prompts


def dense_block_table(tensors: StepTensors, max_blocks: int) -> torch.Tensor:
    """The ragged block table as [S, max_blocks] int32, zeros after a sequence's last block."""
    starts, ends = tensors.table_offsets[:-1, None], tensors.table_offsets[1:, None]
    index = starts + torch.arange(max_blocks, dtype=torch.int32, device=starts.device)
    blocks = tensors.block_table[index.clamp(max=len(tensors.block_table) - 1)]
    return torch.where(index < ends, blocks, 0)
