"""The abilities of this machine's CPU."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
import numba
import psutil


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


def num_cores() -> int:
    """Physical cores that this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    process = psutil.Process()
    usable = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else cores
    return min(cores, usable)
