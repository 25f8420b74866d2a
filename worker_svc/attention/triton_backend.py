"""Attention in Triton kernels, which every GPU can run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.attention.base import AttentionShape
from worker_svc.attention.paged import PagedBackend, PagedMetadata
from worker_svc.errors import StartError
from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton import prompt_attention as prompting
from worker_svc.kernels.triton.decode_attention import (
    choose_splits,
    decode_attention,
    decode_workspace,
)
from worker_svc.kernels.triton.paged_attention import Tiling, converts_e4m3
from worker_svc.kernels.triton.prompt_attention import prompt_attention, query_tiles, tile_tokens
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors
from worker_svc.step.wire import Int32s


@dataclass(frozen=True)
class TritonMetadata(PagedMetadata):
    # The sequences with one token in the step, longest first, [N] int32; or their tiles, [N, 2].
    decodes: torch.Tensor
    tiles: torch.Tensor  # [n, 2] int32, the queries of the other sequences, see `query_tiles`
    splits: int
    tiling: Tiling | None  # of the decodes, if they have a kernel of their own
    workspace: torch.Tensor


class TritonBackend(PagedBackend[TritonMetadata]):
    """Runs a step's decodes in one kernel and its prompt chunks in another.

    If bits must not depend on other rows, the kernel of chunks also runs the decodes. Then it makes
    no difference whether a token is computed alone, in a chunk, or as a draft.
    """

    name = "triton"

    def __init__(self, shape: AttentionShape, block_size: int, num_sms: int) -> None:
        super().__init__(shape, block_size)
        self._num_sms = num_sms
        self._reads_e4m3 = shape.kv_dtype == "fp8" and converts_e4m3()
        self._segment = batch_invariance.SEGMENT if batch_invariance.is_on() else 0
        self._room = torch.empty(0)  # of `_workspace`
        small = shape.kv_dtype != "auto" or self._segment > 0
        self._prompt_tiling = prompting.choose_tiling(shape.head_dim, shape.dtype, small=small)
        group = shape.num_heads // shape.num_kv_heads
        self._tile_tokens = tile_tokens(shape.head_dim, group, shape.dtype, small=small)
        if not self._tile_tokens:
            limit = tile_tokens(shape.head_dim, 1, shape.dtype, small=small)
            raise StartError(f"attention: {group} query heads per KV head; the limit is {limit}")

    def plan_column(self, step: StepArrays) -> Int32s:
        decodes = np.flatnonzero(step.query_lens == 1).astype(np.int32)
        # Longest first: a long sequence that starts last would leave most processors idle.
        decodes = decodes[np.argsort(-step.context_lens[decodes], kind="stable")]
        if len(decodes) == step.num_seqs:
            return decodes
        chunks = np.flatnonzero(step.query_lens > 1).astype(np.int32)
        tiles = query_tiles(step.query_lens, chunks, self._tile_tokens, step.context_lens)
        column = np.concatenate((decodes, tiles.ravel()))
        if step.query_lens[-1]:
            return column
        # A padded step has the tiles of the worst case, the others of its last row, without tokens.
        rows, tokens = step.num_seqs - len(decodes), step.num_tokens - len(decodes)
        missing = tokens // self._tile_tokens + rows - len(tiles)
        return np.concatenate((column, np.array([step.num_seqs - 1, 0] * missing, np.int32)))

    def fills_gpu(self, num_decodes: int) -> bool:
        """Whether so many decodes keep the GPU busy."""
        return num_decodes * self.shape.num_kv_heads >= 4 * self._num_sms

    def plan(self, step: StepArrays, tensors: StepTensors, max_context_len: int) -> TritonMetadata:
        shape = self.shape
        num_decodes = int(np.count_nonzero(step.query_lens == 1))
        decodes, tiling = tensors.plan_column[:num_decodes], None
        if self._segment:
            decodes = torch.stack((decodes, torch.zeros_like(decodes)), 1)  # as tiles of one token
            splits = -(-max_context_len // self._segment)
        else:
            splits, tiling = choose_splits(
                max(num_decodes, 1), shape.num_kv_heads, self._num_sms, shape.head_dim, shape.dtype
            )
        return TritonMetadata(
            tensors,
            decodes=decodes,
            tiles=tensors.plan_column[num_decodes:].view(-1, 2),
            splits=splits,
            tiling=tiling,
            workspace=self._workspace(num_decodes, splits),
        )

    def _workspace(self, num_decodes: int, splits: int) -> torch.Tensor:
        """See `decode_workspace`. For segments it is large. So all steps share one, which is at its
        largest in the warm-up."""
        shape = self.shape
        sizes = shape.num_heads, shape.head_dim
        if not self._segment:
            return decode_workspace(num_decodes, *sizes, splits, shape.device)
        if num_decodes * splits > len(self._room):
            self._room = decode_workspace(num_decodes * splits, *sizes, 1, shape.device)
        columns = self._room.shape[-1:]
        return self._room[: num_decodes * splits].view(num_decodes, sizes[0], splits, *columns)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: TritonMetadata,
        window: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the results of the sequences that `metadata` knows to `out` [T, heads * head_dim],
        or to new memory."""
        tensors = metadata.tensors
        if self._reads_e4m3:
            cache = cache.view(torch.float8_e4m3fn)
        out = torch.empty_like(q) if out is None else out.view(q.shape)
        sequences = (
            tensors.query_starts,
            tensors.context_lens,
            tensors.block_table,
            tensors.table_offsets,
            self.shape.scale,
        )
        arguments = *sequences, out, self._prompt_tiling, window, self._segment
        if len(metadata.tiles):
            prompt_attention(q, cache, metadata.tiles, *arguments)
        if len(metadata.decodes) and self._segment:
            prompt_attention(q, cache, metadata.decodes, *arguments, metadata.workspace)
        elif len(metadata.decodes):
            decode_attention(
                q,
                cache,
                metadata.decodes,
                *sequences,
                metadata.splits,
                metadata.workspace,
                out,
                metadata.tiling,
                window,
            )
        return out.flatten(1)
