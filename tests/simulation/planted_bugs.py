"""Bugs that somebody might write: a file, a text in it and its replacement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str
    world: str = "engine"  # the simulation that is to find it
    package: str = "scheduler_svc"  # that the file is in


_FENCE = """\
            if seq.last_step > self._last_answered:
                self._fenced.setdefault(seq.last_step, []).append(seq)
            else:
                self.blocks.free(seq)
"""

BUGS = [
    Bug(
        "a decode takes its block one token late",
        "scheduler.py",
        "if seq.num_scheduled_tokens == len(seq.block_table) * size]",
        "if seq.num_scheduled_tokens == len(seq.block_table) * size + 1]",
    ),
    Bug(
        "blocks are freed while a step is in flight",
        "scheduler.py",
        _FENCE,
        "            self.blocks.free(seq)\n",
    ),
    Bug(
        "blocks of the ended are freed at the first of two answers",
        "scheduler.py",
        "self._fenced.setdefault(seq.last_step, [])",
        "self._fenced.setdefault(self._last_answered + 1, [])",
    ),
    Bug(
        "blocks of the ended are never freed",
        "scheduler.py",
        "for seq in self._fenced.pop(step.number, ()):",
        "for seq in self._fenced.pop(step.number + 1, ()):",
    ),
    Bug(
        "blocks are published before the answer",
        "block_manager.py",
        "full = seq.num_computed_tokens // self.block_size",
        "full = min(seq.num_scheduled_tokens, seq.num_tokens) // self.block_size",
    ),
    Bug(
        "a shared block is freed by each who holds it",
        "block_manager.py",
        "        self._ref_counts[block] -= 1\n        if self._ref_counts[block] == 0:",
        "        self._ref_counts[block] -= 1\n        if self._ref_counts[block] >= 0:",
    ),
    Bug(
        "a cached block that is shared again stays evictable",
        "block_manager.py",
        "                del self._cached[block]",
        "                self._cached.move_to_end(block)",
    ),
    Bug(
        "eviction forgets to unname a block",
        "block_manager.py",
        "            del self._block_of[name], self._contents[name]",
        "            del self._contents[name]",
    ),
    Bug(
        "those who watch the cache are not told of evictions",
        "block_manager.py",
        "                watch.add(Removed(name))",
        "                pass",
    ),
    Bug(
        "a block's name leaves out the blocks before it",
        "block_manager.py",
        "parent = seq.block_hashes[i - 1] if i else name_of",
        "parent = name_of",
    ),
    Bug(
        "names do not depend on the cache salt",
        "block_manager.py",
        "name_of(seq.cache_salt.encode())",
        'name_of(b"")',
    ),
    Bug(
        "a prefix hit leaves no token to compute",
        "block_manager.py",
        "full = seq.num_cacheable_tokens // self.block_size",
        "full = seq.num_tokens // self.block_size",
    ),
    Bug(
        "blocks that would be shared count as free",
        "block_manager.py",
        "missing + sum(self._ref_counts[b] == 0 for b in shared)",
        "missing",
    ),
    Bug(
        "what a waiting prompt needs is stale after it ran",
        "sequence.py",
        "        self.num_blocks_needed = 0",
        "        self.num_blocks_needed = self.num_tokens",
    ),
    Bug(
        "a token after the end is not dropped",
        "scheduler.py",
        "            if seq.status is finished:  # meanwhile; its token is dropped\n"
        "                continue\n",
        "",
    ),
    Bug(
        "previous_row is the row of this step",
        "scheduler.py",
        "previous_row = seq.last_row if",
        "previous_row = index if",
    ),
    Bug(
        "a step is planned beyond max_tokens",
        "scheduler.py",
        "        if end < seq.max_ahead_tokens:\n",
        "        if True:\n",
    ),
    Bug(
        "the last token but one is never computed",
        "scheduler.py",
        "        if end < seq.max_ahead_tokens:\n",
        "        if end < seq.max_ahead_tokens - 1:\n",
    ),
    Bug(
        "the computed count is stale after a hit",
        "sequence.py",
        "self.num_unscheduled_tokens = len(self.tokens) - num_tokens - self.held",
        "self.num_unscheduled_tokens = len(self.tokens) - self.held",
    ),
    Bug(
        "the requeued lose their first",
        "scheduler.py",
        "        for seq in self._running:\n            self.queue_again(seq)\n",
        "        for seq in list(self._running)[1:]:\n            self.queue_again(seq)\n",
    ),
    Bug(
        "a preempted sequence is not queued again",
        "scheduler.py",
        "        self.blocks.free(seq)\n        self.queue_again(seq)\n",
        "        self.blocks.free(seq)\n        seq.reset()\n",
    ),
    Bug(
        "preemption does not wait for steps in flight",
        "scheduler.py",
        "        if crowded and self._last_answered < self._last_step:\n            return None\n",
        "",
    ),
    Bug(
        "decodes are not counted in the token budget",
        "scheduler.py",
        "budget = limits.max_num_batched_tokens - num_decodes",
        "budget = limits.max_num_batched_tokens",
    ),
    Bug(
        "a short prompt counts for its own half of the budget only",
        "pace.py",
        "        if self._whole:\n            self._whole._spend(",
        "        if False:\n            self._whole._spend(",
    ),
    Bug(
        "a row more than max_num_seqs",
        "scheduler.py",
        "len(self._running) >= self.limits.max_num_seqs",
        "len(self._running) > self.limits.max_num_seqs",
    ),
    Bug(
        "a chunk that ends the prompt samples one token early",
        "scheduler.py",
        "    samples = False\n    left = seq.num_unscheduled_tokens - num_tokens\n",
        "    left = seq.num_unscheduled_tokens - num_tokens\n    samples = left < 2\n",
    ),
    Bug(
        "offsets begin anew after resuming",
        "scheduler.py",
        "computed - seq.num_prompt_tokens, end",
        "computed - seq.num_prompt_tokens - seq.num_resumed_tokens, end",
    ),
    Bug(
        "sequences with a deadline expire only while they run",
        "scheduler.py",
        "lambda seq, _: seq.status is not Status.FINISHED\n",
        "lambda seq, _: seq.status is Status.RUNNING\n",
    ),
    Bug(
        "what was resubmitted complete goes on",
        "scheduler.py",
        "        if end is None and (cause := seq.finish_cause()):  # resubmitted",
        "        if end is None and (cause := seq.finish_cause()) and False:  # resubmitted",
    ),
    Bug(
        "the resubmitted are refused for a full queue",
        "admission.py",
        "    if seq.resubmitted:\n        return None",
        "    if False:\n        return None",
    ),
    Bug(
        "an admitted sequence stays in the queue of the short ones",
        "waiting_queue.py",
        "        return self._tickets.get(seq) == ticket\n",
        "        return seq.status.name == 'WAITING'\n",
    ),
    Bug(
        "waiting tokens are not given back",
        "waiting_queue.py",
        "        self.num_tokens -= seq.num_tokens\n",
        "",
    ),
    Bug(
        "ended sequences stay in their line",
        "scheduler.py",
        "        self._waiting.close(seq)\n",
        "",
    ),
    Bug(
        "generated tokens are not counted as their client's",
        "lines.py",
        "        self.served += _OUTPUT_COST * num_tokens / self.client.weight\n",
        "        pass\n",
    ),
    Bug(
        "the resubmitted are charged again",
        "scheduler.py",
        "        if not seq.resubmitted:\n            self._budgets",
        "        if True:\n            self._budgets",
    ),
    Bug(
        "tables have no partly filled block",
        "edge/step_encoding.py",
        "num_blocks = -(-context_lens // block_size)",
        "num_blocks = np.maximum(context_lens // block_size, 1)",
    ),
    Bug(
        "tables have a block too many at a boundary",
        "edge/step_encoding.py",
        "num_blocks = -(-context_lens // block_size)",
        "num_blocks = context_lens // block_size + 1",
    ),
    Bug(
        "tables begin where the prompt's tables would",
        "edge/step_encoding.py",
        "        tables = [table[:n] for",
        "        tables = [table[-n:] for",
    ),
    Bug(
        "a fork's copy is forgotten",
        "block_manager.py",
        "            self._copies[child.block_table[full]] = source\n",
        "            self._ref_counts[source] -= 1\n",
    ),
    Bug(
        "another block is copied for a fork",
        "block_manager.py",
        "source = parent.block_table[full]\n",
        "source = parent.block_table[0]\n",
    ),
    Bug(
        "a fork does not count as one who holds its parent's blocks",
        "block_manager.py",
        "        for block in child.block_table:\n            self._ref_counts[block] += 1\n",
        "",
    ),
    Bug(
        "a copy for one that has ended is kept",
        "block_manager.py",
        "            if block in self._copies:  # in vain\n"
        "                self._release(self._copies.pop(block))\n",
        "",
    ),
    Bug(
        "those that follow are forgotten with the one that leads",
        "forks/forks.py",
        "        if followers := self._followers.pop(seq):\n",
        "        if (followers := self._followers.pop(seq)) and False:\n",
    ),
    Bug(
        "siblings have one seed",
        "forks/followers.py",
        "seed=(seq.params.seed + i) % _SEEDS",
        "seed=seq.params.seed",
    ),
    Bug(
        "end tokens are banned a token too long",
        "edge/step_features.py",
        "if index < seq.params.min_tokens else",
        "if index <= seq.params.min_tokens else",
    ),
    Bug(
        "the bans of min_tokens end with the prompt",
        "features.py",
        "num_prompt_tokens + params.min_tokens - 1)",
        "params.min_tokens - 1)",
    ),
    Bug(
        "a scored prompt is taken from the prefix cache",
        "sequence.py",
        "        if self.features is None or self.features.prompt_is_scored:\n",
        "        if True:\n",
    ),
    Bug(
        "log-probabilities of a prompt are delivered again after preemption",
        "step.py",
        "            known = seq.features.num_scored - row.start\n",
        "            known = 0\n",
    ),
    Bug(
        "log-probabilities of a prompt are lost with its last token",
        "scheduler.py",
        "        return scored + outputs if scored else outputs\n",
        "        return scored + outputs if scored and not outputs else outputs\n",
    ),
    Bug(
        "a submission does not wake the engine",
        "engine.py",
        "            self._traces.add(seq)\n        self.wake()\n",
        "            self._traces.add(seq)\n",
    ),
    Bug(
        "an answer of before a loss is taken for one of after it",
        "engine.py",
        "            if not self._answer.cancel() and not self._answer.cancelled():\n"
        "                self._answer.exception()  # nobody else will ask for it\n"
        "            self._answer = None\n",
        "            pass\n",
    ),
    Bug(
        "the innocent run beside those on trial",
        "engine.py",
        "            self.scheduler.restrict(group)\n",
        "            pass\n",
    ),
    Bug(
        "a trial goes on after its end",
        "engine.py",
        "if self._suspects or self._trying:",
        "if self._suspects:",
    ),
    Bug(
        "one who ends on trial stays there",
        "engine.py",
        "                self._suspects.forget(seq)\n",
        "                pass\n",
    ),
    Bug(
        "nobody is ever convicted",
        "suspects.py",
        "if len(accused) == 1 and self._is_convicted(accused[0]):",
        "if False:",
    ),
    Bug(
        "a lost connection aborts other frontends' requests",
        "engine.py",
        "if key.connection == connection]",
        "if key.connection >= connection]",
    ),
]
