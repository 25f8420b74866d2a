"""How many KV cache blocks this rank can hold."""

from __future__ import annotations

import math

import psutil
import torch

from shared.config import WorkerSettings
from worker_svc.attention.base import AttentionShape
from worker_svc.errors import StartError

# Of what is free after the warm-up step. A GPU serves nothing else; the memory of a CPU belongs to
# others too: other ranks, the page cache, the rest of the stack.
GPU_SHARE = 0.9
CPU_SHARE = 0.4


def blocks_that_fit(
    settings: WorkerSettings, shape: AttentionShape, block_size: int, max_model_len: int
) -> int:
    """Blocks for as many sequences of full length as a step may have, or for as much memory as
    there is, if that is less; `kv_blocks` if it is set.

    Raises:
        StartError: not even one block fits.
    """
    if settings.kv_blocks != "auto":
        return settings.kv_blocks
    useful = settings.max_num_seqs * math.ceil(max_model_len / block_size)
    memory = _usable_bytes(settings, shape.device)
    fit = memory // (block_size * shape.cache_bytes_per_token)
    if fit < 1:
        raise StartError(f"memory: {memory} bytes hold not one KV cache block")
    return min(useful, fit)


def _usable_bytes(settings: WorkerSettings, device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    share = settings.memory_utilization
    if share == "auto":
        share = GPU_SHARE if on_gpu else CPU_SHARE
    # Ranks on CPUs share one memory.
    return int(free * share) // (1 if on_gpu else settings.tp)
