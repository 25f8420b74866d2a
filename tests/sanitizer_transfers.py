"""The part of the sanitizer that checks copies between the cache and the tier under it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from shared.paging import Paging
from tests.sanitizer_features import fail
from tests.step_columns import Ints

Block = list[Ints]  # a block's content, by column


class SanitizedTransfers:
    """Checks the transfers of an epoch.

    Args:
        columns: the contents of the slots.
        unanswered, computed, salts: those of slots that no step may trust, of the steps that
            computed them, and of cache salts.
        written, attended: by slot, the last steps that wrote it and that attended to it.
    """

    def __init__(
        self,
        paging: Paging,
        columns: Seq[Ints],
        unanswered: Ints,
        computed: Ints,
        salts: Ints,
        written: Ints,
        attended: Ints,
    ) -> None:
        self._paging = paging
        self._columns, self._salts = columns, salts
        self._unanswered, self._computed = unanswered, computed
        self._written, self._attended = written, attended
        self.in_flight = np.zeros_like(written)  # per slot, the transfers that use it

    def begin_save(self, blocks: Seq[int], answered: int) -> None:
        """Checks that blocks can be saved. No step may write to them until `release`."""
        for block in blocks:
            slots = self._slots_of(block)
            self.in_flight[slots] += 1
            slots = slots[: self._paging.part_size]  # the others may be unused
            if self._unanswered[slots].any() or (self._written[slots] > answered).any():
                fail(f"saves block {block}, to which a step that is not answered writes")
            if (self._salts[slots] > 0).any():
                fail(f"saves block {block}, which has a cache salt")

    def begin_load(self, blocks: Seq[int], answered: int) -> None:
        """Checks that nothing else uses blocks, which may change until `release`, and which no step
        may trust until `trust`."""
        for block in blocks:
            slots = self._slots_of(block)
            in_flight = np.maximum(self._attended[slots], self._written[slots])
            if self.in_flight[slots].any() or (in_flight > answered).any():
                fail(f"loads block {block}, which is in use")
            self.in_flight[slots] += 1
            self._unanswered[slots] = 1

    def release(self, blocks: Seq[int]) -> None:
        for block in blocks:
            self.in_flight[self._slots_of(block)] -= 1

    def saved(self, block: int) -> Block:
        """The content of a block."""
        return [column[self._slots_of(block)] for column in self._columns]

    def garbage(self) -> Block:
        return [np.full(self._paging.slots_per_block, -1, np.int64) for _ in self._columns]

    def load(self, block: int, content: Block) -> None:
        """Writes a block, which no step may trust yet."""
        slots = self._slots_of(block)
        for column, values in zip(self._columns, content, strict=True):
            column[slots] = values
        self._unanswered[slots] = 1
        self._computed[slots] = self._written[slots] = self._attended[slots] = 0

    def trust(self, block: int) -> None:
        self._unanswered[self._slots_of(block)] = 0

    def check_no_use_of(self, slots: Ints) -> None:
        """Checks that no transfer reads or writes these slots."""
        if self.in_flight[slots].any():
            fail("writes to a slot that is being saved or loaded")

    def _slots_of(self, block: int) -> Ints:
        size = self._paging.slots_per_block
        return np.arange(block * size, (block + 1) * size)
