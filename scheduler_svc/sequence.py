"""A sequence: the tokens of one completion and where their keys and values lie in the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
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


@dataclass(frozen=True)
class SamplingParams:
    """What the scheduler and the sampler need to know about a request's sampling."""

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()


# Which frontend's stream, and its number for the request.
SequenceKey = tuple[int, int]


class Sequence:
    """Tokens int32[prompt + generated], of which the first `num_computed_tokens` are in the cache,
    and the first `num_scheduled_tokens` will be once the steps in flight are answered.

    `num_unscheduled_tokens` counts a token that a step in flight will sample, too, unless it is the
    last that the sequence may have.

    `block_table[i]` is the block that holds the `block_size` positions from `i * block_size` on.
    """

    __slots__ = (
        "arrival",
        "arrival_number",
        "block_hashes",
        "block_table",
        "cache_salt",
        "deadline",
        "end_token_ids",
        "first_scheduled",
        "key",
        "last_row",
        "last_step",
        "max_scheduled_tokens",
        "num_blocks_needed",
        "num_cached_prompt_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_resumed_tokens",
        "num_scheduled_tokens",
        "num_unscheduled_tokens",
        "params",
        "priority",
        "resubmitted",
        "status",
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
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

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
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_unscheduled_tokens = self.num_tokens
        self.last_step = 0  # that had this sequence
        self.last_row = -1  # in that step
        self.num_published_blocks = 0
        self.num_blocks_needed = 0  # free ones, to be admitted, when that was last tried
        self.block_table = array("i")
