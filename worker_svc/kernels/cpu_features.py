"""The abilities of this machine's CPU."""

from __future__ import annotations

import psutil
import torch


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_bfloat16_instructions() -> bool:
    """Whether this CPU multiplies bfloat16 itself rather than through float32."""
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return True  # not x86: trust the library


def num_cores() -> int:
    """Physical cores that this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    process = psutil.Process()
    usable = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else cores
    return min(cores, usable)
