"""Attention on a CPU: prompt chunks through torch, decodes through a kernel of our own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from worker_svc.attention.base import AttentionBackend, AttentionShape, QKNorm
from worker_svc.kernels import cpu_features
from worker_svc.kernels.cpu.attention import decode_attention, write_cache
from worker_svc.kernels.cpu.fused import norm_and_rotate
from worker_svc.kernels.cpu.simd import bits
from worker_svc.step.decode import Step
from worker_svc.step.tensors import StepTensors

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """A sequence with more than one token in the step."""

    rows: slice  # of the step's tokens
    blocks: torch.Tensor  # [blocks that hold the context] int64
    context_len: int
    mask: torch.Tensor | None  # [query_len, context_len] bool; None: nothing is cached


@dataclass(frozen=True)
class Decodes:
    """The N sequences with one token in the step."""

    rows: Int64s  # [N] of the step's tokens
    context_lens: Int64s  # [N]
    first_blocks: Int64s  # [N] into block_table
    block_table: Int64s


@dataclass(frozen=True)
class TorchMetadata:
    positions: Int64s  # [T]
    slot_mapping: Int64s  # [T]
    chunks: list[Chunk]
    decodes: Decodes


class TorchBackend(AttentionBackend[TorchMetadata]):
    """Cache layout [2, blocks, kv_heads, block_size, head_dim]: a head's part of a block is
    contiguous."""

    name = "torch"

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        super().__init__(shape, block_size)
        self._chunk_dtype = (
            shape.dtype if cpu_features.has_bfloat16_instructions() else torch.float32
        )

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        s = self.shape
        size = (2, num_blocks, s.num_kv_heads, self.block_size, s.head_dim)
        # Left uninitialized, so that memory which no sequence has used yet stays untouched.
        return [torch.empty(size, dtype=s.dtype, device=s.device) for _ in range(s.num_layers)]

    def plan(self, step: Step, tensors: StepTensors, max_context_len: int) -> TorchMetadata:
        block_table = step.block_table.astype(np.int64)
        starts = np.cumsum(step.query_lens, dtype=np.int64) - step.query_lens
        single = step.query_lens == 1
        return TorchMetadata(
            positions=step.positions.astype(np.int64),
            slot_mapping=step.slot_mapping.astype(np.int64),
            chunks=[
                self._plan_chunk(step, int(row), int(starts[row]), block_table)
                for row in np.flatnonzero(~single)
            ],
            decodes=Decodes(
                rows=starts[single],
                context_lens=step.context_lens[single].astype(np.int64),
                first_blocks=step.block_table_offsets[:-1][single].astype(np.int64),
                block_table=block_table,
            ),
        )

    def norm_rope_store(
        self, qkv: torch.Tensor, norm: QKNorm, cache: torch.Tensor, metadata: TorchMetadata
    ) -> torch.Tensor:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qkv = qkv.view(len(qkv), -1, self.shape.head_dim)
        rotation = norm.eps, norm.cos_sin, metadata.positions
        q = norm_and_rotate(qkv, 0, heads, norm.q_weight, *rotation)
        k = norm_and_rotate(qkv, heads, kv_heads, norm.k_weight, *rotation)
        v = qkv[:, heads + kv_heads :]
        keys, values = cache
        write_cache(bits(k), bits(v), metadata.slot_mapping, bits(keys), bits(values))
        return q

    def attend(self, q: torch.Tensor, cache: torch.Tensor, metadata: TorchMetadata) -> torch.Tensor:
        keys, values = cache
        out = torch.empty(q.shape, dtype=torch.float32)
        for chunk in metadata.chunks:
            out[chunk.rows] = self._attend_chunk(q[chunk.rows], keys, values, chunk)
        decodes = metadata.decodes
        if len(decodes.rows):
            decode_attention(
                bits(q),
                bits(keys),
                bits(values),
                decodes.rows,
                decodes.context_lens,
                decodes.block_table,
                decodes.first_blocks,
                self.shape.scale,
                out.numpy(),
            )
        return out.flatten(1).to(q.dtype)

    def _plan_chunk(self, step: Step, row: int, start: int, block_table: Int64s) -> Chunk:
        query_len, context_len = int(step.query_lens[row]), int(step.context_lens[row])
        first = step.block_table_offsets[row]
        mask = None
        if query_len < context_len:
            ones = torch.ones(query_len, context_len, dtype=torch.bool)
            mask = ones.tril_(diagonal=context_len - query_len)
        return Chunk(
            rows=slice(start, start + query_len),
            blocks=torch.from_numpy(block_table[first : first - (-context_len // self.block_size)]),
            context_len=context_len,
            mask=mask,
        )

    def _attend_chunk(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Chunk
    ) -> torch.Tensor:
        """q [query_len, heads, head_dim] -> the same shape"""
        k, v = (
            # [blocks, kv_heads, block_size, head_dim] -> [1, kv_heads, context_len, head_dim]
            cache[chunk.blocks].transpose(0, 1).flatten(1, 2)[None, :, : chunk.context_len]
            for cache in (keys, values)
        )
        seen = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0).to(self._chunk_dtype),
            k.to(self._chunk_dtype),
            v.to(self._chunk_dtype),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=True,
        )
        return seen[0].transpose(0, 1)
