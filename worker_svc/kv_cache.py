"""Counts, allocates and copies the blocks of the KV cache and the ids of the tokens in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch

from shared.paging import Paging
from worker_svc.errors import StartError
from worker_svc.settings import WorkerSettings


class LayerPlace(NamedTuple):
    """Where a layer's keys and values lie."""

    table: int  # the number of the layer's block table
    tensor: int
    part: int  # the first of a block that it uses


@dataclass(frozen=True)
class CacheLayout:
    """How layers share a cache of blocks.

    The cache is some tensors, each with `paging.num_parts` parts of every block. A part holds
    tokens of one layer. In the table with the larger blocks, a layer uses all parts of its tensor.
    In the other table, as many layers as there are parts share a tensor and use a part each. With
    one table, each layer has a tensor, and blocks are not divided.

    In Gemma 3 4B, 5 layers see all tokens and 29 the last ones. So there are 5 tensors, and a block
    has 6 parts: the tokens of 6 parts in the 5 layers, or those of a part in the 29 layers. This is
    how vLLM shares memory between layers, too, but there each group of 5 layers has its own table.
    """

    paging: Paging
    num_tensors: int
    places: Sequence[LayerPlace]  # by layer, those of this rank's stage

    @staticmethod
    def of(
        windows: Sequence[int | None],
        part_size: int,
        max_model_len: int,
        stage: range | None = None,
    ) -> CacheLayout:
        """The layout for a stage of a model whose layers have these windows. Windows from
        `max_model_len` tokens on count as none. All stages have blocks of the same tokens.

        Args:
            stage: the numbers of the stage's layers; None: all.
        """
        short = [window is not None and window < max_model_len for window in windows]
        counts = [short.count(False), short.count(True)]
        window = max((each for each in windows if each and each < max_model_len), default=0)
        own = short if stage is None else short[stage.start : stage.stop]
        if not all(counts):
            places = [LayerPlace(0, number, 0) for number in range(len(own))]
            return CacheLayout(Paging(part_size, window), len(places), places)
        large = counts.index(min(counts))  # the table with the larger blocks
        num_parts = -(-max(counts) // min(counts))
        num_tensors = max(own.count(large == 1), -(-own.count(large == 0) // num_parts))
        sizes = [part_size * (num_parts if table == large else 1) for table in range(2)]
        numbers = [count(), count()]
        places = []
        for is_short in own:
            part, tensor = divmod(next(numbers[is_short]), num_tensors)
            places.append(LayerPlace(int(is_short), tensor, part))
        return CacheLayout(Paging(sizes[0], window, sizes[1]), num_tensors, places)

    def layers_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The caches of the layers, indexed by the first parts of their blocks."""
        return [tensors[each.tensor][:, each.part :] for each in self.places]


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

    No destination is also a source. caches are tensors [2, blocks, ...].
    """
    destinations = destinations.long()
    for cache in caches:
        cache.index_copy_(1, destinations, cache.index_select(1, sources))
    tokens.blocks.index_copy_(0, destinations, tokens.blocks.index_select(0, sources))


def blocks_that_fit(
    settings: WorkerSettings, memory: int, block_bytes: int, paging: Paging, max_model_len: int
) -> int:
    """The number of blocks to allocate: `kv_blocks`, if it is set.

    Otherwise it is enough blocks for `max_num_seqs` sequences of full length, even if none of their
    blocks is freed, but not more than fit into memory.

    Args:
        memory: bytes for the cache.
        block_bytes: the size of one block.

    Raises:
        StartError: not even one sequence of full length fits, or one token into `kv_blocks`.
    """
    if settings.kv_blocks != "auto":
        if settings.kv_blocks < (least := paging.num_needed(1)):
            raise StartError(f"kv_blocks: {settings.kv_blocks}; must be at least {least}")
        return settings.kv_blocks
    longest = paging.num_needed(max_model_len)
    missing = longest * block_bytes - memory
    if missing > 0:
        raise StartError(
            f"memory: {_mib(missing)} MiB short: the KV cache of one sequence of "
            f"{max_model_len} tokens takes {_mib(longest * block_bytes)} MiB, "
            f"{_mib(max(memory, 0))} MiB are left for it; raise memory_utilization, or lower "
            "max_model_len, max_num_batched_tokens or max_num_seqs"
        )
    unfreed = sum(math.ceil(max_model_len / kind.block_size) for kind in paging.tables)
    return min(settings.max_num_seqs * unfreed, memory // block_bytes)


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
