"""A sequence: the tokens of one completion and where their keys and values lie in the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum, IntEnum, auto
from typing import NamedTuple

from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.features import features_of
from scheduler_svc.core.lines import Line
from scheduler_svc.core.sampling import SamplingParams


class Status(Enum):
    WAITING = auto()
    FOLLOWING = auto()  # another sequence, which computes the prompt of both
    RUNNING = auto()
    PARKED = auto()  # a beam that has given way while it waits for the others
    FINISHED = auto()


class FinishCause(IntEnum):
    """Why a sequence ended. The numbers are those of `scheduler.proto`."""

    EOS = 1
    LENGTH = 2
    STOP_TOKEN = 3
    DEADLINE = 4
    QUEUE_FULL = 5
    INVALID = 6
    INTERNAL = 7


class SequenceKey(NamedTuple):
    """Identifies a completion within the engine."""

    connection: int  # the frontend's stream that it came on
    number: int  # of its request there, plus its index among the request's completions


class Sequence:
    """The tokens int32[prompt + generated] of a completion. The first `num_computed_tokens` are in
    the cache, and the first `num_scheduled_tokens` will be once the steps in flight are answered.

    `num_unscheduled_tokens` includes a token that a step in flight will sample, unless that is the
    last one the sequence may have.

    `block_table[i]` is the block that holds the `block_size` positions from `i * block_size` on.

    A `stepwise` sequence is `held` at the start, and again after each of its tokens, until
    `Scheduler.release`. While it is held, all but its last token may be computed, but nothing is
    sampled.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "arrival_number",
        "block_hashes",
        "block_table",
        "cache_salt",
        "client",
        "deadline",
        "end_token_ids",
        "features",
        "first_scheduled",
        "held",
        "key",
        "last_row",
        "last_step",
        "line",
        "max_ahead_tokens",
        "max_scheduled_tokens",
        "num_blocks_needed",
        "num_cached_prompt_tokens",
        "num_computed_tokens",
        "num_expected_cached",
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
        "traceparent",
    )

    def __init__(
        self,
        key: tuple[int, int],
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        generated_ids: Iterable[int] = (),
        arrival: float = 0.0,
        deadline: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        resubmitted: bool = False,
        client: Client = ANONYMOUS,
        traceparent: str = "",
        num_expected_cached: int = 0,
    ) -> None:
        # The request.
        self.key = SequenceKey(*key)
        self.params = params
        self.arrival = arrival  # seconds, the engine's clock
        self.deadline = deadline
        self.priority = priority  # lower goes first
        self.cache_salt = cache_salt  # prefixes are shared with sequences of the same salt only
        self.resubmitted = resubmitted  # it had been accepted before the connection was lost
        self.client = client
        self.traceparent = traceparent  # of its spans' parent; empty: it is not traced
        self.num_expected_cached = num_expected_cached  # tokens, as far as its frontend knew
        # Its tokens.
        self.tokens = array("i", prompt_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.tokens.extend(generated_ids)
        self.num_resumed_tokens = self.num_generated_tokens  # that it came with
        self.end_token_ids = params.eos_token_ids | params.stop_token_ids
        # How far it may be scheduled.
        self.stepwise = params.stepwise
        self.held = self.stepwise
        # The last token that it may have is not computed: nothing is sampled after it.
        self.max_scheduled_tokens = self.num_prompt_tokens + params.max_tokens - 1
        # After a row that ends before this comes one of the token that it samples, known or not.
        self.max_ahead_tokens = 0 if self.stepwise else self.max_scheduled_tokens
        # In the queue, and since.
        self.arrival_number = -1  # given by the waiting queue, as is the line
        self.line: Line
        self.first_scheduled: float | None = None
        self.num_cached_prompt_tokens = 0
        # In the cache; `reset` has the rest.
        self.block_hashes: list[bytes] = []  # of the leading full blocks, as far as they are known
        self.features = features_of(params, self.num_prompt_tokens)
        self.reset()

    @property
    def queued(self) -> bool:
        """Whether a scheduler has accepted the sequence."""
        return self.arrival_number >= 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_expected_uncached(self) -> int:
        """The tokens that are expected to be computed once it is admitted."""
        return max(len(self.tokens) - self.num_expected_cached, 1)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_cacheable_tokens(self) -> int:
        """The tokens that may come from the prefix cache, because nobody needs their logits."""
        if self.features is None or self.features.prompt_is_scored:
            return len(self.tokens) - 1
        return self.features.num_scored

    def finish_cause(self) -> FinishCause | None:
        """The reason that the last token ends the sequence, or None if it goes on."""
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
        """Forgets the cache: every token has to be computed again."""
        self.status = Status.WAITING
        self.begin_at(0)
        self.last_step = 0  # that had this sequence
        self.last_row = -1  # in that step
        self.num_published_blocks = 0
        self.num_blocks_needed = 0  # free ones, to be admitted, when that was last tried
        self.block_table = array("i")

    def begin_at(self, num_tokens: int) -> None:
        """Starts computing after `num_tokens` tokens that are in the cache."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens
        self.num_unscheduled_tokens = len(self.tokens) - num_tokens - self.held
