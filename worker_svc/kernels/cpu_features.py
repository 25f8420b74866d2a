"""The abilities of this machine's CPU."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
import numba
import psutil
import torch


@cache
def _features() -> frozenset[str]:
    """LLVM's names of what the CPU that numba compiles for has."""
    pretended = numba.config.CPU_FEATURES
    if pretended is None:
        return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
    return frozenset(each[1:] for each in pretended.split(",") if each.startswith("+"))


def has(feature: str) -> bool:
    """Whether the CPU has what LLVM calls `feature`. (NUMBA_CPU_FEATURES can pretend to less.)"""
    return feature in _features()


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
