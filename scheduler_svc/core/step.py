"""Steps, answers and outputs: the scheduler's decisions and their results, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sequence import FinishCause, Row, Sequence, Status
from shared.sampling_params import Pooling


# Not frozen: a frozen step would cost several times as much.
@dataclass(slots=True, eq=False)
class Step:
    """The work that the workers do at once. `copies` are blocks (from, to), copied before anything
    is written. `has_features` is false if no row can ask for more than a temperature and a seed.
    The first `num_decodes` rows are decodes, `num_drafts` of them with drafted tokens; the others
    are of prompts. `num_tokens` is the sum of the rows' tokens. `traceparents` are the trace
    contexts of the traced rows."""

    number: int  # 1, 2, 3, ...
    rows: list[Row]
    copies: Seq[tuple[int, int]] = ()
    has_features: bool = True
    num_decodes: int = 0
    num_drafts: int = 0
    num_tokens: int = 0
    traceparents: Seq[str] = ()

    @property
    def max_run(self) -> int:
        """The maximum number of steps of a run that begins with this step, which is planned. The
        workers do not know what a paused sequence needs next, or when tokens are banned."""
        seqs = [row.seq for row in self.rows]
        if self.num_drafts or self.num_decodes < len(seqs):
            return 1
        for seq in seqs:
            first = seq.num_prompt_tokens + seq.params.min_tokens
            if seq.params.stepwise or seq.num_scheduled_tokens < first:
                return 1
        return 1 + min(seq.max_scheduled_tokens - seq.num_scheduled_tokens for seq in seqs)


class StepTiming(NamedTuple):
    """How long a step took, in seconds of the engine's clock."""

    took_s: float  # from the previous answer, or from the sending of this step if that was later
    gap_s: float  # that the workers waited for it
    answered_at: float


class StepObserver(Protocol):
    """Receives each step once its answer has been applied."""

    def step_answered(self, step: Step, timing: StepTiming, /) -> None: ...


@dataclass(slots=True, eq=False)
class Logprobs:
    """Log-probabilities of consecutive tokens: the token's own, then the k largest."""

    ids: npt.NDArray[np.int32]  # [tokens, 1 + k]
    values: npt.NDArray[np.float32]  # [tokens, 1 + k]


@dataclass(slots=True, eq=False)
class Answer:
    """The answer to a step: one sampled id per row, and log-probabilities by index of the row that
    asked for them. The id of a row that samples nothing is meaningless. `logprobs` are those of the
    sampled token. `prompt_logprobs` are those of the successors of the row's tokens in the prompt.
    `draft_ids` are the tokens that a draft model guessed, in the order of their rows.
    `hidden_states` are those of pooled rows: of the last token, or the sum over the row's tokens.
    """

    token_ids: Seq[int]
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    draft_ids: Seq[int] = ()
    hidden_states: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)


DROPPED = Answer([])  # to a step that was not run


@dataclass(frozen=True, slots=True)
class End:
    """The reason why a sequence ended, and the message to its client."""

    cause: FinishCause
    message: str = ""
    retry_after_s: float = 0.0  # with QUEUE_FULL
    score: float = 0.0  # of beam search
    limit: str = ""  # with QUEUE_FULL: the name of the client's limit that was reached, if any


@dataclass(slots=True, eq=False)
class Output:
    """An output of one sequence: a token and its index in the completion, its end, or both. Or it
    holds log-probabilities of the prompt's tokens from index `offset` on."""

    seq: Sequence
    token: int | None = None
    offset: int = 0
    end: End | None = None
    logprobs: Logprobs | None = None  # of the token
    prompt_logprobs: Logprobs | None = None
    embedding: npt.NDArray[np.float32] | None = None  # or a score [1]; with the first token


def add_embeddings(step: Step, answer: Answer, outputs: list[Output]) -> None:
    """Adds an answer's hidden states to those of their prompts, and gives the outputs, which have
    the prompts' first tokens, the embeddings. A score is treated like a hidden state."""
    for place, states in answer.hidden_states.items():
        row, features = step.rows[place], step.rows[place].seq.features
        assert features is not None
        before = features.pooled
        if before is None or row.start == 0 or row.seq.params.pooling is not Pooling.MEAN:
            before = np.zeros(len(states))
        features.pooled = before + states
    for output in outputs:
        seq = output.seq
        if seq.params.pooling and seq.features and seq.features.pooled is not None:
            is_mean = seq.params.pooling is Pooling.MEAN
            count = seq.num_prompt_tokens if is_mean else 1
            output.embedding = (seq.features.pooled / count).astype(np.float32)


def take_prompt_logprobs(step: Step, answer: Answer) -> Iterator[Output]:
    """Yields an answer's log-probabilities of prompts, and counts them as delivered. Leaves out
    those that were delivered before their tokens were computed again."""
    for place, logprobs in answer.prompt_logprobs.items():
        row, seq = step.rows[place], step.rows[place].seq
        if seq.status is not Status.FINISHED:
            assert seq.features is not None
            known = seq.features.num_scored - row.start
            seq.features.num_scored = row.start + len(logprobs.ids)
            new = Logprobs(logprobs.ids[known:], logprobs.values[known:])
            yield Output(seq, offset=row.start + known + 1, prompt_logprobs=new)
