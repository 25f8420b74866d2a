"""The block tables with which layers find their part of a KV cache."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class TableKind(NamedTuple):
    """A kind of block table, for the layers with this window."""

    block_size: int  # tokens of a block
    window: int  # how many of the last tokens the layers see; 0: all

    def first_needed(self, num_tokens: int) -> int:
        """The first block that the tokens after `num_tokens` others see."""
        return max(num_tokens - self._seen, 0) // self.block_size if self.window else 0

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that `num_tokens` tokens take while the last of them are seen. One
        more token can then be computed."""
        num_blocks = -(-num_tokens // self.block_size)
        if not self.window:
            return num_blocks
        return min(num_blocks, 1 + -(-self._seen // self.block_size))

    @property
    def _seen(self) -> int:
        """How many of the tokens before its own a token sees. If they are less than a block, one is
        counted, so that the first block that is held is full."""
        return max(self.window - 1, self.block_size)


@dataclass(frozen=True)
class Paging:
    """The block tables of a sequence.

    Layers with a window need few blocks of a long sequence. If only some layers have one, they have
    a second table. All blocks are equally large, so a block holds more tokens if fewer layers have
    its table.

    Args:
        block_size: tokens of a block of the first table.
        window: how many of the last tokens the layers of the last table see; 0: all.
        window_block_size: tokens of a block of the second table; 0: there is none. Of the two
            sizes, one is a multiple of the other.
    """

    block_size: int
    window: int = 0
    window_block_size: int = 0

    @cached_property
    def tables(self) -> tuple[TableKind, ...]:
        if not self.window_block_size:
            return (TableKind(self.block_size, self.window),)
        return TableKind(self.block_size, 0), TableKind(self.window_block_size, self.window)

    @cached_property
    def keeping(self) -> tuple[TableKind, ...]:
        """The tables of a sequence whose sampling reads its token ids. The first table leads to
        these, too, so that its blocks are kept."""
        first, *others = self.tables
        return first._replace(window=0), *others

    @property
    def slots_per_block(self) -> int:
        """The number of slots of a block. In a table with smaller blocks, not all are used."""
        return max(self.block_size, self.window_block_size)

    @property
    def part_size(self) -> int:
        """The tokens of a block of the table with the smallest blocks."""
        return min(self.block_size, self.window_block_size or self.block_size)

    @property
    def num_parts(self) -> int:
        """How many times as large the larger blocks are."""
        return self.slots_per_block // self.part_size

    def num_parts_of(self, kind: TableKind) -> int:
        """How many parts of a block a layer with this kind of table uses."""
        return self.num_parts if kind.block_size > self.part_size else 1

    def num_needed(self, num_tokens: int) -> int:
        """The number of blocks with which any sequence of so many tokens can be served."""
        return sum(kind.blocks_for(num_tokens) for kind in self.keeping)

    def longest(self, num_blocks: int, limit: int) -> int:
        """The maximum of tokens, up to `limit`, of any sequence that so many blocks can serve."""
        return bisect_right(range(limit + 1), num_blocks, key=self.num_needed) - 1
