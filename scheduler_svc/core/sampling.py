"""The sampling parameters of a request that the scheduler and the workers need."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from shared.sampling_params import COLUMNS, Grammar, Pooling, SamplingNumbers

_column_values = attrgetter(*COLUMNS)
_ALL_OFF = tuple(each.default for each in COLUMNS.values())


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingNumbers):
    """The sampling parameters that the scheduler and the sampler need."""

    max_tokens: int
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # before that, no EOS or stop token can be sampled
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()  # added to the logits of `bias_ids`
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token never follows the others
    logprobs: int | None = None  # how many besides the sampled token's
    prompt_logprobs: int | None = None  # how many besides each prompt token's but the first's
    beam_width: int = 0  # 0: sample
    length_penalty: float = 1.0
    grammar: Grammar | None = None
    pooling: Pooling = Pooling.NONE
    yes_id: int = 0  # of a score, as in `scheduler.proto`
    no_id: int = 0

    @property
    def num_logprobs(self) -> int | None:
        """The number of log-probabilities to request from the workers. Beam search needs those that
        it keeps, plus one for each end token, which may be banned."""
        if not self.beam_width:
            return self.logprobs
        num_ends = len(self.end_token_ids)
        return num_continuations(self.beam_width, num_ends) + num_ends

    @property
    def has_features(self) -> bool:
        """Whether every token's row needs more than a temperature and a seed."""
        changes_logits = bool(self.bias_ids) or _column_values(self) != _ALL_OFF
        return changes_logits or self.num_logprobs is not None

    @property
    def reads_tokens(self) -> bool:
        """Whether the sampler reads the tokens before the next one."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.eos_token_ids | self.stop_token_ids

    @property
    def stepwise(self) -> bool:
        """Whether the choice of the next token depends on more than the workers know."""
        return self.pauses or bool(self.bad_words)

    @property
    def pauses(self) -> bool:
        """Whether each token waits for more than the last one."""
        return self.grammar is not None or self.beam_width > 0


def num_continuations(beam_width: int, num_end_tokens: int) -> int:
    """The number of best continuations that a beam search keeps at each step. `beam_width` of them
    continue even if every end token of every beam is among them."""
    return max(2, 1 + num_end_tokens) * beam_width
