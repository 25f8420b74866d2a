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
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import log, log1p
from weakref import WeakKeyDictionary

from scheduler_svc.core.acceptance import Acceptance
from scheduler_svc.core.drafts import Draft, DraftIndex
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Step, StepTiming
from scheduler_svc.core.step_times import StepTimes

MAX_DRAFTS = 16  # of one sequence in a step
_MIN_LIKELY = 0.1  # less likely drafts are not worth a calculation


@dataclass(slots=True, eq=False)
class _Drafted:
    """The guesses at one sequence's next tokens."""

    index: DraftIndex
    acceptance: Acceptance
    num_tokens: int = 0  # of the sequence when `draft` was proposed
    draft: Draft = field(default_factory=lambda: Draft([], 0))


class Speculation:
    """Drafts the tokens that followed earlier occurrences of a sequence's last tokens."""

    def __init__(self) -> None:
        self._sequences: WeakKeyDictionary[Sequence, _Drafted] = WeakKeyDictionary()
        self._acceptance = Acceptance()
        self._times = StepTimes()

    def waits(self, decodes: Seq[Sequence]) -> bool:
        """Whether the next step should wait for the answer to the step in flight, because drafts
        are then expected to gain more than the wait costs."""
        return bool(self.choose(decodes, len(decodes) * MAX_DRAFTS))

    def choose(self, decodes: Seq[Sequence], room: int) -> dict[Sequence, Seq[int]]:
        """The tokens to draft, at most `room` in all. Those of a sequence whose last token is not
        known yet begin with a guess at that token."""
        gains: list[tuple[float, Sequence]] = []
        for seq in decodes:
            if drafted := self._guess(seq):
                gains += ((gain, seq) for gain in _gains(seq, drafted))
        gains.sort(key=lambda each: -each[0])
        num_drafts = self._best_number([gain for gain, _ in gains[:room]], len(decodes))
        counts = Counter(seq for _, seq in gains[:num_drafts])
        return {seq: self._sequences[seq].draft.tokens[:count] for seq, count in counts.items()}

    def answered(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Notes how many of a sequence's drafted tokens were accepted."""

    def step_answered(self, step: Step, timing: StepTiming) -> None:
        """Learns from the time that a step took."""
        self._times.step_answered(step, timing)

    def _guess(self, seq: Sequence) -> _Drafted | None:
        """Guesses a sequence's next tokens, and learns from the last guess."""
        drafted = self._sequences.get(seq)
        if drafted is None:
            if seq.params.stepwise:
                return None
            drafted = _Drafted(DraftIndex(seq.tokens), Acceptance(self._acceptance))
            self._sequences[seq] = drafted
        if drafted.num_tokens < len(seq.tokens):
            actual = seq.tokens[drafted.num_tokens :]
            for i, (guess, token) in enumerate(zip(drafted.draft.tokens, actual, strict=False)):
                drafted.acceptance.learn(drafted.draft.match_len + i, right=guess == token)
                if guess != token:
                    break
            drafted.draft = drafted.index.propose(MAX_DRAFTS)
            drafted.num_tokens = len(seq.tokens)
        return drafted

    def _best_number(self, gains: Seq[float], num_seqs: int) -> int:
        """How many drafts, of which the best gain this much, are best in a step of sequences."""
        best, best_value, value = 0, 0.0, 0.0
        without_s = self._times.seconds(num_seqs) or 1.0
        for number, gain in enumerate(gains, 1):
            value += gain
            seconds = (self._times.seconds(num_seqs + number) or 1.0) + self._times.wait_s
            if (net := value - num_seqs * log(seconds / without_s)) > best_value:
                best, best_value = number, net
        return best


def _gains(seq: Sequence, drafted: _Drafted) -> Iterator[float]:
    """The gain of each token drafted for a sequence, in the order of the tokens."""
    draft = drafted.draft
    num_unknown = seq.num_scheduled_tokens + 1 - len(seq.tokens)
    # The last token that it may have is not computed.
    room = seq.max_scheduled_tokens - len(seq.tokens)
    expected, likely = 1.0, 1.0
    for i in range(min(len(draft.tokens), room)):
        likely *= drafted.acceptance.probability(draft.match_len + i)
        if i < num_unknown:
            continue
        if likely < _MIN_LIKELY:
            return
        yield log1p(likely / expected)
        expected += likely
