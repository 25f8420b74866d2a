"""The features and the number of cores of this machine's CPU."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import psutil

# Where the name in /proc/cpuinfo is not that of compilers.
_NAMES = {
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
    "amx_tile": "amx-tile",
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
    "avx_vnni": "avxvnni",
}


@cache
def _features() -> frozenset[str]:
    flags = _flags()
    there = frozenset(_NAMES.get(flag, flag) for flag in flags)
    pretended = os.environ.get("NANO_CPU_FEATURES")
    return there if pretended is None else there.intersection(pretended.split(","))


def _flags() -> list[str]:
    """The features of the first CPU that Linux lets programs use, by Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])


def has(feature: str) -> bool:
    """Whether the CPU has `feature`, by the name that compilers give it in `-m`. If
    NANO_CPU_FEATURES is set, all features are hidden but those that it lists, with commas."""
    return feature in _features()


def num_cores() -> int:
    """The number of physical cores that this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    process = psutil.Process()
    usable = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else cores
    return min(cores, usable)
