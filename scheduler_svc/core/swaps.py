"""Copies of blocks between the cache and the tier under it, which the workers make beside steps.

Copies are plain data (`Transfer`) and are answered, like steps. A block that is being saved stays
in use. A sequence whose blocks are being read is swapped: it holds its blocks, and runs once the
answer has come. If the workers are lost, nothing that was not answered is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.open_sequences import OpenSequences
from scheduler_svc.core.planning.step_times import StepTimes
from scheduler_svc.core.sequence import Sequence, Status

# Blocks that are saved at once. They cannot be evicted meanwhile.
_MAX_SAVES = 8
# Blocks that are read at once. Then the sequence may have ended, or reading be too slow.
_MAX_LOADED = 16
_MAX_ERASED = 1000  # at once


class TransferKind(IntEnum):
    """The kinds of transfers. The numbers are those of `worker.proto`."""

    SAVE = 1  # from the cache to the tier
    LOAD = 2  # from the tier to the cache
    ERASE = 3  # in the tier


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks to copy or to erase. `blocks` are their numbers in the cache; empty if erased."""

    number: int  # 1, 2, 3, ...
    kind: TransferKind
    names: Seq[bytes]
    blocks: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class TransferAnswer:
    """The answer to a transfer: whether each block was copied or erased, the seconds that it took,
    and how many blocks fit now. With 0, the directory cannot be used."""

    number: int
    done: Seq[bool]
    seconds: float
    capacity: int


@dataclass(frozen=True, slots=True)
class TierContents:
    """The blocks in the workers' directory when an epoch begins, least recently used first, and how
    many fit. `orphans` are blocks that only some ranks have."""

    names: Seq[bytes]
    capacity: int
    orphans: Seq[bytes] = ()


class Copier(Protocol):
    """Has the workers make transfers. Both methods raise `WorkersLostError`, as `Executor` does."""

    async def send_transfer(self, transfer: Transfer) -> None:
        """Sends a transfer."""

    async def receive_transfer(self, *, loads: bool) -> TransferAnswer | TierContents:
        """Returns the tier's contents, and then the answers to loads or to others in order."""


class Swaps:
    """Plans transfers and applies their answers."""

    def __init__(self, blocks: BlockManager, sequences: OpenSequences, times: StepTimes) -> None:
        self._blocks, self._tier = blocks, blocks.tier
        self._tier.times = times
        self._sequences = sequences
        self._stats = sequences.stats
        self._in_flight: dict[int, Transfer] = {}
        # Swapped sequences: how many of their blocks were read, or None if a transfer reads more.
        self._num_read: dict[Sequence, int | None] = {}
        # By transfer: whose blocks it reads, and how many were read before.
        self._readers: dict[int, tuple[Sequence, int]] = {}
        self._saves = False  # whether a transfer in flight saves
        self._last = 0

    @property
    def num_swapped(self) -> int:
        return len(self._sequences.swapped)

    def take(self) -> list[Transfer]:
        """The transfers to make now. Erasures come before the saves that need their room."""
        transfers = []
        for seq in tuple(self._sequences.swapped):
            num_read = self._num_read.setdefault(seq, 0)
            if num_read is not None and (load := self._next_load(seq, num_read)):
                transfers.append(load)
        if not self._tier.is_open:
            return transfers
        limit = min(_MAX_SAVES, max(self._blocks.num_blocks // 8, 1))
        names = [] if self._saves else self._tier.next_saves(limit)
        if erased := self._tier.next_erasures(_MAX_ERASED):
            transfers.append(self._transfer(TransferKind.ERASE, erased))
        if names:
            self._saves = True
            blocks = [self._blocks.pin(name) for name in names]
            transfers.append(self._transfer(TransferKind.SAVE, names, blocks))
        return transfers

    def open(self, contents: TierContents) -> None:
        """Notes what the tier contains."""
        self._tier.open(contents.names, contents.capacity, contents.orphans)

    def apply(self, answer: TransferAnswer) -> None:
        """Applies an answer."""
        transfer = self._in_flight.pop(answer.number)
        if transfer.kind is TransferKind.SAVE:
            self._saves = False
            for block in transfer.blocks:
                self._blocks.unpin(block)
            self._tier.saved(transfer.names, answer.done)
            self._stats.saved_blocks += sum(answer.done)
        elif transfer.kind is TransferKind.LOAD:
            self._loaded(transfer, answer)
        if not answer.capacity:
            self._tier.open([], 0)

    def lost(self) -> None:
        """Forgets the transfers in flight, whose workers are lost. Blocks that were being saved are
        erased."""
        for transfer in self._in_flight.values():
            if transfer.kind is TransferKind.SAVE:
                for block in transfer.blocks:
                    self._blocks.unpin(block)
            if transfer.kind is not TransferKind.LOAD:
                self._tier.erase_later(transfer.names)
        self._tier.close()
        self._in_flight.clear()
        self._readers.clear()
        self._saves = False
        for seq in tuple(self._sequences.swapped):
            self._end(seq, 0)

    def _next_load(self, seq: Sequence, num_read: int) -> Transfer | None:
        """Reads the next blocks of a swapped sequence, or ends its reading."""
        names, blocks, tier = seq.blocks.names, seq.blocks.tables, self._tier
        is_given_up = num_read > 0 and tier.is_slow(seq.num_computed_tokens)
        if seq.status is not Status.SWAPPED or not tier.is_open or is_given_up:
            self._end(seq, num_read)
            return None
        places = seq.blocks.loading[num_read : num_read + _MAX_LOADED]
        transfer = self._transfer(
            TransferKind.LOAD,
            [names[number][i] for number, i in places],
            [blocks[number][i] for number, i in places],
        )
        tier.use(transfer.names)
        self._num_read[seq], self._readers[transfer.number] = None, (seq, num_read)
        return transfer

    def _loaded(self, transfer: Transfer, answer: TransferAnswer) -> None:
        seq, num_read = self._readers.pop(transfer.number)
        num_done = next((i for i, done in enumerate(answer.done) if not done), len(answer.done))
        self._stats.loaded_blocks += num_done
        num_read = self._num_read[seq] = num_read + num_done
        if num_done < len(answer.done):
            self._stats.failed_loads += 1
            self._tier.erase([transfer.names[num_done]])
            self._end(seq, num_read)
            return
        self._tier.learn(num_done * self._blocks.paging.block_size, answer.seconds)
        if num_read == len(seq.blocks.loading):
            self._end(seq, num_read)

    def _end(self, seq: Sequence, num_read: int) -> None:
        """Ends the reading of a sequence, whose first `num_read` blocks were read."""
        self._num_read.pop(seq, None)
        for number, i in seq.blocks.loading:
            self._tier.reading.discard(seq.blocks.names[number][i])
        self._sequences.swap_in(seq, num_read)

    def _transfer(self, kind: TransferKind, names: Seq[bytes], blocks: Seq[int] = ()) -> Transfer:
        self._last += 1
        transfer = Transfer(self._last, kind, names, blocks)
        self._in_flight[self._last] = transfer
        return transfer
