"""Builds steps of sequences that grow in a paged cache, for models with these heads."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bench.workload import Shape, reference_workload
from worker_svc.step.arrays import StepArrays
from worker_svc.step.wire import Int32s


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


QWEN_0_6B = Heads(16, 8, 128)
QWEN_8B = Heads(32, 8, 128)


class Sequences:
    """Sequences whose blocks are neither in order nor adjacent, as after a while of serving.

    Args:
        blocks: the numbers of the free blocks.
    """

    def __init__(self, block_size: int, blocks: Sequence[int], seed: int) -> None:
        self._block_size = block_size
        self._free = np.random.default_rng(seed).permutation(blocks).astype(np.int32).tolist()
        self._tables: dict[int, list[int]] = {}
        self._contexts: dict[int, int] = {}  # by sequence: tokens in the cache

    def step(
        self,
        chunks: Mapping[int, Int32s],
        temperatures: Sequence[float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> StepArrays:
        """Makes a step that appends token ids to sequences. All sample, greedily by default."""
        size = self._block_size
        ids, positions, slots, tables = [], [], [], []
        for seq, tokens in chunks.items():
            start = self._contexts.get(seq, 0)
            self._contexts[seq] = end = start + len(tokens)
            table = self._tables.setdefault(seq, [])
            while len(table) * size < end:
                table.append(self._free.pop())
            blocks = np.array(table, np.int32)
            position = np.arange(start, end, dtype=np.int32)
            ids.append(tokens)
            positions.append(position)
            slots.append(blocks[position // size] * size + position % size)
            tables.append(blocks)
        rows = len(chunks)
        return StepArrays(
            step_id=1,
            input_ids=_joined(ids),
            positions=_joined(positions),
            slot_mapping=_joined(slots),
            query_lens=np.array([len(tokens) for tokens in chunks.values()], np.int32),
            context_lens=np.array([self._contexts[seq] for seq in chunks], np.int32),
            block_table=_joined(tables),
            block_table_offsets=np.cumsum([0, *map(len, tables)]).astype(np.int32),
            samples=np.ones(rows, np.bool_),
            temperatures=np.array(temperatures or [0.0] * rows, np.float32),
            seeds=np.array(seeds or [0] * rows, np.uint64),
        )


def make_step(
    query_lens: Sequence[int], context_lens: Sequence[int], block_size: int, vocab: int
) -> StepArrays:
    """Makes a step whose random tokens fill up the contexts; it samples with a temperature."""
    sequences = Sequences(block_size, range(blocks_needed(context_lens, block_size)), seed=0)
    rng = np.random.default_rng(0)
    cached = [context - queries for queries, context in zip(query_lens, context_lens, strict=True)]
    sequences.step({seq: np.zeros(n, np.int32) for seq, n in enumerate(cached) if n})
    chunks = [rng.integers(vocab, size=queries, dtype=np.int32) for queries in query_lens]
    rows = len(chunks)
    return sequences.step(dict(enumerate(chunks)), [0.6] * rows, range(rows))


def blocks_needed(context_lens: Sequence[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in context_lens)


def snapshot(shape: Shape) -> list[int]:
    """Context lengths in the middle of the reference workload, where each request has its prompt
    and a part of its output."""
    rng = random.Random(f"snapshot {shape.seed}")
    requests = reference_workload(shape, 1)
    return [len(each.prompt) + rng.randint(1, each.output_len) for each in requests]


def _joined(parts: Sequence[Int32s]) -> Int32s:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
