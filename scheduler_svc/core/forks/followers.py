"""Completions that share a prompt, which is computed only once.

The first one leads. The others follow: they wait, in no queue, until the prompt is in the cache,
and are then forked from the leader. If the leader ends before that, the first follower succeeds it.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler_svc.core.sequence import Sequence, Status

_SEEDS = 1 << 64


def siblings(seq: Sequence, n: int) -> list[Sequence]:
    """The other n - 1 completions of a new sequence's prompt, numbered and seeded from it onwards.
    Only the first sequence reports the prompt's log-probabilities."""
    connection, number = seq.key
    prompt = seq.tokens[: seq.num_prompt_tokens]
    return [
        Sequence(
            (connection, number + i),
            prompt,
            replace(seq.params, seed=(seq.params.seed + i) % _SEEDS, prompt_logprobs=None),
            seq.request,
        )
        for i in range(1, n)
    ]


class Followers:
    """Records which sequences follow which."""

    def __init__(self) -> None:
        self._of: dict[Sequence, list[Sequence]] = {}  # leader -> those that follow it
        self._leaders: dict[Sequence, Sequence] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def of(self, leader: Sequence) -> list[Sequence]:
        """The followers of a sequence."""
        return list(self._of.get(leader, ()))

    def add(self, leader: Sequence, followers: list[Sequence]) -> None:
        if followers:
            self._of[leader] = followers
        for seq in followers:
            seq.status = Status.FOLLOWING
            self._leaders[seq] = leader

    def remove(self, seq: Sequence) -> None:
        """Takes out a follower."""
        leader = self._leaders.pop(seq)
        self._of[leader].remove(seq)
        if not self._of[leader]:
            del self._of[leader]

    def pop(self, leader: Sequence) -> list[Sequence]:
        """Takes out all followers of a sequence, which need not have any."""
        followers = self._of.pop(leader, [])
        for seq in followers:
            del self._leaders[seq]
        return followers

    def check_integrity(self) -> None:
        """Raises AssertionError if the records contradict each other. For tests."""
        for leader, followers in self._of.items():
            assert leader.status in (Status.WAITING, Status.RUNNING), "a leader that has ended"
            assert leader.num_generated_tokens == 0, "a leader whose prompt is computed"
            assert all(self._leaders[seq] is leader for seq in followers), "another leader"
        for seq in self._leaders:
            assert seq.status is Status.FOLLOWING, "status of those that follow"
            assert not seq.block_table, "one that follows holds blocks"
        assert sum(map(len, self._of.values())) == len(self), "followers"
