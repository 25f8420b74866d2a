"""The sequences that have not ended, and the transitions between their states.

    add ──▶ waiting ──admit──▶ running ──close──▶ finished
     │       ▲ ▲ │               ▲ ▲ │
     │       │ └─│── preempted ──│─│─┘
     │       │   └──▶ swapped ───┘ │
     │       └─ not read ─┘        │
     └─▶ following, until the prompt that it shares is computed ──fork──▶ running or waiting

A beam that is preempted with nothing left to compute also follows, until its search advances.

`forks/` handles sequences that share a prompt, and the beams of a search.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from math import ceil
from operator import attrgetter

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.forks.beams import Advance
from scheduler_svc.core.forks.forks import Forks
from scheduler_svc.core.heap import Heap
from scheduler_svc.core.sequence import Sequence, SequenceKey, Started, Status
from scheduler_svc.core.waiting_queue import WaitingQueue


@dataclass
class Stats:
    """Counters since the start."""

    steps: int = 0
    step_sequences: int = 0
    step_tokens: int = 0
    sampled_tokens: int = 0
    draft_tokens: int = 0  # in steps
    accepted_tokens: int = 0  # of these
    admissions: int = 0  # preempted sequences count each time
    preemptions: int = 0
    lost_tokens: int = 0  # computed, but lost with the cache
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    saved_blocks: int = 0  # to the tier under the cache
    loaded_blocks: int = 0  # from it
    failed_loads: int = 0


class OpenSequences:
    """The open sequences. Each is in exactly one place: `waiting`, `running`, `swapped` or only
    `forks`."""

    def __init__(self, blocks: BlockManager, waiting: WaitingQueue, max_num_seqs: int) -> None:
        self.waiting = waiting
        self.running: dict[Sequence, None] = {}  # in order of admission
        # Those whose blocks are being read, and when they were admitted. Some may have ended.
        self.swapped: dict[Sequence, float] = {}
        self.forks = Forks()
        self.stats = Stats()
        self.by_key: dict[SequenceKey, Sequence] = {}
        self.last_step = self.last_answered = 0
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._deadlines: Heap[float, Sequence] = Heap()
        # Ended sequences by the last step in flight that still writes their blocks.
        self._fenced: dict[int, list[Sequence]] = {}

    @property
    def num_admitted(self) -> int:
        """The number of sequences that hold blocks and run or will run."""
        return len(self.running) + len(self.swapped)

    def unscheduled(self, num_stages: int) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences from which the next step is planned: those with one token, and
        those with more. With several pipeline stages, these are in no step in flight, and at most a
        stage's share of the running sequences has one token: those whose last step is oldest."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        latest = self.last_step if num_stages == 1 else self.last_answered
        for seq in self.running:
            if seq.last_step > latest:
                continue
            if seq.num_unscheduled_tokens > 1:
                prompts.append(seq)
            elif seq.num_unscheduled_tokens:  # else it ends when a step in flight is answered
                decodes.append(seq)
        share = ceil(len(self.running) / num_stages)
        if len(decodes) > share:
            decodes = sorted(decodes, key=attrgetter("last_step"))[:share]
        return decodes, prompts

    def expired(self, now: float) -> Sequence | None:
        """A sequence whose deadline has passed at `now`, or None."""
        first = self._deadlines.peek()
        return first[1] if first and first[0] <= now else None

    def add(self, seq: Sequence, n: int) -> None:
        """Queues a new sequence; the other n - 1 completions of its prompt follow it."""
        self.waiting.push(seq)
        self._open(seq)
        followers = self.forks.add(seq, n)
        if seq.params.beam_width:
            seq.unpause()
        for follower in followers:
            self.waiting.arrive(follower)
            self._open(follower)

    def admit(self, seq: Sequence, now: float) -> bool:
        """Lets a waiting sequence run if there are a slot and blocks for it, or once its blocks
        have been read from the tier. Returns whether it has blocks."""
        if self.num_admitted >= self._max_num_seqs or not self._blocks.allocate_prompt(seq):
            return False
        self.waiting.admit(seq)
        self.stats.admissions += 1
        if seq.blocks.loading:
            seq.status = Status.SWAPPED
            self.swapped[seq] = now
        else:
            self._run(seq, now)
        return True

    def swap_in(self, seq: Sequence, num_read: int) -> None:
        """Lets a swapped sequence run if all its blocks were read, else queues it again. Those that
        were read stay in the cache."""
        now, is_read = self.swapped.pop(seq), num_read == len(seq.blocks.loading)
        may_run = self.waiting.only is None or seq in self.waiting.only
        self._blocks.loaded(seq, num_read)
        if is_read and may_run and seq.status is Status.SWAPPED:
            self._run(seq, now)
            return
        self._blocks.free(seq)
        if seq.status is Status.SWAPPED:
            self._queue_again(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets a child run on the tokens that its parent has computed. If there is no slot or too
        few blocks, it waits like a preempted sequence. It later finds the prompt in the prefix
        cache."""
        may_run = parent.status is Status.RUNNING and self.num_admitted < self._max_num_seqs
        if may_run and self._blocks.fork(parent, child):
            assert parent.started is not None
            self._run(child, parent.started.at)
        else:
            self._queue_again(child)

    def advance_beams(self, advance: Advance) -> None:
        """Ends, forks and continues live beams as their search has chosen."""
        for seq in advance.dropped:  # first: other beams' children take over their numbers
            self.close(seq)
        for parent, child in advance.forks:
            self._open(child)
            self.fork(parent, child)
        for seq, token in advance.kept:
            seq.tokens.append(token)
            seq.unpause()
            if seq.status is Status.FOLLOWING:
                self._queue_again(seq)

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to wait."""
        del self.running[seq]
        self._blocks.free(seq)
        self._queue_again(seq)
        self.stats.preemptions += 1

    def restrict(self, only: Seq[Sequence] | None) -> None:
        """Lets only the sequences in `only` run from now on; None lets all run. Preempts all
        others, so no step may be in flight."""
        self.waiting.only = only
        if only is not None:
            for seq in [seq for seq in self.running if seq not in only]:
                self.preempt(seq)

    def rewind_all(self) -> None:
        """Plans the steps in flight anew, after they were lost, but not the cache."""
        self.last_answered = self.last_step
        self._blocks.copy_again()
        for step in tuple(self._fenced):
            self.free_fenced(step)
        for seq in self.running:
            seq.rewind()

    def requeue_all(self) -> None:
        """Queues all running sequences again, after the cache and the steps in flight were lost."""
        for seq in self.running:
            self.stats.lost_tokens += seq.num_computed_tokens
            self._queue_again(seq)
        self.stats.preemptions += len(self.running)
        self.running.clear()
        self._fenced.clear()
        self.last_answered = self.last_step
        self._blocks.reset()

    def close(self, seq: Sequence) -> None:
        """Ends a sequence. Its blocks are freed once no step or read in flight writes them."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq.status is Status.RUNNING:
            del self.running[seq]
            if seq.last_step > self.last_answered:
                self._fenced.setdefault(seq.last_step, []).append(seq)
            else:
                self._blocks.free(seq)
        self.waiting.usages.close(seq.request.client, seq.key.connection)
        self._deadlines.discard(seq)
        seq.status = Status.FINISHED
        del self.by_key[seq.key]
        if leader := self.forks.closed(seq):
            self._queue_again(leader)

    def close_all_of(self, seq: Sequence) -> None:
        """Ends a sequence, or all beams of its search."""
        for each in self.forks.all_of(seq):
            self.close(each)

    def free_fenced(self, step: int) -> None:
        """Frees the blocks of ended sequences that this answered step was the last to write."""
        for seq in self._fenced.pop(step, ()):
            self._blocks.free(seq)

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks or queues contradict each other. For tests."""
        fenced = chain(*self._fenced.values())
        self._blocks.check_integrity([*self.running, *self.swapped, *fenced])
        self.waiting.check_integrity()
        open_sequences = self.by_key.values()
        clients = ((seq.request.client, seq.key.connection) for seq in open_sequences)
        self.waiting.usages.check_integrity(clients)
        assert all(s.status is Status.RUNNING for s in self.running), "status of the running"
        waiting = [s for s in self.by_key.values() if s in self.waiting]
        assert len(waiting) == len(self.waiting), "an ended sequence waits"
        assert all(s.status is Status.WAITING and not s.blocks.tables for s in waiting), "waiting"
        swapped = [seq for seq in self.swapped if seq.status is not Status.FINISHED]
        assert all(s.status is Status.SWAPPED for s in swapped), "status of the swapped"
        num_others = len(self.running) + len(waiting) + len(swapped)
        self.forks.check_integrity(len(self.by_key) - num_others)

    def _open(self, seq: Sequence) -> None:
        self.by_key[seq.key] = seq
        self.waiting.usages.open(seq.request.client, seq.key.connection)
        if seq.request.deadline is not None:
            self._deadlines.put(seq, seq.request.deadline)

    def _queue_again(self, seq: Sequence) -> None:
        seq.reset()
        if seq.paused and seq in self.forks.beams:  # nothing to compute until its search advances
            seq.status = Status.FOLLOWING
        else:
            self.waiting.push(seq)

    def _run(self, seq: Sequence, now: float) -> None:
        """Starts a sequence that has been given its blocks."""
        if seq.started is None:
            num_cached = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            seq.started = Started(now, num_cached, seq.num_generated_tokens)
            self.stats.prompt_tokens += seq.num_prompt_tokens
            self.stats.cached_prompt_tokens += num_cached
        seq.status = Status.RUNNING
        self.running[seq] = None
