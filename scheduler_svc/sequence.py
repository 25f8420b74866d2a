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
    """Tokens int32[prompt + generated]. Of these, and of `num_pending_tokens` more that steps in
    flight will sample, the first `num_scheduled_tokens` are in the cache once those steps are
    answered, and the first `num_computed_tokens` are there now.

    `block_table[i]` is the block that holds the `block_size` positions from `i * block_size` on.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "deadline",
        "first_scheduled",
        "key",
        "last_row",
        "num_cached_prompt_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_resumed_tokens",
        "num_scheduled_tokens",
        "num_steps_in_flight",
        "params",
        "status",
        "tokens",
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
    ) -> None:
        self.key = key
        self.params = params
        self.tokens = array("i", prompt_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.tokens.extend(generated_ids)
        self.num_resumed_tokens = self.num_generated_tokens  # that it came with
        self.arrival = arrival  # seconds, the engine's clock
        self.deadline = deadline
        self.first_scheduled: float | None = None
        self.status = Status.WAITING
        self.num_steps_in_flight = 0  # with this sequence, not answered yet
        self.last_row = -1  # in the last step that had this sequence
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.block_table = array("i")
        self.block_hashes: list[bytes] = []  # of the leading full blocks, as far as they are known
        self.num_published_blocks = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Pending ones included."""
        return len(self.tokens) + self.num_pending_tokens - self.num_scheduled_tokens

    @property
    def ends_when_answered(self) -> bool:
        """Whether a pending token is the last one that it may have."""
        return self.num_generated_tokens + self.num_pending_tokens >= self.params.max_tokens

    def finish_cause(self) -> FinishCause | None:
        """What the last token ends this sequence with, None while it goes on."""
        if self.num_generated_tokens == 0:
            return None
        token = self.tokens[-1]
        if token in self.params.eos_token_ids:
            return FinishCause.EOS
        if token in self.params.stop_token_ids:
            return FinishCause.STOP_TOKEN
        if self.num_generated_tokens >= self.params.max_tokens:
            return FinishCause.LENGTH
        return None

    def reset(self) -> None:
        """Forgets the cache: everything is to be computed again."""
        self.status = Status.WAITING
        self.num_steps_in_flight = 0
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0
        self.num_published_blocks = 0
        self.block_table = array("i")
