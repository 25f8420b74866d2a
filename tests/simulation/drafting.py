"""Speculation by chance: drafts that are right or wrong as often as a seed wants."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from random import Random

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.speculation.speculation import Speculation
from tests.oracle import VOCAB_SIZE
from tests.simulation.knobs import Knobs

_MAX_DRAFTS = 5


class SimulatedSpeculation(Speculation):
    """`tokens_of` returns the tokens that a sequence will have, as far as they are known."""

    def __init__(
        self, knobs: Knobs, rng: Random, tokens_of: Callable[[Sequence], Seq[int]]
    ) -> None:
        super().__init__()
        self._knobs = knobs
        self._rng = rng
        self._tokens_of = tokens_of

    def waits(self, decodes: Seq[Sequence]) -> bool:
        return self._happens(self._knobs.draft_waits)

    def choose(self, decodes: Seq[Sequence], room: int) -> dict[Sequence, Seq[int]]:
        drafts: dict[Sequence, Seq[int]] = {}
        for seq in decodes:
            limit = min(room, seq.max_scheduled_tokens - seq.num_tokens, _MAX_DRAFTS)
            if limit > 0 and not seq.params.stepwise and self._happens(self._knobs.drafted):
                drafts[seq] = self._guess(seq, self._rng.randint(1, limit))
                room -= len(drafts[seq])
        return drafts

    def _guess(self, seq: Sequence, count: int) -> list[int]:
        known = self._tokens_of(seq)
        return [
            known[place]
            if place < len(known) and self._happens(self._knobs.right_drafts)
            else self._rng.randrange(VOCAB_SIZE)
            for place in range(seq.num_tokens, seq.num_tokens + count)
        ]

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability
