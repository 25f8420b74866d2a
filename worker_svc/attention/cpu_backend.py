"""Attention on a CPU, in the native library of `kernels.cpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from worker_svc.attention.base import AttentionBackend, AttentionShape, QKNorm
from worker_svc.errors import StartError
from worker_svc.kernels.cpu.program import current_trace
from worker_svc.kernels.cpu.structs import LANES, Cache
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors

_CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_CHUNK = 256  # keys that attention takes at once; see `native/attention.cpp`
_NO_WINDOW = 1 << 40  # longer than any sequence


class CpuBackend(AttentionBackend[StepTensors]):
    """Attention on a CPU, which is traced: with the number of a layer in place of its cache, and
    that of a block table in place of its plan.

    The cache layout is [2, blocks, kv_heads, size], see `native/kv_store.h`.

    Raises:
        StartError: the cache cannot have this dtype or blocks of this size.
    """

    name = "torch"

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        super().__init__(shape, block_size)
        if shape.kv_dtype == "fp8":
            raise StartError("kv_dtype: fp8 is not served on a CPU; use int8")
        if block_size > _CHUNK and block_size % LANES:
            raise StartError(
                f"block_size: {block_size} is over {_CHUNK} and not a multiple of {LANES}, as it "
                "has to be on a CPU"
            )
        self._dtype = torch.int8 if shape.kv_dtype == "int8" else shape.dtype
        if block_size % (depth := 4 // self._dtype.itemsize):
            dtype = str(self._dtype).removeprefix("torch.")
            raise StartError(
                f"block_size: {block_size} is not a multiple of {depth}, as it has to be on a CPU "
                f"with a cache in {dtype}"
            )

    def cache_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        s = self.shape
        slots = -(-self.block_size // LANES) * LANES
        scale_bytes = 4 if self._dtype == torch.int8 else 0
        size = slots * (-(-s.head_dim // LANES) * LANES + scale_bytes)
        return (2, num_blocks, s.num_kv_heads, size), self._dtype

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # Not zeros, so that memory which no sequence has used yet stays untouched.
        return torch.empty(tuple(shape), dtype=dtype)

    def plan(self, step: StepArrays, tensors: StepTensors, max_context_len: int) -> StepTensors:
        return tensors

    def cache_of(self, cache: torch.Tensor) -> Any:
        """A layer's cache, for the native library."""
        shape = self.shape
        return Cache(
            cache.data_ptr(),
            _CACHE_TYPES[cache.dtype],
            cache.stride(0) // cache.stride(1),
            self.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )

    def rope_store(
        self,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        cache: Any,
        metadata: Any,
    ) -> torch.Tensor:
        heads, head_dim = self.shape.num_heads, self.shape.head_dim
        return current_trace().rope_store(qkv, norm, cos_sin, cache, metadata, heads, head_dim)

    def attend(
        self, q: torch.Tensor, cache: Any, metadata: Any, window: int | None = None
    ) -> torch.Tensor:
        settings = self.shape.num_heads, self.shape.scale, window or _NO_WINDOW
        return current_trace().attend(q, cache, metadata, *settings)
