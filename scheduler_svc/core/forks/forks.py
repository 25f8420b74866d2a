"""Sequences of one request that share blocks: its n completions, or the beams of its search.

The first of n completions is the leader, which computes the prompt. The others are followers, which
wait outside the queue until the prompt is in the cache. Then they are forked from the leader. If
the leader ends before that, the next completion leads. Beams are forked and ended as the search
chooses. The beams of a search run together: while one of them waits in the queue, those that have
their candidates stop, and wait outside the queue. So a beam that runs without work waits for a beam
that runs with work, and a search ends even if it is wider than the engine has slots or blocks. Then
each of its tokens may take a computation of every beam's whole context.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

from scheduler_svc.core.forks.beams import Advance, BeamGroup
from scheduler_svc.core.sequence import Row, Sequence, SequenceKey, Status
from scheduler_svc.core.step import End, Logprobs, Output, Step

_SEEDS = 1 << 64


class Forks:
    """Tracks the scheduler's sequences, most of which share no blocks, and decides when those that
    do are forked, queued and ended."""

    def __init__(self) -> None:
        # For each of n completions whose prompt is not computed yet: all n, the leader first.
        self._completions: dict[Sequence, list[Sequence]] = {}
        self._beams: dict[Sequence, BeamGroup] = {}  # live ones
        self.beam_keys: set[SequenceKey] = set()  # that live beams have or may get

    @property
    def beams(self) -> Collection[Sequence]:
        """The live beams. Tokens sampled for them are ignored: their search chooses others."""
        return self._beams

    def add(self, seq: Sequence, n: int) -> list[Sequence]:
        """Adds a new sequence, and returns its n - 1 new followers."""
        if seq.params.beam_width:
            group = self._beams[seq] = BeamGroup(seq)
            self.beam_keys.update(group.keys())
        followers = [_sibling(seq, i) for i in range(1, n)]
        if followers:
            completions = [seq, *followers]
            self._completions.update((each, completions) for each in completions)
        return followers

    def followers_of(self, seq: Sequence) -> list[Sequence]:
        """The completions that wait for this sequence to compute their prompt."""
        completions = self._completions.get(seq)
        return completions[1:] if completions and completions[0] is seq else []

    def all_of(self, seq: Sequence) -> list[Sequence]:
        """The sequences that end together with this one: all beams of its search, or itself."""
        group = self._beams.get(seq)
        return list(group.live) if group else [seq]

    def ends(self, seq: Sequence, end: End) -> list[Output]:
        """The outputs that end a sequence, or all completions of its search."""
        group = self._beams.get(seq)
        return group.ends(end) if group else [Output(seq, end=end)]

    def prompts_computed(self, step: Step) -> list[tuple[Row, Sequence]]:
        """The followers whose prompt this answered step completed, each with the row from whose
        sequence it is to be forked."""
        if not self._completions:
            return []
        found = []
        for row in step.rows:
            if row.samples and row.seq.status is Status.RUNNING:
                for follower in self._completions.pop(row.seq, [])[1:]:
                    del self._completions[follower]
                    found.append((row, follower))
        return found

    def advance_beams(self, found: Mapping[Sequence, Logprobs]) -> list[Advance]:
        """Adds the candidates found for live beams, and advances each search that has all its
        candidates."""
        advances = []
        for seq, logprobs in found.items():
            group = self._beams.get(seq)
            if group is not None:
                seq.paused = True
                if group.add_candidates(seq, logprobs):
                    advance = group.advance()
                    self._beams.update((child, group) for _, child in advance.forks)
                    advances.append(advance)
        return advances

    def beams_to_stop(self) -> list[Sequence]:
        """The running beams that have their candidates while another beam of their search waits in
        the queue."""
        return [
            seq
            for seq, group in self._beams.items()
            if seq.paused
            and seq.status is Status.RUNNING
            and any(beam.status is Status.WAITING for beam in group.live)
        ]

    def closed(self, seq: Sequence) -> Sequence | None:
        """Notes that a sequence has ended. Returns the completion that now leads in its place, if
        there is one; the caller must queue it."""
        group = self._beams.pop(seq, None)
        if group and not any(beam in self._beams for beam in group.live):
            self.beam_keys.difference_update(group.keys())
        completions = self._completions.pop(seq, [])
        has_led = bool(completions) and completions[0] is seq
        if completions:
            completions.remove(seq)
        return completions[0] if has_led and completions else None

    def check_integrity(self, num_waiting_here: int) -> None:
        """Raises AssertionError if the records contradict each other. For tests.

        Args:
            num_waiting_here: open sequences that neither run nor wait in the scheduler's queue.
        """
        followers = []
        for seq, completions in self._completions.items():
            leader = completions[0]
            begun = leader.status not in (Status.FOLLOWING, Status.FINISHED)
            assert begun, "a leader that has ended"
            assert leader.num_generated_tokens == 0, "a leader whose prompt is computed"
            assert seq in completions, "follows another"
            if seq is not leader:
                followers.append(seq)
        assert all(seq.status is Status.FOLLOWING for seq in followers), "status of followers"
        stopped = [seq for seq in self._beams if seq.status is Status.FOLLOWING]
        assert all(seq.paused for seq in stopped), "a beam in no queue lacks its candidates"
        assert not any(seq.blocks.tables for seq in (*followers, *stopped)), "holds blocks idly"
        assert all(seq.status is not Status.FINISHED for seq in self._beams), "an ended beam"
        keys = {*chain(*(group.keys() for group in self._beams.values()))}
        assert self.beam_keys == keys, "beams"
        assert len(followers) + len(stopped) == num_waiting_here, "in no queue, or in two"


def _sibling(seq: Sequence, i: int) -> Sequence:
    """Makes completion `i` of a new sequence's prompt; `i` is added to the number and to the seed.
    Only the first completion reports the prompt's log-probabilities."""
    connection, number = seq.key
    prompt = seq.tokens[: seq.num_prompt_tokens]
    seed = (seq.params.seed + i) % _SEEDS
    params = replace(seq.params, seed=seed, prompt_logprobs=None)
    sibling = Sequence((connection, number + i), prompt, params, seq.request)
    sibling.status = Status.FOLLOWING
    return sibling
