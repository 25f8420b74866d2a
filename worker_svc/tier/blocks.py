"""The bytes of the blocks of a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from worker_svc.devices.base import Platform
from worker_svc.kv_cache import TokenCache


class CacheBlocks:
    """Copies whole blocks between a cache and the host: keys, values and token ids.

    Args:
        tensors: of the cache, [2, blocks * parts, ...], see `CacheLayout`.
        num_blocks: how many blocks they have.
        key: returns a text that names all that the bytes of a block depend on, except its tokens.
    """

    def __init__(
        self,
        platform: Platform,
        tensors: Sequence[torch.Tensor],
        tokens: TokenCache,
        num_blocks: int,
        key: Callable[[], str],
    ) -> None:
        self._platform = platform
        self.key = key
        self.num_blocks = num_blocks
        halves = [half for tensor in tensors for half in tensor]
        # Each [blocks, bytes], a block's bytes in one piece.
        self._pieces = [
            half.view(torch.uint8).view(num_blocks, -1) for half in (*halves, tokens.slots)
        ]
        self.block_bytes = sum(piece.shape[1] for piece in self._pieces)

    def buffer(self) -> torch.Tensor:
        """Host memory for a block, uint8[block_bytes]."""
        return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._platform.pinned)

    def read(self, block: int, buffer: torch.Tensor) -> None:
        """Copies a block to the host."""
        with self._platform.beside_steps():
            for piece, part in self._parts(block, buffer):
                part.copy_(piece, non_blocking=True)

    def write(self, block: int, buffer: torch.Tensor) -> None:
        """Copies a block from the host."""
        with self._platform.beside_steps():
            for piece, part in self._parts(block, buffer):
                piece.copy_(part, non_blocking=True)

    def _parts(
        self, block: int, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        parts = buffer.split([piece.shape[1] for piece in self._pieces])
        return zip((piece[block] for piece in self._pieces), parts, strict=True)
