"""A sequence: the tokens of one completion and where their keys and values lie in the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

from scheduler_svc.sampling import SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.forks.beams import BeamGroup
    from scheduler_svc.grammar.matcher import Matcher


class Status(Enum):
    WAITING = auto()
    FOLLOWING = auto()  # another sequence, which computes the prompt of both
    RUNNING = auto()
    PARKED = auto()  # a beam that has given way while it waits for the others
    FINISHED = auto()


class FinishCause(IntEnum):
    """Why a sequence ended; the numbers are those of `scheduler.proto`."""

    EOS = 1
    LENGTH = 2
    STOP_TOKEN = 3
    DEADLINE = 4
    QUEUE_FULL = 5
    INVALID = 6
    INTERNAL = 7


# Which frontend's stream, and its number for the request.
SequenceKey = tuple[int, int]


class Sequence:
    """Tokens int32[prompt + generated], of which the first `num_computed_tokens` are in the cache,
    and the first `num_scheduled_tokens` will be once the steps in flight are answered.

    `num_unscheduled_tokens` counts a token that a step in flight will sample, too, unless it is the
    last that the sequence may have.

    `block_table[i]` is the block that holds the `block_size` positions from `i * block_size` on.

    A `stepwise` sequence is `held` from its beginning, and again from each of its tokens on, until
    `Scheduler.release`: all but its last token may be computed meanwhile, and nothing is sampled.
    """

    __slots__ = (
        "arrival",
        "arrival_number",
        "beams",
        "block_hashes",
        "block_table",
        "cache_salt",
        "deadline",
        "end_token_ids",
        "first_scheduled",
        "has_features",
        "held",
        "key",
        "last_row",
        "last_step",
        "mask",
        "matcher",
        "max_ahead_tokens",
        "max_scheduled_tokens",
        "num_blocks_needed",
        "num_cached_prompt_tokens",
        "num_computed_tokens",
        "num_featured_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_resumed_tokens",
        "num_scheduled_tokens",
        "num_unscheduled_tokens",
        "params",
        "priority",
        "resubmitted",
        "status",
        "stepwise",
        "tokens",
        "turn",
    )

    def __init__(
        self,
        key: SequenceKey,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        generated_ids: Iterable[int] = (),
        arrival: float = 0.0,
        deadline: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        resubmitted: bool = False,
    ) -> None:
        self.key = key
        self.params = params
        self.tokens = array("i", prompt_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.tokens.extend(generated_ids)
        self.num_resumed_tokens = self.num_generated_tokens  # that it came with
        self.end_token_ids = params.eos_token_ids | params.stop_token_ids
        # The last token that it may have is not computed: nothing is sampled after it.
        self.max_scheduled_tokens = self.num_prompt_tokens + params.max_tokens - 1
        self.stepwise = params.stepwise
        # After a row that ends before this comes one of the token that it samples, known or not.
        self.max_ahead_tokens = 0 if self.stepwise else self.max_scheduled_tokens
        self.has_features = params.has_features
        self.num_featured_tokens = self._num_featured_tokens()
        self.num_prompt_logprobs = 0  # that were delivered: of the tokens from the second one on
        self.held = self.stepwise
        self.mask: bytes | None = None  # uint32[ceil(vocab / 32)], of the next token
        self.matcher: Matcher | None = None  # of structured output
        self.beams: BeamGroup | None = None  # that this is a live beam of
        self.arrival = arrival  # seconds, the engine's clock
        self.arrival_number = -1  # given by the waiting queue, as is its turn there
        self.turn = -1
        self.deadline = deadline
        self.priority = priority  # lower goes first
        self.cache_salt = cache_salt  # prefixes are shared with sequences of the same salt only
        self.resubmitted = resubmitted  # it had been accepted before the connection was lost
        self.first_scheduled: float | None = None
        self.num_cached_prompt_tokens = 0
        self.block_hashes: list[bytes] = []  # of the leading full blocks, as far as they are known
        self.reset()

    @property
    def queued(self) -> bool:
        """Whether a scheduler has accepted it."""
        return self.arrival_number >= 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_cacheable_tokens(self) -> int:
        """How many may be taken from the prefix cache: those whose logits nobody needs any more."""
        if self.params.prompt_logprobs is None:
            return len(self.tokens) - 1
        scored = self.num_prompt_logprobs
        return scored if scored < self.num_prompt_tokens - 1 else len(self.tokens) - 1

    def finish_cause(self) -> FinishCause | None:
        """What the last token ends this sequence with, None while it goes on."""
        if self.num_generated_tokens == 0:
            return None
        token, params = self.tokens[-1], self.params
        if token in params.eos_token_ids:
            return FinishCause.EOS
        if token in params.stop_token_ids:
            return FinishCause.STOP_TOKEN
        if self.num_generated_tokens >= params.max_tokens:
            return FinishCause.LENGTH
        return None

    def reset(self) -> None:
        """Forgets the cache: everything is to be computed again."""
        self.status = Status.WAITING
        self.begin_at(0)
        self.last_step = 0  # that had this sequence
        self.last_row = -1  # in that step
        self.num_published_blocks = 0
        self.num_blocks_needed = 0  # free ones, to be admitted, when that was last tried
        self.block_table = array("i")

    def begin_at(self, num_tokens: int) -> None:
        """That many leading tokens are in the cache."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens
        self.num_unscheduled_tokens = len(self.tokens) - num_tokens - self.held

    def _num_featured_tokens(self) -> int:
        """A row that starts before this position may ask for more than a temperature and a seed;
        later ones do not. 0 for most sequences."""
        params = self.params
        if self.has_features or self.stepwise:
            return self.max_scheduled_tokens + 1
        num_tokens = 0 if params.prompt_logprobs is None else self.num_prompt_tokens - 1
        if params.min_tokens and self.end_token_ids:
            num_tokens = max(num_tokens, self.num_prompt_tokens + params.min_tokens - 1)
        return num_tokens
