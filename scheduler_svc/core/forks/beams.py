"""Beam search over a scheduler's sequences: each live beam is a sequence, and beams share blocks.

Live beams advance together. A beam's candidates wait here until the workers have found candidates
for all beams; then the next live beams are chosen. A beam's sequence continues as its first
successor, and its other successors are forked from it. A beam without successors ends. All
completions are output when the search ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.forks.beam_search import BeamSearch
from scheduler_svc.core.sequence import FinishCause, Sequence, SequenceKey
from scheduler_svc.core.step import End, Logprobs, Output


@dataclass(frozen=True)
class Advance:
    """The next state of the live beams: `dropped` beams end, `forks` are (parent, child) pairs, and
    `kept` beams continue with one more token. When the search ends, every beam is dropped, and
    `outputs` holds its completions."""

    dropped: list[Sequence]
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    kept: list[tuple[Sequence, int]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)


class BeamGroup:
    """The live beams of one request. `first` is the prompt; its number is the lowest."""

    def __init__(self, first: Sequence) -> None:
        self._first = first
        self._search = BeamSearch(first.params)
        self._candidates: dict[Sequence, Logprobs] = {}
        self.live = [first]

    def keys(self) -> list[SequenceKey]:
        """The keys that live beams may ever have, which are also the keys of the completions."""
        connection, number = self._first.key
        return [SequenceKey(connection, number + i) for i in range(self._first.params.beam_width)]

    def add_candidates(self, seq: Sequence, found: Logprobs) -> bool:
        """Adds the tokens that may follow a live beam: the sampled token, which is ignored, then
        the most likely ones. Returns whether all live beams have theirs, so that `advance` may be
        called."""
        self._candidates[seq] = found
        return len(self._candidates) == len(self.live)

    def advance(self) -> Advance:
        """Chooses the next live beams."""
        found = [self._candidates[seq] for seq in self.live]
        self._candidates.clear()
        chosen = self._search.advance([(each.ids[0, 1:], each.values[0, 1:]) for each in found])
        if not chosen:
            return Advance(self.live, outputs=self._completions())
        parents = {parent for parent, _ in chosen}
        dropped = [seq for i, seq in enumerate(self.live) if i not in parents]
        in_use = {self.live[i].key for i in parents}
        free = [key for key in self.keys() if key not in in_use]
        live, forks, kept = [], [], []
        for index, token in chosen:
            parent = self.live[index]
            if index in parents:
                parents.remove(index)
                kept.append((parent, token))
                live.append(parent)
            else:
                child = self._child(free.pop(0), parent, token)
                forks.append((parent, child))
                live.append(child)
        self.live = live
        return Advance(dropped, forks, kept)

    def _completions(self) -> list[Output]:
        """The outputs of the completions, best first: each completion's tokens, then its end."""
        outputs: list[Output] = []
        found = self._search.hypotheses
        for key, (token_ids, score) in zip(self.keys(), found, strict=False):
            seq = self._sequence(key)
            seq.tokens.extend(token_ids)
            cause = seq.finish_cause()
            assert cause is not None
            outputs += [Output(seq, token, offset) for offset, token in enumerate(token_ids)]
            outputs.append(Output(seq, end=End(cause, score=score)))
        # A small vocabulary may yield fewer completions than the request asked for.
        return outputs + self.ends(End(FinishCause.LENGTH))[len(found) :]

    def ends(self, end: End) -> list[Output]:
        """An output with `end` for each completion that the request asked for."""
        return [Output(self._sequence(key), end=end) for key in self.keys()]

    def _child(self, key: SequenceKey, parent: Sequence, token: int) -> Sequence:
        child = self._sequence(key)
        child.tokens.extend(parent.tokens[parent.num_prompt_tokens :])
        child.tokens.append(token)
        child.unpause()
        child.rank, child.usage = parent.rank, parent.usage
        return child

    def _sequence(self, key: SequenceKey) -> Sequence:
        first = self._first
        seq = Sequence(
            key,
            first.tokens[: first.num_prompt_tokens],
            first.params,
            first.request,
        )
        seq.started = first.started
        return seq
