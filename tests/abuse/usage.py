"""The memory and CPU that a stack's processes use, by what they run."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from deploy.native.processes import stack_members

_EVERY_S = 0.25
_MB = 1e6


def cpu_s(directory: Path) -> Counter[str]:
    """The CPU seconds that processes have used, by what they run, with those of their children
    that have ended, which they have waited for: grammars' processes above all."""
    used: Counter[str] = Counter()
    for process in stack_members(directory):
        with suppress(psutil.Error):
            times = process.cpu_times()
            used[_program(process)] += sum(times[:4])  # user, system, and its children's
    return used


def memory_mb(directory: Path) -> Counter[str]:
    """Proportional set sizes: pages that forks share count once in the sum."""
    used: Counter[str] = Counter()
    for process in stack_members(directory):
        with suppress(psutil.Error):
            used[_program(process)] += process.memory_full_info().pss / _MB
    return used


class MemoryPeaks:
    """Samples memory while it is entered; `peaks_mb` are the largest ones by program."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peaks_mb: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_EVERY_S):
            for name, size in memory_mb(self._directory).items():
                self.peaks_mb[name] = max(size, self.peaks_mb.get(name, 0.0))


def _program(process: psutil.Process) -> str:
    """The module that a process runs (`frontend`), or its name."""
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words[:-1] else process.name()
