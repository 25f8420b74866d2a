"""The machine's speed at the moment: on shared hosts it changes by a third within minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_READ_BYTES = 512 << 20  # many times any cache
_ROWS, _INNER, _COLUMNS = 512, 1024, 3072
_REPEATS = 5


@dataclass(frozen=True)
class Calibration:
    read_gb_per_s: float
    float32_gflop_per_s: float
    int8_gop_per_s: float


def calibrate() -> Calibration:
    """Reads memory and multiplies matrices with torch, on all cores: the best of a few short runs
    each, since a pause of the host says nothing about its speed."""
    numbers = torch.ones(_READ_BYTES // 4)
    left, right = torch.randn(_ROWS, _INNER), torch.randn(_INNER, _COLUMNS)
    left8 = torch.randint(-127, 128, (_ROWS, _INNER), dtype=torch.int8)
    right8 = torch.randint(-127, 128, (_INNER, _COLUMNS), dtype=torch.int8)
    operations = 2 * _ROWS * _INNER * _COLUMNS
    return Calibration(
        _READ_BYTES / _best_s(numbers.sum) / 1e9,
        operations / _best_s(lambda: left @ right) / 1e9,
        operations / _best_s(lambda: torch._int_mm(left8, right8)) / 1e9,
    )


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
