"""What goes to the workers and what comes back, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.sequence import FinishCause, Sequence, Status


# Not frozen: that would make each several times as expensive, and a step makes two per sequence.
@dataclass(slots=True, eq=False)
class Row:
    """`num_tokens` tokens of `seq` from position `start` on. A row that does not reach the
    sequence's last token is mid-prompt and samples nothing. If the token at `start` is not known
    yet, it is the one that row `previous_row` of the step before samples."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    previous_row: int | None = None


@dataclass(slots=True, eq=False)
class Step:
    """`copies` are blocks (from, to), copied before anything is written. `asks` is false where no
    row can ask for more than a temperature and a seed."""

    number: int  # 1, 2, 3, ...
    rows: list[Row]
    copies: Seq[tuple[int, int]] = ()
    asks: bool = True


@dataclass(slots=True, eq=False)
class Logprobs:
    """Of consecutive tokens: each token's own, then those of the k most likely ones."""

    ids: npt.NDArray[np.int32]  # [tokens, 1 + k]
    values: npt.NDArray[np.float32]  # [tokens, 1 + k]


@dataclass(slots=True, eq=False)
class Answer:
    """To a step: one sampled id per row, anything for rows that sample nothing; log-probabilities
    by the index of the row that asked for them, of the token that it sampled (one) and of its
    tokens' successors in the prompt."""

    token_ids: Seq[int]
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Logprobs] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Output:
    """News of one sequence: a token and its index in the completion, its end, or both; or
    log-probabilities of its prompt's tokens from index `offset` on."""

    seq: Sequence
    token: int | None = None
    offset: int = 0
    finished: FinishCause | None = None
    logprobs: Logprobs | None = None  # of the token
    prompt_logprobs: Logprobs | None = None


@dataclass(slots=True, eq=False)
class End(Output):
    """The end of a sequence that does not come with a token."""

    message: str = ""
    retry_after_s: float = 0.0  # with QUEUE_FULL
    score: float = 0.0  # of beam search


def prompt_outputs(step: Step, answer: Answer) -> Iterator[Output]:
    """What of the prompts' log-probabilities was not delivered before it was computed again; from
    now on it is."""
    for place, logprobs in answer.prompt_logprobs.items():
        row, seq = step.rows[place], step.rows[place].seq
        if seq.status is not Status.FINISHED:
            known = seq.num_prompt_logprobs - row.start
            seq.num_prompt_logprobs = row.start + len(logprobs.ids)
            new = Logprobs(logprobs.ids[known:], logprobs.values[known:])
            yield Output(seq, offset=row.start + known + 1, prompt_logprobs=new)
