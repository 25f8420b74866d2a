"""The memory of a worker that outlives its forks."""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path

from shared.process.kept import KeptDescriptors, may_have_damaged
from worker_svc.errors import ModelError
from worker_svc.kept_memory.cache import CacheMemory
from worker_svc.kept_memory.device import DeviceMemory
from worker_svc.kept_memory.weights import WeightMemory
from worker_svc.settings import WorkerSettings
from worker_svc.weights.fingerprint import file_states, model_files


def kept_version(settings: WorkerSettings) -> str:
    """A text that changes with the settings, the worker's sources or the models' files. The next
    program uses the memory of this one only if it has the same text (`KeptMemory`)."""
    folder = Path(__file__).parent.parent
    sources = [each for each in folder.rglob("*") if each.suffix in (".py", ".h", ".cpp")]
    try:
        models = [Path(each) for each in (settings.model, settings.draft_model) if each]
        files = [file for each in models for file in model_files(each)]
        return repr((settings, file_states([*sorted(sources), *files])))
    except (ModelError, OSError):  # the fork tells the user
        return uuid.uuid4().hex


class KeptMemory:
    """The weights and the cache of a worker, which its parent process keeps and never maps.

    Args:
        version: see `KeptDescriptors`.
    """

    weights: WeightMemory
    cache: CacheMemory

    def __init__(self, version: str = "") -> None:
        self._weights = KeptDescriptors("weights", version)
        self._cache = KeptDescriptors("cache", version)
        self._oom_kills = _oom_kills()

    def use(self, device: DeviceMemory) -> KeptMemory:
        """Makes `weights` and `cache` in a fork, with what the last fork kept -> this object."""
        self._device = device
        self.weights = WeightMemory(self._weights, device)
        self.cache = CacheMemory(self._cache, device)
        return self

    def reset(self) -> None:
        """Empties the memory of weights before others are loaded. The cache stays only if weights
        cannot be kept on this CPU: on a GPU, the memory would be missing."""
        if self._weights.value() or self._device.device.type != "cpu":
            self.cache.forget()
        self.weights.reset()

    def fork_ended(self, status: int) -> None:
        """Drops the cache unless the fork ended by SIGKILL, by SIGTERM or in order. Any other end
        may have a reason that also damaged the cache, or weights that are not protected. If Linux
        killed a process because memory was short, the cache's memory is needed.

        Args:
            status: the fork's exit status; negative: the signal that killed it.
        """
        before, self._oom_kills = self._oom_kills, _oom_kills()
        is_damaged = may_have_damaged(status)
        if is_damaged or self._oom_kills != before:
            self._cache.clear()
        if is_damaged and (index := self._weights.value()) and index["sums"]:  # not protected
            self._weights.clear()


def _oom_kills() -> int:
    """The processes that Linux has killed because memory was short, here or in any container."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
