"""The choices that a seed makes before anything runs: limits, traffic, faults."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scheduler_svc.core.admission import Limits
from tests.oracle import VOCAB_SIZE


@dataclass(frozen=True)
class Knobs:
    """A simulation's parameters. Times are virtual seconds and upper bounds; probabilities are per
    request unless noted."""

    # The engine
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    max_waiting_tokens: int
    max_num_prefill_tokens: int
    sync: bool
    # The transport
    ranks: int
    send_s: float  # until a step is written
    step_s: float  # for a step on a rank
    answer_s: float  # until an answer arrives
    output_s: float  # until an output arrives at a frontend
    recover_s: float
    loss: float  # per step, until there have been `max_losses`
    max_losses: int
    # The traffic
    frontends: int
    requests: int
    burst: int  # requests at once
    pause_s: float  # between bursts
    longest_prompt: int
    max_new_tokens: int
    prompt_ids: int  # number of ids that prompts draw from: few make common prefixes likely
    priorities: int
    salts: int
    clients: int  # with a name; 0: all requests are anonymous
    limited: float  # per client, that it has token budgets
    repeats: float  # that a prompt repeats an earlier one, or part of it
    turns: float  # that it extends an earlier prompt and completion
    resumed: float
    ends: float  # ends by an end-of-sequence or stop token
    min_tokens: float
    many: float  # several completions of one prompt
    logprobs: float
    filters: float  # unknown to the oracle's model, but sent all the same
    aborts: float
    deadlines: float
    refused: float  # can never be served
    disconnects: int  # in all
    poisons: float

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
        """The longest that the engine takes from one look at the deadlines to the next."""
        return 2 * (self.send_s + self.step_s) + self.answer_s + self.recover_s


def draw(rng: Random) -> Knobs:
    block_size = rng.choice([1, 2, 3, 4, 4, 8])
    num_blocks = rng.choice([rng.randint(3, 8), rng.randint(6, 24), rng.randint(20, 100)])
    max_model_len = min(rng.choice([24, 48, 96, 160]), num_blocks * block_size)
    max_num_seqs = rng.choice([rng.randint(1, 2), rng.randint(2, 6), rng.randint(4, 16)])
    step_s = rng.choice([0.0, 0.01, 0.01, 0.01, 0.1])
    return Knobs(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, rng.randint(1, 8), 24]),
        max_model_len=max_model_len,
        max_waiting=rng.choice([rng.randint(1, 3), 100, 100]),
        max_waiting_tokens=rng.choice([rng.randint(1, 100), 100_000, 100_000]),
        max_num_prefill_tokens=rng.choice([rng.randint(1, 4), rng.randint(4, 24), 100]),
        sync=rng.random() < 0.15,
        ranks=rng.choice([1, 1, 2, 3]),
        send_s=rng.choice([0.0, 0.0, 0.01]),
        step_s=step_s,
        answer_s=rng.choice([0.0, 0.01, 0.05]),
        output_s=rng.choice([0.0, 0.01, 0.1]),
        recover_s=rng.choice([0.0, 0.5]),
        loss=rng.choice([0.0, 0.01, 0.05, 0.5]),
        max_losses=rng.randint(1, 6),
        frontends=rng.randint(1, 3),
        requests=rng.choice([rng.randint(3, 20), rng.randint(20, 45)]),
        burst=rng.choice([1, 4, 30]),
        pause_s=rng.choice([0.01, 0.03, 0.2]),
        longest_prompt=rng.choice([4, 16, max_model_len]),
        max_new_tokens=rng.choice([2, 16, 32, max_model_len]),
        prompt_ids=rng.choice([1, 2, 3, VOCAB_SIZE]),
        priorities=rng.choice([1, 1, 3]),
        salts=rng.choice([1, 1, 2]),
        clients=rng.choice([0, 0, 1, 2, 4]),
        limited=rng.choice([0.0, 0.0, 0.5]),
        repeats=rng.choice([0.0, 0.3, 0.7]),
        turns=rng.choice([0.0, 0.3, 0.6]),
        resumed=rng.choice([0.0, 0.2]),
        ends=rng.choice([0.0, 0.3, 1.0]),
        min_tokens=rng.choice([0.0, 0.3]),
        many=rng.choice([0.0, 0.2, 0.5]),
        logprobs=rng.choice([0.0, 0.2, 1.0]),
        filters=rng.choice([0.0, 0.2]),
        aborts=rng.choice([0.0, 0.1, 0.4]),
        deadlines=rng.choice([0.0, 0.1, 0.4]),
        refused=rng.choice([0.0, 0.1]),
        disconnects=rng.choice([0, 0, 1, 4]),
        poisons=rng.choice([0.0, 0.0, 0.0, 0.05, 0.3]),
    )
