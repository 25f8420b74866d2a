"""Attention on a CPU, in the numba kernels of `kernels.cpu`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.attention.base import AttentionBackend, AttentionShape, QKNorm
from worker_svc.errors import StartError
from worker_svc.kernels.cpu.attention import TILE_ROWS, attend
from worker_svc.kernels.cpu.attention_loops import CHUNK
from worker_svc.kernels.cpu.kv_store import cache_row, rope_store
from worker_svc.kernels.cpu.simd import LANES, bits
from worker_svc.step.decode import Step
from worker_svc.step.tensors import StepTensors

Int64s = NDArray[np.int64]
_NO_NORM = QKNorm(torch.empty(0), torch.empty(0), 0.0)


@dataclass(frozen=True)
class CpuMetadata:
    """The columns of a step of T tokens and S sequences that attention reads."""

    positions: Int64s  # [T]
    slot_mapping: Int64s  # [T]
    tiles: Int64s  # [N, 2], as `kernels.cpu.attention.attend` takes them
    query_starts: Int64s  # [S + 1]
    context_lens: Int64s  # [S]
    block_table: Int64s
    first_blocks: Int64s  # [S] into block_table


class CpuBackend(AttentionBackend[CpuMetadata]):
    """Attention on a CPU. The cache layout is [2, blocks, kv_heads, size], see
    `kernels.cpu.kv_store`.

    Raises:
        StartError: the cache cannot have this dtype or blocks of this size.
    """

    name = "torch"

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        super().__init__(shape, block_size)
        if shape.kv_dtype == "fp8":
            raise StartError("kv_dtype: fp8 is not served on a CPU; use int8")
        if block_size > CHUNK and block_size % LANES:
            raise StartError(
                f"block_size: {block_size} is over {CHUNK} and not a multiple of {LANES}, as it "
                "has to be on a CPU"
            )
        self._dtype = torch.int8 if shape.kv_dtype == "int8" else shape.dtype
        if block_size % (depth := 4 // self._dtype.itemsize):
            dtype = str(self._dtype).removeprefix("torch.")
            raise StartError(
                f"block_size: {block_size} is not a multiple of {depth}, as it has to be on a CPU "
                f"with a cache in {dtype}"
            )

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        s = self.shape
        size = cache_row(self.block_size, s.head_dim, scaled=self._dtype == torch.int8)
        # Left uninitialized, so that memory which no sequence has used yet stays untouched.
        return [
            torch.empty(2, num_blocks, s.num_kv_heads, size, dtype=self._dtype)
            for _ in range(s.num_layers)
        ]

    def plan(self, step: Step, tensors: StepTensors, max_context_len: int) -> CpuMetadata:
        query_starts = np.zeros(step.num_seqs + 1, np.int64)
        np.cumsum(step.query_lens, out=query_starts[1:])
        group = self.shape.num_heads // self.shape.num_kv_heads
        counts = -(-step.query_lens.astype(np.int64) * group // TILE_ROWS)
        sequences = np.repeat(np.arange(step.num_seqs), counts)
        within = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
        return CpuMetadata(
            positions=step.positions.astype(np.int64),
            slot_mapping=step.slot_mapping.astype(np.int64),
            tiles=np.stack((sequences, within * TILE_ROWS), axis=1),
            query_starts=query_starts,
            context_lens=step.context_lens.astype(np.int64),
            block_table=step.block_table.astype(np.int64),
            first_blocks=step.block_table_offsets[:-1].astype(np.int64),
        )

    def rope_store(
        self,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        metadata: CpuMetadata,
    ) -> torch.Tensor:
        heads, head_dim = self.shape.num_heads, self.shape.head_dim
        q = torch.empty(len(qkv), heads, head_dim)
        q_weight, k_weight, eps = norm or _NO_NORM
        rope_store(
            qkv.view(len(qkv), -1, head_dim).numpy(),
            bits(q_weight),
            bits(k_weight),
            eps,
            cos_sin.numpy(),
            metadata.positions,
            metadata.slot_mapping,
            self.block_size,
            bits(cache),
            q.numpy(),
        )
        return q

    def attend(self, q: torch.Tensor, cache: torch.Tensor, metadata: CpuMetadata) -> torch.Tensor:
        out = torch.empty(q.shape)
        attend(
            q.numpy(),
            bits(cache),
            self.block_size,
            metadata.tiles,
            metadata.query_starts,
            metadata.context_lens,
            metadata.block_table,
            metadata.first_blocks,
            self.shape.scale,
            out.numpy(),
        )
        return out.flatten(1)
