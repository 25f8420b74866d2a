"""The features and the number of cores of this machine's CPU."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
import numba
import psutil


@cache
def _features() -> frozenset[str]:
    """LLVM's names of the features of the CPU that numba compiles for."""
    pretended = numba.config.CPU_FEATURES
    if pretended is None:
        return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
    return frozenset(each[1:] for each in pretended.split(",") if each.startswith("+"))


def has(feature: str) -> bool:
    """Whether the CPU has `feature`, by LLVM's name. NUMBA_CPU_FEATURES can hide features."""
    return feature in _features()


def num_cores() -> int:
    """The number of physical cores that this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    process = psutil.Process()
    usable = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else cores
    return min(cores, usable)
