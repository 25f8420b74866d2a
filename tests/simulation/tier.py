"""A directory of blocks beside simulated workers: copies take time, fail, and may be lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

from scheduler_svc.core.swaps import Copier, TierContents, Transfer, TransferAnswer, TransferKind
from scheduler_svc.engine import WorkersLostError
from tests.sanitizer_transfers import Block, SanitizedTransfers
from tests.simulation.knobs import Knobs

Answer = TransferAnswer | TierContents


class SimulatedTier(Copier):
    """Makes the transfers of an engine.

    Args:
        answered: returns the last step that is answered.
        lost: makes the error of a loss.
    """

    def __init__(
        self,
        knobs: Knobs,
        answered: Callable[[], int],
        lost: Callable[[str], WorkersLostError],
        counts: Counter[str],
    ) -> None:
        self._knobs = knobs
        self._lost = lost
        self._answered = answered
        self._counts = counts
        self._rng = Random(f"tier {knobs.requests} {knobs.num_blocks}")  # of its own
        self._loop = asyncio.get_running_loop()
        self._files: dict[bytes, Block] = {}
        self._pending: dict[int, tuple[Transfer, asyncio.TimerHandle]] = {}
        self._capacity = knobs.tier_blocks
        self.broken = False

    def configure(self, sanitizer: SanitizedTransfers) -> None:
        """Begins an epoch. Of the transfers in flight, any part may have been made."""
        for transfer, handle in self._pending.values():
            handle.cancel()
            for i, name in enumerate(transfer.names):
                if self._rng.random() < 0.5:
                    continue
                if transfer.kind is TransferKind.ERASE:
                    self._files.pop(name, None)
                elif transfer.kind is TransferKind.SAVE:
                    self._files[name] = self._sanitizer.garbage()
                else:
                    self._sanitizer.load(transfer.blocks[i], self._sanitizer.garbage())
            self._counts["lost transfers"] += 1
        self._pending.clear()
        self.broken = False
        self._sanitizer = sanitizer
        self._answers: list[asyncio.Queue[Answer]] = [asyncio.Queue(), asyncio.Queue()]
        for answers in self._answers:
            self._loop.call_later(10 * self._delay(), self._list, answers)
        self._last_due = [0.0, 0.0]

    async def send_transfer(self, transfer: Transfer) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise self._lost("before a transfer was written")
        if transfer.kind is TransferKind.SAVE:
            self._sanitizer.begin_save(transfer.blocks, self._answered())
        elif transfer.kind is TransferKind.LOAD:
            self._sanitizer.begin_load(transfer.blocks, self._answered())
        loads = transfer.kind is TransferKind.LOAD
        due = self._loop.time() + self._delay() * (1 + 10 * loads)
        due = self._last_due[loads] = max(due, self._last_due[loads] + 1e-6)
        handle = self._loop.call_at(due, self._make, transfer)
        self._pending[transfer.number] = transfer, handle

    async def receive_transfer(self, *, loads: bool) -> Answer:
        return await self._answers[loads].get()

    def _make(self, transfer: Transfer) -> None:
        del self._pending[transfer.number]
        works = self._capacity > 0
        done = [works and self._make_one(transfer, i) for i in range(len(transfer.names))]
        if transfer.kind is not TransferKind.ERASE:
            self._sanitizer.release(transfer.blocks)
        self._counts[f"blocks: {transfer.kind.name}"] += sum(done)
        self._counts["transfers that failed in part"] += not all(done)
        assert len(self._files) <= self._knobs.tier_blocks, "more blocks than fit"
        seconds = self._knobs.tier_s * self._rng.random()
        if works and self._rng.random() < self._knobs.tier_ends:
            self._capacity = 0
        answer = TransferAnswer(transfer.number, done, seconds, self._capacity)
        self._answers[transfer.kind is TransferKind.LOAD].put_nowait(answer)

    def _make_one(self, transfer: Transfer, i: int) -> bool:
        name, fails = transfer.names[i], self._rng.random() < self._knobs.tier_faults
        if transfer.kind is TransferKind.ERASE:
            self._files.pop(name, None)
            return True
        block = transfer.blocks[i]
        if fails:
            self._files.pop(name, None)
        elif transfer.kind is TransferKind.SAVE:
            self._files[name] = self._sanitizer.saved(block)
        elif found := self._files.get(name):
            self._sanitizer.load(block, found)
            self._sanitizer.trust(block)
        else:
            return False
        return not fails

    def _list(self, answers: asyncio.Queue[Answer]) -> None:
        names = [*self._files]
        self._rng.shuffle(names)
        answers.put_nowait(TierContents(names, self._capacity))

    def _delay(self) -> float:
        return self._rng.uniform(0, 2 * self._knobs.step_s)
