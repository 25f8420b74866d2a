"""Counts, allocates and copies the blocks of the KV cache and the ids of the tokens in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker_svc.errors import StartError
from worker_svc.settings import WorkerSettings

TOKEN_ID_BYTES = 4  # the size of one token in a `TokenCache`

NewTensor = Callable[[Sequence[int], torch.dtype], torch.Tensor]  # from shape and dtype


@dataclass(frozen=True)
class TokenCache:
    """The ids of the tokens whose keys and values are cached, slot by slot. So a sequence's block
    table also leads to its token history."""

    slots: torch.Tensor  # [num_blocks * block_size] int32
    block_size: int

    @staticmethod
    def allocate(
        num_blocks: int, block_size: int, device: torch.device, new: NewTensor | None = None
    ) -> TokenCache:
        count, dtype = num_blocks * block_size, torch.int32
        slots = new([count], dtype) if new else torch.zeros(count, dtype=dtype, device=device)
        return TokenCache(slots, block_size)

    @property
    def blocks(self) -> torch.Tensor:
        """[num_blocks, block_size]"""
        return self.slots.view(-1, self.block_size)


def copy_blocks(
    caches: Sequence[torch.Tensor],
    tokens: TokenCache,
    sources: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    """Copies keys, values and tokens of blocks sources [C] int32 to blocks destinations [C] int32.

    No destination is also a source. caches has one cache [2, blocks, ...] per layer.
    """
    destinations = destinations.long()
    for cache in caches:
        cache.index_copy_(1, destinations, cache.index_select(1, sources))
    tokens.blocks.index_copy_(0, destinations, tokens.blocks.index_select(0, sources))


def blocks_that_fit(
    settings: WorkerSettings, memory: int, block_bytes: int, block_size: int, max_model_len: int
) -> int:
    """The number of blocks to allocate: `kv_blocks`, if it is set.

    Otherwise it is enough blocks for `max_num_seqs` sequences of full length, but not more than fit
    into memory.

    Args:
        memory: bytes for the cache.
        block_bytes: the size of one block, in all layers.
        block_size: tokens of one block.

    Raises:
        StartError: not even one sequence of full length fits.
    """
    if settings.kv_blocks != "auto":
        return settings.kv_blocks
    longest = math.ceil(max_model_len / block_size)
    missing = longest * block_bytes - memory
    if missing > 0:
        raise StartError(
            f"memory: {_mib(missing)} MiB short: the KV cache of one sequence of "
            f"{max_model_len} tokens takes {_mib(longest * block_bytes)} MiB, "
            f"{_mib(max(memory, 0))} MiB are left for it; raise memory_utilization, or lower "
            "max_model_len, max_num_batched_tokens or max_num_seqs"
        )
    return min(settings.max_num_seqs * longest, memory // block_bytes)


def _mib(size: int) -> int:
    return math.ceil(size / 2**20)


def choose_max_model_len(settings: WorkerSettings, limit: int) -> int:
    """Returns the maximum length of a sequence, in tokens.

    Raises:
        StartError: the setting is over the model's `limit`.
    """
    if settings.max_model_len == "auto":
        return limit
    if settings.max_model_len > limit:
        raise StartError(f"max_model_len: {settings.max_model_len} is over the model's {limit}")
    return settings.max_model_len
