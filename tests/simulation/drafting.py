"""Speculation by chance: drafts that are right or wrong as often as a seed wants."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random

from scheduler_svc.core.guesses.guess import DRAFTED
from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.sequence import Sequence
from tests.oracle import VOCAB_SIZE

MAX_DRAFTS = 5


@dataclass(frozen=True)
class Chances:
    """Probabilities."""

    drafts: float  # per decode, that tokens are drafted after it
    right: float  # per drafted token
    waits: float  # per step, that it waits for an answer
    by_model: bool = False  # whether the workers' draft model guesses


NO_DRAFTS = Chances(drafts=0.0, right=0.0, waits=0.0)


class SimulatedSpeculation(Speculation):
    """`next_tokens` returns the tokens that follow in a sequence, as far as they are known."""

    def __init__(
        self, chances: Chances, rng: Random, next_tokens: Callable[[Sequence], Seq[int]]
    ) -> None:
        super().__init__(by_model=chances.by_model)
        self._chances = chances
        self._rng = rng
        self._next_tokens = next_tokens

    def waits(self, decodes: Seq[Sequence], room: int) -> bool:
        return self._happens(self._chances.waits)

    def choose(self, decodes: Seq[Sequence], room: int) -> dict[Sequence, Seq[int]]:
        drafts: dict[Sequence, Seq[int]] = {}
        for seq in decodes:
            limit = min(room, seq.max_scheduled_tokens - seq.num_tokens, MAX_DRAFTS)
            if limit > 0 and not seq.params.stepwise and self._happens(self._chances.drafts):
                drafts[seq] = self._guess_next(seq, self._rng.randint(1, limit))
                room -= len(drafts[seq])
        return drafts

    def _guess_next(self, seq: Sequence, count: int) -> list[int]:
        if self._chances.by_model:
            return [DRAFTED] * count
        known = self._next_tokens(seq)
        return [
            known[i]
            if i < len(known) and self._happens(self._chances.right)
            else self._rng.randrange(VOCAB_SIZE)
            for i in range(count)
        ]

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability
