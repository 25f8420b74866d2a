"""Random inputs, memory that shows where nothing was written, and how far a result is off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu_check.setup import Heads
from bench.gpu_check.steps import Sequences
from worker_svc.attention.base import Backend
from worker_svc.kernels.paged_attention import attention_reference
from worker_svc.step import Int32s, Step
from worker_svc.step_tensors import StepTensors, columns, pack, padded, unpack


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of rounding once, or of arithmetic in float32."""
    return max(torch.finfo(dtype).eps / 2, 1e-5)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest ‖out − exact‖ / ‖exact‖ of a row, which is the last dimension; NaN if any is."""
    exact = exact.float()
    difference = (out.float() - exact).norm(dim=-1)
    # Rows that are 0 must be just that.
    return float(torch.where(difference == 0, 0.0, difference / exact.norm(dim=-1)).max())


def count_differences(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Of elements, as bits: NaN is equal to itself."""
    same = (out == expected) | (out.isnan() & expected.isnan())
    return float((~same).sum())


@contextmanager
def poisoned() -> Iterator[None]:
    """What `torch.empty` returns is filled with NaN, and with the largest integer. Only for
    launches of kernels: some of torch's own operations then refuse to run."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Batch:
    """A step over a cache with the keys and values of its sequences; slots that belong to no
    sequence yet hold NaN."""

    step: Step
    q: torch.Tensor  # [T, heads, head_dim]
    k: torch.Tensor  # [written slots, kv_heads, head_dim], as is v
    v: torch.Tensor
    slots: Int32s  # of k and v

    def tensors(self, attention: Int32s) -> StepTensors:
        """The step on the device, with a backend's column."""
        return on_device(self.step, attention, self.q.device)

    def reference(self, cache: torch.Tensor, scale: float) -> torch.Tensor:
        """float32 [T, heads, head_dim]"""
        tensors = self.tensors(np.zeros(0, np.int32))
        return attention_reference(
            self.q,
            cache,
            tensors.query_starts.diff(),
            tensors.context_lens,
            tensors.block_table,
            tensors.table_offsets,
            scale,
        )


def random_batch(
    generator: torch.Generator,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    *,
    blocks: Sequence[int] | None = None,
    pad_to: int = 0,
) -> Batch:
    """
    Args:
        blocks: where the sequences may lie; default: the first that are enough, shuffled.
        pad_to: sequences, with padding.
    """
    if blocks is None:
        blocks = range(blocks_needed(context_lens, block_size))
    sequences = Sequences(block_size, blocks, seed=generator.initial_seed())
    cached = [context - queries for queries, context in zip(query_lens, context_lens, strict=True)]
    before = sequences.step(
        {seq: np.zeros(length, np.int32) for seq, length in enumerate(cached) if length}
    )
    step = sequences.step({seq: np.zeros(n, np.int32) for seq, n in enumerate(query_lens)})
    slots = np.concatenate((before.slot_mapping, step.slot_mapping))
    step = padded(step, max(pad_to, step.num_seqs)) if pad_to else step

    def random(rows: int, count: int) -> torch.Tensor:
        size = (rows, count, heads.head_dim)
        numbers = torch.randn(size, generator=generator, device=generator.device)
        return numbers.to(dtype)

    # Queries twice as large as usual: weights that differ much make a wrong maximum visible.
    return Batch(
        step,
        q=2 * random(step.num_tokens, heads.heads),
        k=random(len(slots), heads.kv_heads),
        v=random(len(slots), heads.kv_heads),
        slots=slots,
    )


def on_device(step: Step, attention: Int32s, device: torch.device) -> StepTensors:
    arrays = columns(step, attention)
    buffer = pack(arrays, pinned=False).to(device)
    return unpack(buffer, [len(array) for array in arrays])


def blocks_needed(context_lens: Sequence[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in context_lens)


def attend(backend: Backend, batch: Batch, cache: torch.Tensor, longest: int) -> torch.Tensor:
    """As a step would -> [T, heads, head_dim]"""
    tensors = batch.tensors(backend.column(batch.step))
    metadata = backend.plan(batch.step, tensors, longest)
    with poisoned():
        return backend.attend(batch.q, cache, metadata).view(batch.q.shape)
