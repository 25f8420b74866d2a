"""The tier under the KV cache: copies blocks between the cache and a directory, beside steps.

Two threads make the copies, one for loads, another for saves and erasures. A block goes through a
buffer of its thread. So a load that hangs in the disk has written nothing to the cache, and it
writes nothing once the epoch has ended or the tier is off.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from worker_svc.errors import StartError
from worker_svc.settings import WorkerSettings
from worker_svc.tier.blocks import CacheBlocks
from worker_svc.tier.directory import BlockDirectory

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
# For each block, whether it was copied or erased; and the seconds that all took.
Copied = tuple[Seq[bool], float]

# A disk that needs longer for a block is slower than computing the block.
_MAX_BLOCK_S = 2.0
_MAX_ERASED = 50  # files at once
_MAX_OPEN_S = 10.0
_MAX_LIST_S = 60.0  # of all files
_IMPOSSIBLE = (PermissionError, NotADirectoryError, FileExistsError)


class Tier:
    """The tier of one rank. Call its methods from the event loop.

    Args:
        settings: `cache_dir` and its limits. If that is empty, there is no tier.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._directory: BlockDirectory | None = None
        self._listing: asyncio.Future[Seq[bytes]] | None = None
        self._lock = threading.Lock()
        # Both change only under the lock.
        self._blocks: CacheBlocks | None = None  # of the current epoch
        self._epoch = 0  # a count, in place of the blocks in what a disk may hold up
        self.is_off = not settings.cache_dir
        one_thread = partial(torch.set_num_threads, 1)  # the others are busy with steps
        self._loads = ThreadPoolExecutor(1, "tier-loads", one_thread)
        self._saves = ThreadPoolExecutor(1, "tier-saves", one_thread)
        self._next_save_at = 0.0

    def close(self) -> None:
        """Ends the copies, without waiting for the disk."""
        with self._lock:
            self.is_off, self._blocks = True, None
        for pool in (self._loads, self._saves):
            pool.shutdown(wait=False, cancel_futures=True)

    def end_epoch(self) -> None:
        """Makes sure that nothing is copied from or to the cache until the next epoch."""
        with self._lock:
            self._blocks = None
            self._epoch += 1

    async def begin_epoch(self, blocks: CacheBlocks, *, is_first: bool) -> None:
        """Lets transfers copy from and to these blocks. Without a directory, the tier is off.

        Raises:
            StartError: in the first epoch, `cache_dir` cannot be this user's directory.
        """
        if self.is_off:
            return
        try:
            if self._directory is None:
                self._directory = await _run(self._saves, lambda: self._open(blocks), _MAX_OPEN_S)
        except (OSError, TimeoutError) as error:
            if is_first and isinstance(error, _IMPOSSIBLE):
                raise StartError(f"cache_dir: {error}") from error
            self._turn_off(error)
            return
        loop = asyncio.get_running_loop()
        self._listing = loop.run_in_executor(self._saves, self._directory.find)
        with self._lock:
            self._blocks = blocks

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the cache."""
        return self._blocks.num_blocks if self._blocks else 0

    @property
    def capacity(self) -> int:
        """How many blocks fit; 0 if the tier is off."""
        return self._directory.capacity if self._directory and not self.is_off else 0

    async def names(self) -> Seq[bytes]:
        """The blocks that the directory held when the epoch began, the one used least recently
        first."""
        try:
            if self._listing and not self.is_off:
                return await _within(_MAX_LIST_S, asyncio.shield(self._listing))
        except (OSError, TimeoutError) as error:
            self._turn_off(error)
        return ()

    async def save(self, names: Seq[bytes], blocks: Seq[int]) -> Copied:
        """Saves blocks of the current epoch, at the rate that the settings allow."""
        return await self._copy_all(names, blocks, self._saves, self._save)

    async def load(self, names: Seq[bytes], blocks: Seq[int]) -> Copied:
        """Loads blocks of the current epoch."""
        return await self._copy_all(names, blocks, self._loads, self._load)

    async def erase(self, names: Seq[bytes]) -> Copied:
        """Deletes blocks. Call it, as `save`, only when the last such call has ended."""
        directory, num_done = self._directory, 0
        try:
            while num_done < len(names) and directory and not self.is_off:
                some = names[num_done : num_done + _MAX_ERASED]
                await _run(self._saves, partial(directory.erase, some))
                num_done += len(some)
        except (RuntimeError, TimeoutError) as error:
            self._turn_off(error)
        return [i < num_done for i in range(len(names))], 0.0

    async def _copy_all(
        self,
        names: Seq[bytes],
        numbers: Seq[int],
        pool: ThreadPoolExecutor,
        copy: Callable[[bytes, int, int], bool],
    ) -> Copied:
        done, seconds, epoch = [False] * len(names), 0.0, self._epoch
        try:
            for i, (name, number) in enumerate(zip(names, numbers, strict=True)):
                if self.is_off or (i and not done[i - 1]):
                    break
                if pool is self._saves:
                    await self._pace()
                began = time.monotonic()
                done[i] = await _run(pool, partial(copy, name, number, epoch))
                seconds += time.monotonic() - began
        except (OSError, RuntimeError, TimeoutError) as error:
            self._turn_off(error)
        return done, seconds

    def _open(self, blocks: CacheBlocks) -> BlockDirectory:
        settings = self._settings
        self._buffers = blocks.buffer(), blocks.buffer()  # of saves and of loads
        root = Path(settings.cache_dir) / str(settings.place)
        max_bytes = int(settings.cache_dir_gb * 1e9)
        return BlockDirectory(root, blocks.key(), blocks.block_bytes, max_bytes)

    def _save(self, name: bytes, block: int, epoch: int) -> bool:
        """Saves a block -> whether it was saved."""
        assert self._directory is not None
        buffer, _ = self._buffers
        with self._lock:
            if (blocks := self._blocks_of(epoch)) is not None:
                blocks.read(block, buffer)
        if blocks is not None:
            self._directory.save(name, buffer.numpy())
        return blocks is not None

    def _load(self, name: bytes, block: int, epoch: int) -> bool:
        """Loads a block -> whether it was loaded."""
        assert self._directory is not None
        _, buffer = self._buffers
        if not self._directory.load(name, buffer.numpy()):
            return False
        with self._lock:
            if (blocks := self._blocks_of(epoch)) is not None:
                blocks.write(block, buffer)
        return blocks is not None

    def _blocks_of(self, epoch: int) -> CacheBlocks | None:
        """The blocks, unless that epoch has ended. Call it under the lock."""
        return self._blocks if epoch == self._epoch and not self.is_off else None

    async def _pace(self) -> None:
        """Waits until a block may be written."""
        now, num_bytes = time.monotonic(), self._blocks.block_bytes if self._blocks else 0
        begin_at = max(now, self._next_save_at)
        self._next_save_at = begin_at + num_bytes / (1e6 * self._settings.cache_dir_mb_per_s)
        await asyncio.sleep(begin_at - now)

    def _turn_off(self, error: Exception) -> None:
        with self._lock:
            was_off, self.is_off = self.is_off, True
        if not was_off:
            log.error("cache_dir is not used until this process restarts", reason=str(error))


async def _run(
    pool: ThreadPoolExecutor, run: Callable[[], Result], max_s: float | None = None
) -> Result:
    """Runs on the thread of `pool`, which nothing else keeps busy.

    Raises:
        TimeoutError: it takes too long.
    """
    return await _within(
        max_s or _MAX_BLOCK_S, asyncio.get_running_loop().run_in_executor(pool, run)
    )


async def _within(max_s: float, running: asyncio.Future[Result]) -> Result:
    """
    Raises:
        TimeoutError: it takes too long.
    """
    try:
        return await asyncio.wait_for(running, max_s)
    except TimeoutError:
        raise TimeoutError(f"the disk took longer than {max_s:g} s") from None
