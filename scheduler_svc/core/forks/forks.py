"""Sequences of one request that share blocks: its n completions, or the beams of its search.

Completions follow the first of them until the prompt is computed, and are then forked from it.
Beams are forked and ended as the search chooses; one that is preempted while it waits for the
others is parked until they have caught up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Protocol

from scheduler_svc.core.forks.beams import BeamGroup
from scheduler_svc.core.forks.followers import Followers, siblings
from scheduler_svc.core.sequence import Sequence, SequenceKey, Status
from scheduler_svc.core.step import End, Logprobs, Output, Step


class Host(Protocol):
    """The scheduler, which owns the sequences."""

    def open(self, seq: Sequence) -> None:
        """Registers a new sequence."""

    def close(self, seq: Sequence) -> None:
        """Ends a sequence without an output."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` run on what `parent` has computed, or queues it."""

    def queue_again(self, seq: Sequence) -> None:
        """Sends a sequence that holds no blocks back to wait."""

    def release(self, seq: Sequence) -> None:
        """Lets a held sequence go on."""


class Forks:
    """Hears from the scheduler what happens to its sequences, most of which have no relatives."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._followers = Followers()
        self._beams: dict[Sequence, BeamGroup] = {}  # live ones
        self._beam_keys: set[SequenceKey] = set()  # that live beams have, or may come to have
        self._parked: set[Sequence] = set()

    @property
    def beams(self) -> Collection[Sequence]:
        """The live beams. The tokens sampled for them do not count: their search picks others."""
        return self._beams

    def may_claim(self, key: SequenceKey) -> bool:
        """Whether a key belongs to a beam, or may come to."""
        return key in self._beam_keys

    def add(self, seq: Sequence, n: int) -> list[Sequence]:
        """Takes in a new sequence and makes its n - 1 followers."""
        if seq.params.beam_width:
            group = self._beams[seq] = BeamGroup(seq)
            self._beam_keys.update(group.keys())
            self._host.release(seq)
        followers = siblings(seq, n)
        self._followers.add(seq, followers)
        return followers

    def followers_of(self, seq: Sequence) -> list[Sequence]:
        return self._followers.of(seq)

    def all_of(self, seq: Sequence) -> list[Sequence]:
        """The sequences that end along with this one: all beams of its search, or just itself."""
        group = self._beams.get(seq)
        return list(group.live) if group else [seq]

    def ends(self, seq: Sequence, end: End) -> list[Output]:
        """The outputs that end a sequence, or all completions of its search."""
        group = self._beams.get(seq)
        return group.ends(end) if group else [Output(seq, end=end)]

    def prompts_computed(self, step: Step) -> None:
        """Forks the followers of every sequence whose prompt this answered step completed."""
        if not self._followers:
            return
        for row in step.rows:
            if row.samples and row.seq.status is Status.RUNNING:
                for child in self._followers.pop(row.seq):
                    row.seq.num_computed_tokens = row.start + row.num_tokens
                    self._host.fork(row.seq, child)

    def advance_beams(self, found: Mapping[Sequence, Logprobs]) -> list[Output]:
        """Takes in the candidates found for live beams, and moves each search on that has all of
        its own."""
        outputs: list[Output] = []
        for seq, logprobs in found.items():
            group = self._beams.get(seq)
            if group is not None:
                seq.held = True
                if group.add_candidates(seq, logprobs):
                    outputs += self._choose_beams(group)
        return outputs

    def is_idle(self, seq: Sequence) -> bool:
        """Whether this is a beam that waits for the others, with nothing left to compute."""
        group = self._beams.get(seq)
        return group is not None and group.has_candidates(seq)

    def park(self, seq: Sequence) -> None:
        """Sets aside an idle beam that has lost its blocks."""
        seq.status = Status.PARKED
        self._parked.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes out a follower or a parked beam."""
        if seq.status is Status.FOLLOWING:
            self._followers.remove(seq)
        else:
            self._parked.remove(seq)

    def closed(self, seq: Sequence) -> None:
        """Notes that a sequence has ended; its first follower now leads the others."""
        if followers := self._followers.pop(seq):
            self._host.queue_again(followers[0])
            self._followers.add(followers[0], followers[1:])
        group = self._beams.pop(seq, None)
        if group and not any(beam in self._beams for beam in group.live):
            self._beam_keys.difference_update(group.keys())

    def check_integrity(self, num_waiting_here: int) -> None:
        """Raises AssertionError if the records contradict each other. For tests.

        Args:
            num_waiting_here: open sequences that neither run nor wait in the scheduler's queue.
        """
        self._followers.check_integrity()
        assert all(s.status is Status.PARKED and not s.block_table for s in self._parked), "parked"
        assert all(s.status is not Status.FINISHED for s in self._beams), "a beam that has ended"
        keys = {*chain(*(group.keys() for group in self._beams.values()))}
        assert self._beam_keys == keys, "beams"
        num_here = len(self._followers) + len(self._parked)
        assert num_here == num_waiting_here, "in no queue, or in two"

    def _choose_beams(self, group: BeamGroup) -> list[Output]:
        advance = group.advance()
        if advance is None:
            outputs = group.completions()
            for seq in group.live:
                self._host.close(seq)
            return outputs
        for seq in advance.dropped:  # first: the others' children take over their numbers
            self._host.close(seq)
        for parent, child in advance.forks:
            self._beams[child] = group
            self._host.open(child)
            self._host.fork(parent, child)
        for seq, token in advance.kept:
            seq.tokens.append(token)
            self._host.release(seq)
            if seq.status is Status.PARKED:
                self._parked.remove(seq)
                self._host.queue_again(seq)
        return []
