"""How many KV cache blocks a rank can hold."""

from __future__ import annotations

import math

from shared.config import WorkerSettings
from worker_svc.errors import StartError


def blocks_that_fit(
    settings: WorkerSettings, memory: int, block_bytes: int, block_size: int, max_model_len: int
) -> int:
    """Blocks for as many sequences of full length as a step may have, or for as much memory as
    there is, if that is less; `kv_blocks` if it is set.

    Args:
        memory: bytes for the cache.
        block_bytes: of one block, in all layers.
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
            f"memory: {_mib(missing)} MiB are missing: the KV cache of one sequence of "
            f"{max_model_len} tokens takes {_mib(longest * block_bytes)} MiB, "
            f"{_mib(max(memory, 0))} MiB are left for it; raise memory_utilization, or lower "
            "max_model_len, max_num_batched_tokens or max_num_seqs"
        )
    return min(settings.max_num_seqs * longest, memory // block_bytes)


def _mib(size: int) -> int:
    return math.ceil(size / 2**20)
