"""Steps of sequences that grow in a paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from worker_svc.step import Int32s, Step


class Sequences:
    """Their blocks are neither in order nor adjacent, as after a while of serving.

    Args:
        blocks: numbers of free blocks.
    """

    def __init__(self, block_size: int, blocks: Sequence[int], seed: int) -> None:
        self._block_size = block_size
        self._free = np.random.default_rng(seed).permutation(blocks).astype(np.int32).tolist()
        self._tables: dict[int, list[int]] = {}
        self._contexts: dict[int, int] = {}  # tokens in the cache

    def step(
        self,
        chunks: Mapping[int, Int32s],
        temperatures: Sequence[float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Step:
        """Appends token ids to sequences, all of which sample; greedily by default."""
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
        return Step(
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


def uniform_step(rows: int, query_len: int, context_len: int, block_size: int, vocab: int) -> Step:
    """`rows` sequences alike, with random tokens; sampled with a temperature."""
    blocks = rows * -(-context_len // block_size)
    sequences = Sequences(block_size, range(blocks), seed=0)
    rng = np.random.default_rng(0)
    if context_len > query_len:
        cached = np.zeros(context_len - query_len, np.int32)
        sequences.step(dict.fromkeys(range(rows), cached))
    ids = rng.integers(vocab, size=(rows, query_len), dtype=np.int32)
    return sequences.step(dict(enumerate(ids)), [0.6] * rows, range(rows))


def _joined(parts: Sequence[Int32s]) -> Int32s:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
