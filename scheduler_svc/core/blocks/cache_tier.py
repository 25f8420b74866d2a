"""The tier under the cache: which blocks the workers' directory holds, and which it gets next.

    published ──offer──▶ offered ──next_saves──▶ being saved ──saved──▶ stored ──▶ erased

A block is offered when it is published, before anything can take its place in the cache. Evicting
it, or preempting its sequence, then costs nothing. A block is only saved after the block before it,
without which it is of no use. If more is offered than can be saved, the rest is offered again when
its sequence ends. The stored blocks that were used least recently make room for new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice

from scheduler_svc.core.planning.step_times import USUAL_CONTEXT, StepTimes

_READ_WEIGHT = 0.3  # how far a new measurement moves the time of a read
# Each time that reading seems too slow, its time counts for less, so that it is measured again.
_DOUBT = 0.9


class CacheTier:
    """The tier of one engine. It is closed until the workers say what it holds."""

    def __init__(self) -> None:
        self.is_there = False  # though it may be closed
        self.is_open = False
        self.capacity = 0  # blocks
        self.times: StepTimes | None = None  # of the steps that reading saves
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._offered: OrderedDict[bytes, bytes | None] = OrderedDict()  # and the blocks before
        self._saving: dict[bytes, bool] = {}  # whether they may stay
        self._to_erase: dict[bytes, None] = {}
        self._parents: dict[bytes, bytes | None] = {}  # of saved blocks
        self._token_read_s = 0.0  # seconds to read a token; 0: unknown
        self.reading: set[bytes] = set()  # blocks that a sequence waits for

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: bytes) -> bool:
        return self.is_open and name in self._stored

    def open(self, names: Iterable[bytes], capacity: int, orphans: Iterable[bytes] = ()) -> None:
        """Notes what the workers hold, least recently used first. A capacity of 0 closes it.
        Orphans are erased."""
        found = dict.fromkeys(names)
        known = [name for name in self._stored if name in found]
        new = [name for name in found if name not in self._stored and name not in self._to_erase]
        self._stored = OrderedDict.fromkeys([*new, *known])
        self._to_erase |= dict.fromkeys(orphans)
        self.capacity, self.is_open = capacity, capacity > 0
        self.is_there = self.is_open
        self._make_room(0)
        if not self.is_open:
            self._offered.clear()
            self._parents.clear()

    def close(self) -> None:
        """Notes that the workers are lost. Nothing unanswered is trusted."""
        self.is_open = False
        self._saving.clear()
        self.reading.clear()

    def offer(self, name: bytes, parent: bytes | None) -> None:
        """Offers a published block, which follows block `parent`."""
        if self.is_open and name not in self._stored and name not in self._saving:
            self._offered.setdefault(name, parent)

    def withdraw(self, name: bytes) -> None:
        """Notes that a block is not published any more."""
        self._offered.pop(name, None)

    def use(self, names: Seq[bytes]) -> None:
        """Notes that a sequence used these blocks, of which each follows the one before."""
        for name in reversed(names):  # the last block leaves first
            if name in self._stored:
                self._stored.move_to_end(name)

    def erase(self, names: Iterable[bytes]) -> None:
        """Drops blocks, for whatever reason."""
        for name in names:
            self._offered.pop(name, None)
            self._parents.pop(name, None)
            if name in self._saving:
                self._saving[name] = False
            if name in self._stored or not self.is_open:
                self._stored.pop(name, None)
                self._to_erase[name] = None

    def erase_later(self, names: Iterable[bytes]) -> None:
        """Drops blocks, and erases files of these names, if there are any."""
        self.erase(names)
        self._to_erase |= dict.fromkeys(names)

    def next_saves(self, limit: int) -> list[bytes]:
        """Up to `limit` offered blocks, which are being saved from now on."""
        if self._offered and self.is_slow():
            self._token_read_s *= _DOUBT
            self._offered.clear()
        names: list[bytes] = []
        while self._offered and len(names) < min(limit, self.capacity):
            name, parent = self._offered.popitem(last=False)
            if parent is None or parent in self._stored or parent in self._saving:
                self._saving[name], self._parents[name] = True, parent
                self._to_erase.pop(name, None)
                names.append(name)
        self._make_room(len(self._saving))
        return names

    def saved(self, names: Seq[bytes], done: Seq[bool]) -> None:
        """Notes that blocks were saved, or could not be. The blocks before them leave later."""
        used: dict[bytes, None] = {}
        for name, is_done in reversed([*zip(names, done, strict=True)]):
            if not (self._saving.pop(name) and is_done):
                self._parents.pop(name, None)
                self._to_erase[name] = None
                continue
            self._stored[name] = None
            parent: bytes | None = name
            while parent is not None and parent in self._stored and parent not in used:
                used[parent] = None
                parent = self._parents.get(parent)
        for name in used:
            self._stored.move_to_end(name)

    def next_erasures(self, limit: int) -> list[bytes]:
        """Up to `limit` blocks that the workers shall erase now."""
        names = [*islice(self._to_erase, limit)]
        for name in names:
            del self._to_erase[name]
        return names

    def decide_to_load(self, context: int) -> bool:
        """Whether to read tokens of such a context instead of computing them. An unknown time
        counts as short."""
        if self.is_slow(context):
            self._token_read_s *= _DOUBT
            return False
        return True

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Notes the time that a read took by itself."""
        token_s, known_s = seconds / num_tokens, self._token_read_s
        self._token_read_s += (token_s - known_s) * (_READ_WEIGHT if known_s else 1)

    def is_slow(self, context: int = USUAL_CONTEXT) -> bool:
        """Whether to read a token takes longer than to compute it after `context` others."""
        token_s = self.times.prompt_token_s(context) if self.times else 0.0
        return 0 < token_s < self._token_read_s

    def _make_room(self, num_blocks: int) -> None:
        while self._stored and len(self._stored) + num_blocks > self.capacity:
            self.erase([next(iter(self._stored))])
