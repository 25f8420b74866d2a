"""The memory and CPU that a stack's processes use, by what they run."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from bench.processes import Samples
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


class MemoryPeaks(Samples[Counter[str]]):
    """Samples memory while it is entered; `peaks_mb` are the largest ones by program."""

    def __init__(self, directory: Path) -> None:
        super().__init__(lambda: memory_mb(directory), _EVERY_S)

    @property
    def peaks_mb(self) -> dict[str, float]:
        peaks: Counter[str] = Counter()
        for _, sizes in self.found:
            peaks |= sizes  # the larger of both, by program
        return dict(peaks)


def _program(process: psutil.Process) -> str:
    """The module that a process runs (`frontend`), or its name."""
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words[:-1] else process.name()
