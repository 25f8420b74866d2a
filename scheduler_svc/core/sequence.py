"""A sequence: the tokens of one completion and where their keys and values lie in the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import NamedTuple

from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.client_usage import ClientUsage
from scheduler_svc.core.features import features_of
from scheduler_svc.core.guesses.guess import Guess
from scheduler_svc.core.sampling import SamplingParams
from shared.sampling_params import Pooling


class Status(Enum):
    WAITING = auto()
    FOLLOWING = auto()  # waits outside the queue for other sequences of its request
    SWAPPED = auto()  # holds its blocks, some of which are being read from the tier
    RUNNING = auto()
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


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request, apart from its tokens and sampling parameters. Its completions share it.

    Args:
        arrival, deadline: seconds of the engine's clock.
        priority: lower goes first.
        cache_salt: prefixes are shared only with requests of the same salt.
        may_store: whether its blocks may be written to the tier under the cache.
        resubmitted: whether it was accepted before the connection was lost.
        traceparent: the trace context of its spans' parent; empty if it is not traced.
        num_expected_cached: the cached tokens that its frontend expected.
    """

    arrival: float = 0.0
    deadline: float | None = None
    priority: int = 0
    cache_salt: str = ""
    resubmitted: bool = False
    client: Client = ANONYMOUS
    traceparent: str = ""
    num_expected_cached: int = 0
    may_store: bool = True


_PLAIN = Request()


class Rank(NamedTuple):
    """The place of a sequence among waiting sequences, or among those that may be preempted. Lower
    goes first, and is preempted last."""

    priority: int  # of its request
    arrival: int  # the number of its arrival


_NOT_QUEUED = Rank(0, -1)


class Started(NamedTuple):
    """When a sequence began to run, and with which tokens."""

    at: float  # seconds, the engine's clock
    num_cached_tokens: int  # of its prompt
    offset: int = 0  # of the first token generated here; earlier ones came with the request


class SequenceKey(NamedTuple):
    """Identifies a completion within the engine."""

    connection: int  # the frontend's stream that it came on
    number: int  # of its request on that stream, plus its index in the request


# Not frozen: a frozen row would cost several times as much, and a step makes one per sequence.
@dataclass(slots=True, eq=False)
class Row:
    """The part of a sequence that a step computes: `num_tokens` tokens from position `start` on. A
    row that does not reach the sequence's last token is mid-prompt and samples nothing. If the
    token at `start` is not known yet, row `previous_row` of the previous step samples it.

    A row whose token at `start` is a guess, `draft`, follows the row of the sequence's token before
    it. What it computes holds only if that row samples the guess.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    previous_row: int | None = None
    draft: int | None = None


class BlockTables:
    """The blocks of a sequence, in a table for each kind of layers.

    Block `i` of a table holds the positions from `i` times the table's block size on. Of the last
    table, the sequence holds the blocks from number `first` on, which the places before repeat.
    """

    __slots__ = ("capacity", "first", "loading", "names", "num_published", "tables")

    def __init__(self) -> None:
        # Of the leading full blocks of each table, as far as they are known. `clear` keeps them.
        self.names: list[list[bytes]] = []
        self.clear()

    def clear(self) -> None:
        self.tables: list[array[int]] = []
        self.first = 0
        self.capacity = 0  # leading tokens for which there are blocks in all tables
        self.num_published = 0  # tokens whose blocks are published, as far as they fill them
        self.loading: list[tuple[int, int]] = []  # tables and places of blocks to be read

    def held(self) -> list[array[int]]:
        """The blocks that the sequence holds, table by table."""
        *first, last = self.tables or [array("i")]
        return [*first, last[self.first :]]


class Sequence:
    """The tokens int32[prompt + generated] of a completion. The first `num_computed_tokens` are in
    the cache, and the first `num_scheduled_tokens` will be once the steps in flight are answered.

    `num_unscheduled_tokens` includes a token that a step in flight will sample, unless it is the
    last token that the sequence may have.

    A sequence whose parameters are `stepwise` samples nothing before its last token is known. One
    that `pauses` is `paused` at the start, and again after each of its tokens, until `unpause`.
    While it is paused, all its tokens but the last may be computed, and nothing is sampled.
    """

    __slots__ = (
        "__weakref__",
        "blocks",
        "features",
        "guess",
        "key",
        "last_row",
        "last_step",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_unscheduled_tokens",
        "params",
        "paused",
        "rank",
        "request",
        "started",
        "status",
        "tokens",
        "usage",
    )

    def __init__(
        self,
        key: tuple[int, int],
        prompt_ids: Iterable[int],
        params: SamplingParams,
        request: Request = _PLAIN,
        *,
        generated_ids: Iterable[int] = (),
    ) -> None:
        self.key = SequenceKey(*key)
        self.request = request
        self.params = params
        # Its tokens.
        self.tokens = array("i", prompt_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.tokens.extend(generated_ids)
        # How far it may be scheduled.
        self.paused = params.pauses
        self.guess: Guess | None = None  # at its next tokens, once speculation makes one
        # Its state in the queue and after it.
        self.rank = _NOT_QUEUED  # until the waiting queue sets it and `usage`
        self.usage: ClientUsage  # of its client, which its tokens add to
        self.started: Started | None = None
        # Its state in the cache; `reset` sets the rest.
        self.blocks = BlockTables()
        self.features = features_of(params, self.num_prompt_tokens)
        self.reset()

    @property
    def queued(self) -> bool:
        """Whether a scheduler has accepted the sequence."""
        return self.rank is not _NOT_QUEUED

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def max_scheduled_tokens(self) -> int:
        """The last token that it may have is not computed: nothing is sampled after it."""
        return self.num_prompt_tokens + self.params.max_tokens - 1

    @property
    def num_expected_uncached(self) -> int:
        """The number of tokens that are expected to be computed once it is admitted."""
        return max(len(self.tokens) - self.request.num_expected_cached, 1)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_cacheable_tokens(self) -> int:
        """The number of leading tokens that may come from the prefix cache, because neither
        their logits nor their hidden states are needed."""
        if self.params.pooling is Pooling.MEAN:
            return 0
        features = self.features
        if features is None or features.num_scored >= features.num_to_score:
            return len(self.tokens) - 1
        return features.num_scored

    def finish_cause(self) -> FinishCause | None:
        """The reason why the last token ends the sequence, or None if the sequence continues."""
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
        self.last_step = 0  # the last step that had this sequence
        self.last_row = -1  # its row in that step
        self.blocks.clear()

    def rewind(self) -> None:
        """Forgets the steps in flight. What answered steps computed stays in the cache."""
        self.last_step, self.last_row = 0, -1
        if self.num_scheduled_tokens > self.num_computed_tokens:  # a beam may wait for others
            self.begin_at(self.num_computed_tokens)

    def begin_at(self, num_tokens: int) -> None:
        """Starts computing after `num_tokens` tokens that are in the cache."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens
        self.num_unscheduled_tokens = len(self.tokens) - num_tokens - self.paused

    def schedule(self, num_tokens: int, step: int, index: int) -> Row:
        """Schedules the next `num_tokens` tokens as row `index` of a step."""
        start = self.num_scheduled_tokens
        previous_row = self.last_row if start >= len(self.tokens) else None
        end = self.num_scheduled_tokens = start + num_tokens
        self.last_step, self.last_row = step, index
        samples = False
        left = self.num_unscheduled_tokens - num_tokens
        if not left:  # next comes the token that it samples, if that may be computed
            samples = not self.paused
            if end < self.max_scheduled_tokens and not (self.features and self.params.stepwise):
                left = 1
        self.num_unscheduled_tokens = left
        return Row(self, start, num_tokens, samples, previous_row)

    def schedule_drafts(self, drafts: Iterable[int]) -> list[Row]:
        """Schedules drafted tokens as the rows after the decode of its last token. Nothing more is
        scheduled before the answer, which tells where it continues (`begin_at`)."""
        start = self.num_scheduled_tokens
        rows = [Row(self, start + i, 1, True, None, draft) for i, draft in enumerate(drafts)]
        self.num_scheduled_tokens = start + len(rows)
        self.num_unscheduled_tokens = 0
        return rows

    def unpause(self, masks: Seq[bytes] = ()) -> None:
        """Lets it sample its next token, unless it has ended in the meantime. A mask has a bit for
        each token, set if the token is allowed: uint32[ceil(vocab / 32)], lowest bit first. The
        first mask is of the next token; the others are of the tokens after drafted ones."""
        if self.status is not Status.FINISHED:
            assert self.paused, "is not paused"
            assert self.features is not None
            self.paused = False
            self.features.masks = masks
            self.num_unscheduled_tokens += 1
