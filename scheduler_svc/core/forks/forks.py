"""Sequences of one request that share blocks: its n completions, or the beams of its search.

Completions follow the first of them until the prompt is computed, and are then forked from it.
Beams are forked and ended as the search chooses; one that is preempted while it waits for the
others is parked until they have caught up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

from scheduler_svc.core.forks.beams import Advance, BeamGroup
from scheduler_svc.core.forks.followers import Followers, siblings
from scheduler_svc.core.sequence import Sequence, SequenceKey, Status
from scheduler_svc.core.step import End, Logprobs, Output, Row, Step


class Forks:
    """Hears from the scheduler what happens to its sequences, most of which have no relatives, and
    decides what it is to do with those that have."""

    def __init__(self) -> None:
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

    def prompts_computed(self, step: Step) -> list[tuple[Row, Sequence]]:
        """The followers to fork now from a row's sequence: those whose prompt this answered step
        completed."""
        if not self._followers:
            return []
        rows = [row for row in step.rows if row.samples and row.seq.status is Status.RUNNING]
        return [(row, child) for row in rows for child in self._followers.pop(row.seq)]

    def advance_beams(self, found: Mapping[Sequence, Logprobs]) -> list[Advance]:
        """Takes in the candidates found for live beams, and moves each search on that has all of
        its own."""
        advances = []
        for seq, logprobs in found.items():
            group = self._beams.get(seq)
            if group is not None:
                seq.held = True
                if group.add_candidates(seq, logprobs):
                    advance = group.advance()
                    self._beams.update((child, group) for _, child in advance.forks)
                    advances.append(advance)
        return advances

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

    def closed(self, seq: Sequence) -> Sequence | None:
        """Notes that a sequence has ended. Returns its first follower, which now leads the others
        and is to be queued."""
        group = self._beams.pop(seq, None)
        if group and not any(beam in self._beams for beam in group.live):
            self._beam_keys.difference_update(group.keys())
        if followers := self._followers.pop(seq):
            leader, *others = followers
            self._followers.add(leader, others)
            return leader
        return None

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
