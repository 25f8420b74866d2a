"""The choices that a seed makes before anything runs: limits, traffic, faults."""

from __future__ import annotations

from random import Random

from scheduler_svc.core.admission import Limits
from shared.paging import Paging
from tests.oracle import VOCAB_SIZE
from tests.simulation.drafting import Chances


class Knobs:
    """A simulation's parameters. Times are virtual seconds and upper bounds; probabilities are per
    request unless noted."""

    def __init__(self, rng: Random) -> None:
        # The engine, and its steps
        self.num_blocks = rng.choice([rng.randint(3, 8), rng.randint(6, 24), rng.randint(20, 100)])
        self.paging = _paging(rng)
        self.num_blocks *= len(self.paging.tables)
        self.max_model_len = self.paging.longest(self.num_blocks, rng.choice([24, 48, 96, 160]))
        self.max_num_seqs = rng.choice([rng.randint(1, 2), rng.randint(2, 6), rng.randint(4, 16)])
        self.step_s = rng.choice([0.0, 0.01, 0.01, 0.01, 0.1])  # for a step on a rank
        self.max_num_batched_tokens = self.max_num_seqs + rng.choice([0, rng.randint(1, 8), 24])
        self.max_waiting = rng.choice([rng.randint(1, 3), 100, 100])
        self.max_waiting_tokens = rng.choice([rng.randint(1, 100), 100_000, 100_000])
        self.max_num_prefill_tokens = rng.choice([rng.randint(1, 4), rng.randint(4, 24), 100])
        self.sync = rng.random() < 0.15
        # The transport
        self.ranks = rng.choice([1, 1, 2, 3])
        self.send_s = rng.choice([0.0, 0.0, 0.01])  # until a step is written
        self.answer_s = rng.choice([0.0, 0.01, 0.05])  # until an answer arrives
        self.output_s = rng.choice([0.0, 0.01, 0.1])  # until an output arrives at a frontend
        self.recover_s = rng.choice([0.0, 0.5])
        # Per step, until there have been `max_losses`.
        self.loss = rng.choice([0.0, 0.01, 0.05, 0.5])
        self.max_losses = rng.randint(1, 6)
        self.keeps = rng.choice([0.0, 0.7, 1.0])  # per loss and rank, that the cache survives it
        # The traffic
        self.frontends = rng.randint(1, 3)
        self.requests = rng.choice([rng.randint(3, 20), rng.randint(20, 45)])
        self.burst = rng.choice([1, 4, 30])  # requests at once
        self.pause_s = rng.choice([0.01, 0.03, 0.2])  # between bursts
        self.longest_prompt = rng.choice([4, 16, self.max_model_len])
        self.max_new_tokens = rng.choice([2, 16, 32, self.max_model_len])
        # The number of ids that prompts draw from: few make common prefixes likely.
        self.prompt_ids = rng.choice([1, 2, 3, VOCAB_SIZE])
        self.priorities = rng.choice([1, 1, 3])
        self.salts = rng.choice([1, 1, 2])
        self.clients = rng.choice([0, 0, 1, 2, 4])  # with a name; 0: all requests are anonymous
        self.limited = rng.choice([0.0, 0.0, 0.5])  # per client, that it has token budgets
        # That a prompt repeats an earlier one, or part of it.
        self.repeats = rng.choice([0.0, 0.3, 0.7])
        self.turns = rng.choice([0.0, 0.3, 0.6])  # that it extends an earlier prompt and completion
        self.resumed = rng.choice([0.0, 0.2])
        self.ends = rng.choice([0.0, 0.3, 1.0])  # ends by an end-of-sequence or stop token
        self.min_tokens = rng.choice([0.0, 0.3])
        self.many = rng.choice([0.0, 0.2, 0.5])  # several completions of one prompt
        self.logprobs = rng.choice([0.0, 0.2, 1.0])
        # Unknown to the oracle's model, but sent all the same.
        self.filters = rng.choice([0.0, 0.2])
        self.aborts = rng.choice([0.0, 0.1, 0.4])
        self.deadlines = rng.choice([0.0, 0.1, 0.4])
        self.refused = rng.choice([0.0, 0.1])  # can never be served
        self.disconnects = rng.choice([0, 0, 1, 4])  # in all
        self.poisons = rng.choice([0.0, 0.0, 0.0, 0.05, 0.3])
        # Speculation
        self.drafting = Chances(
            drafts=rng.choice([0.0, 0.3, 1.0]),
            right=rng.choice([0.0, 0.5, 0.9, 1.0]),
            waits=rng.choice([0.0, 0.5, 1.0]),
            by_model=rng.random() < 0.3,
        )
        self._max_run = rng.choice([1, 2, 4, 4])  # here, several ranks drop the same steps

    def __str__(self) -> str:
        return f"knobs: {vars(self)}"

    @property
    def by_batch(self) -> bool:
        """Whether tokens depend on the batch, as on a GPU without BATCH_INVARIANT. Not drawn, so
        that seeds stay as they are."""
        return self.requests % 2 == 1

    @property
    def max_run(self) -> int:
        return 1 if self.stages > 1 else self._max_run

    @property
    def stages(self) -> int:
        """The number of pipeline stages. Not drawn, like those below."""
        return [1, 1, 1, 2, 3][self.max_num_batched_tokens % 5]

    @property
    def tier_blocks(self) -> int:
        """How many blocks fit into the tier under the cache; 0: there is none."""
        return [0, self.num_blocks // 2, 4 * self.num_blocks][self.requests % 3]

    @property
    def tier_faults(self) -> float:
        """Per block, that it cannot be saved or read."""
        return [0.0, 0.1, 0.5][self.max_waiting_tokens % 3]

    @property
    def tier_ends(self) -> float:
        """Per transfer, that the directory fails for good."""
        return 0.02 if self.max_losses % 3 == 0 else 0.0

    @property
    def tier_s(self) -> float:
        """Seconds that workers claim to read for; 0: unknown, so that all is read."""
        return self.step_s if self.max_losses % 2 else 0.0

    @property
    def limits(self) -> Limits:
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            max_num_prefill_tokens=self.max_num_prefill_tokens,
            vocab_size=VOCAB_SIZE,
        )

    @property
    def longest_turn_s(self) -> float:
        """The longest time between two checks of the deadlines by the engine."""
        step_s = self.stages * self.step_s
        return 2 * (self.send_s + step_s) + self.answer_s + self.recover_s


def _paging(rng: Random) -> Paging:
    """A table without a window, one with one, or both kinds."""
    block_size, window = rng.choice([1, 2, 3, 4, 4, 8]), rng.choice([0, 0, 1, 2, 5, 12, 30])
    if not window or rng.random() < 0.3:
        return Paging(block_size, window)
    sizes = block_size, block_size * rng.choice([1, 1, 2, 5])
    first, second = sizes if rng.random() < 0.3 else reversed(sizes)
    return Paging(first, window, second)
