"""Compiles native kernels into a temporary library, and describes their arguments to ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worker_svc.kernels import cpu

SOURCES = Path(cpu.__file__).parent / "native"
FLAGS = [
    *("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-std=c++20"),
    *("-fPIC", "-shared", "-pthread", "-fno-exceptions", "-fno-rtti"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
]
# Flags for machines: this one, and older ones.
MACHINES = {
    "native": ["-march=native"],
    "skylake-avx512": ["-march=skylake-avx512"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "generic": [],
}
_TEAM = """
#include "team.h"
extern "C" nano::Team* nano_team(int size) { return new nano::Team(size); }
"""


@cache
def library(machine: str, *sources: str) -> ctypes.CDLL:
    """Compiles sources, and a function that makes a team, for a machine."""
    folder = Path(tempfile.mkdtemp())
    (folder / "team.cpp").write_text(_TEAM)
    files = [SOURCES / source for source in sources]
    output = folder / "kernels.so"
    command = ["g++", *FLAGS, *MACHINES[machine], f"-I{SOURCES}", folder / "team.cpp", *files]
    subprocess.run([*command, "-o", output], check=True)
    compiled = ctypes.CDLL(str(output))
    compiled.nano_team.restype = ctypes.c_void_p
    return compiled


@cache
def team(machine: str, size: int, *sources: str) -> ctypes.c_void_p:
    return ctypes.c_void_p(library(machine, *sources).nano_team(size))


def address(array: NDArray | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data


class NativeStep(ctypes.Structure):
    """`nano::Step`. Columns that attention does not read are null."""

    _fields_: Sequence = [
        ("tokens", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "input_ids",
                "last_tokens",
                "positions",
                "slots",
                "query_starts",
                "context_lens",
                "block_table",
                "table_offsets",
                "temperatures",
                "uniforms",
            )
        ),
    ]


class NativeCache(ctypes.Structure):
    """`nano::Cache`, of an array [2, blocks, kv_heads, size]."""

    _fields_: Sequence = [
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, cache: NDArray, block_size: int, head_dim: int) -> NativeCache:
        types = {"float32": 0, "uint16": 1, "int8": 2}
        _, blocks, kv_heads, _ = cache.shape
        kind = types[cache.dtype.name]
        return cls(address(cache), kind, blocks, block_size, kv_heads, head_dim)


class RopeStoreArgs(ctypes.Structure):
    _fields_: Sequence = [
        ("cache", NativeCache),
        ("qkv", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("q_weight", ctypes.c_void_p),
        ("k_weight", ctypes.c_void_p),
        ("weight_type", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("cos_sin", ctypes.c_void_p),
    ]


class AttendArgs(ctypes.Structure):
    _fields_: Sequence = [
        ("cache", NativeCache),
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("scale", ctypes.c_double),
    ]


def int32s(numbers: object) -> NDArray[np.int32]:
    return np.ascontiguousarray(numbers, np.int32)
