"""Speculation: chooses the tokens that are drafted for the next step.

A drafted token is a guess at a sequence's next token. The step computes it as if it had been
sampled, in a row of its own, and it is accepted exactly if the row before it samples it. A sampled
token is a function of logits, parameters, seed and position, so the output does not depend on
drafts at any temperature (for greedy decoding, this is Stern, Shazeer and Uszkoreit, "Blockwise
Parallel Decoding for Deep Autoregressive Models", 2018).

A draft is worth the logarithm of what its sequence gains: log((e + p) / e), if e tokens are
expected without it and it is accepted with probability p. Each sequence of the step loses
log(t' / t) when the step takes t' seconds instead of t. The sum is maximized. So a stream pays for
the drafts of others only where they gain more (proportional fairness: Kelly, "Charging and rate
control for elastic traffic", 1997).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from math import log

from scheduler_svc.core.guesses.acceptance import Acceptance
from scheduler_svc.core.guesses.guess import DRAFTED, Guess
from scheduler_svc.core.planning.step_times import StepTimes
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Step

_MAX_CLIENTS = 256  # whose acceptance is remembered, also between requests; each takes about 1 KB


class Speculation:
    """Drafts the tokens that followed earlier occurrences of a sequence's last tokens, and those
    that a grammar forces. With `by_model`, the workers' draft model drafts the tokens of sequences
    without a grammar. The scheduler's `step_times` tell how long steps take."""

    def __init__(self, *, by_model: bool = False) -> None:
        self._by_model = by_model
        self._acceptances: dict[str | int, Acceptance] = {}  # by client; the latest client is last
        self.step_times = StepTimes()

    def waits(self, decodes: Seq[Sequence], room: int) -> bool:
        """Whether the next step should wait for the answer to the step in flight, because up to
        `room` drafts are then expected to gain more than a wait costs."""
        return bool(self.choose(decodes, room))

    def choose(self, decodes: Seq[Sequence], room: int) -> dict[Sequence, Seq[int]]:
        """The tokens to draft, at most `room` in all. Those of a sequence whose last token is not
        known yet begin with a guess at that token."""
        # The step after drafts waits for their answer. Grammars have each step wait for the last.
        waits = all(seq.params.stepwise for seq in decodes)
        room = self.step_times.max_drafts(len(decodes), room, waits=waits) if decodes else 0
        if not room:
            return {}
        gains: list[tuple[float, Sequence]] = []
        for seq in decodes:
            if guess := self._guess(seq):
                num_sampled = seq.num_scheduled_tokens + 1 - seq.num_tokens
                if guess.tokens[:1] == [DRAFTED]:
                    num_sampled = 0  # the model guesses once the last token is known
                # The last token that a sequence may have is not computed.
                max_tokens = max(seq.max_scheduled_tokens - seq.num_tokens, 0)
                gains += ((gain, seq) for gain in guess.gains(num_sampled, max_tokens))
        if not gains:
            return {}
        gains.sort(key=lambda each: -each[0])  # stable, so that a token follows those before it
        gained = [gain for gain, _ in gains[:room]]
        num_drafts = self._best_number(gained, len(decodes), waits=waits)
        counts = Counter(seq for _, seq in gains[:num_drafts])
        return {seq: seq.guess.tokens[:count] for seq, count in counts.items() if seq.guess}

    def guess(self, seq: Sequence) -> Guess:
        """A guess at the next tokens of a sequence. If a grammar constrains the sequence, nothing
        is drafted before the guess has been constrained."""
        if seq.guess is None:
            by_model = self._by_model and not seq.params.stepwise
            seq.guess = Guess(seq.tokens, self._acceptance_of(seq), by_model=by_model)
        seq.guess.renew()
        return seq.guess

    def resolve(self, step: Step, draft_ids: Seq[int]) -> None:
        """Notes the tokens that the draft model guessed for the rows of a step, in their order."""
        guessed: dict[Sequence, list[int]] = {}
        rows = (row for row in step.rows if row.draft == DRAFTED)
        for row, token in zip(rows, draft_ids, strict=True):
            row.draft = token
            guessed.setdefault(row.seq, []).append(token)
        for seq, tokens in guessed.items():
            if seq.guess:
                seq.guess.tokens = tokens

    def _acceptance_of(self, seq: Sequence) -> Acceptance:
        """The acceptance of a sequence's client, or of its connection's anonymous clients. Wrong
        guesses of one client must not end the drafts of another."""
        client = seq.request.client.name or seq.key.connection
        acceptance = self._acceptances.pop(client, None) or Acceptance()
        self._acceptances[client] = acceptance
        if len(self._acceptances) > _MAX_CLIENTS:
            del self._acceptances[next(iter(self._acceptances))]
        return acceptance

    def _guess(self, seq: Sequence) -> Guess | None:
        """The guess at a sequence's next tokens, if any may be drafted."""
        if seq.params.bad_words:  # which depend on every token before
            return None
        if seq.params.stepwise:
            return seq.guess if seq.guess and seq.guess.is_current else None
        return self.guess(seq)

    def _best_number(self, gains: Seq[float], num_seqs: int, *, waits: bool) -> int:
        """How many drafts are best in a step of sequences, of the drafts that gain this much. Such
        a step `waits` or not for the last answer without drafts, too."""
        best, best_value, value = 0, 0.0, 0.0
        times = self.step_times
        alone_s = times.seconds_without(num_seqs)
        without_s = alone_s + (times.wait_s if waits else 0)
        for number, gain in enumerate(gains, 1):
            value += gain
            seconds = times.seconds_with(num_seqs + number, alone_s)
            if (net := value - num_seqs * log(seconds / without_s)) > best_value:
                best, best_value = number, net
        return best
