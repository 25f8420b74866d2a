"""Turns the token streams of a request's completions into deltas for its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from frontend.callers.call import CALL
from frontend.engines.token_stream import FinishReason, Start, TokenStream
from frontend.logprobs import CompletionLogprobs
from frontend.metrics import ABORT, ERROR, LENGTH, STOP, RequestMetrics
from frontend.request import GenerationRequest
from frontend.text.completion import CompletionBuilder, Delta
from frontend.text.threads import in_pieces
from shared.errors import DeadlineError, InternalError, ServiceError

log = structlog.get_logger(__name__)

# Tokens fed at once. The limit keeps the event loop's iterations short even if a client has not
# read for a while, or resumes after many tokens.
_MAX_TOKENS = 128
_MAX_SCORED_TOKENS = 32  # each of which makes up to 21 messages

# The names of a completion's finish reasons in OpenAI's API, and in vLLM's metrics.
REASONS = {
    FinishReason.EOS: STOP,
    FinishReason.STOP: STOP,
    FinishReason.LENGTH: LENGTH,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a completion; `score` is for beam search."""

    reason: FinishReason
    stop_reason: str | int | None  # the stop string found, or the stop token
    score: float


@dataclass(frozen=True, slots=True)
class Totals:
    """A call's statistics. Times are in seconds since the request arrived, except `queue_s`, which
    is how long the request waited."""

    prompt_tokens: int
    cached_prompt_tokens: int  # of the first completion
    completion_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float


class CompletionReader:
    """Reads one completion from its stream, delta by delta."""

    def __init__(self, stream: TokenStream, builder: CompletionBuilder) -> None:
        """`builder`: has been fed the tokens that the client already has."""
        self.stream = stream
        self.builder = builder
        self.index = stream.index
        self.ending: Ending | None = None

    @property
    def num_tokens(self) -> int:
        """The number of the completion's tokens, including unread ones until it has ended."""
        return self.builder.num_tokens if self.ending else len(self.stream.tokens)

    def has_news(self) -> bool:
        stream = self.stream
        return len(stream.tokens) > self.builder.num_tokens or stream.ended

    def next_delta(self) -> Delta:
        """Returns the tokens since the last delta, or the first few of them. The completion's last
        delta sets `ending`.

        Raises:
            ServiceError: the request failed.
        """
        stream, builder = self.stream, self.builder
        stream.check()
        if builder.stop_string is None:
            known = builder.num_tokens
            limit = _MAX_TOKENS if stream.logprobs is None else _MAX_SCORED_TOKENS
            delta = builder.feed(stream.tokens[known : known + limit])
        else:
            delta = Delta("", (), builder.num_tokens)  # found among the tokens it resumed after
        if stream.logprobs is not None:
            self._add_logprobs(delta, stream.logprobs)
        complete = stream.finish is not None and builder.num_tokens == len(stream.tokens)
        if complete or builder.stop_string is not None:
            delta.text += builder.finish()
            self.ending = self._make_ending()
        return delta

    def _add_logprobs(self, delta: Delta, logprobs: CompletionLogprobs) -> None:
        delta.logprobs = logprobs.of(delta.offset, len(delta.token_ids))
        if len(delta.logprobs) < len(delta.token_ids):
            _fail_without_logprobs(self.stream)
            self.stream.check()
        logprobs.forget(self.builder.num_tokens)

    def _make_ending(self) -> Ending:
        stream, builder = self.stream, self.builder
        if builder.stop_string is not None:
            return Ending(FinishReason.STOP, builder.stop_string, stream.score)
        assert stream.finish is not None
        stopped = stream.finish is FinishReason.STOP
        return Ending(stream.finish, stream.tokens[-1] if stopped else None, stream.score)


class Generation:
    """The completions of one call, at least one."""

    def __init__(
        self,
        request: GenerationRequest,
        readers: Sequence[CompletionReader],
        received_at: float,
        metrics: RequestMetrics,
        resumed_text: str = "",
    ) -> None:
        """
        Args:
            received_at: when the request arrived, by `time.monotonic`.
            resumed_text: of the tokens that the client already has.
        """
        self._metrics = metrics
        call = CALL.get()
        self._trace = call.trace if call else None
        self._has_tokens = False
        self.request = request
        self.resumed_text = resumed_text
        self._all = readers
        self._open = list(readers)
        self._received_at = received_at
        # None if there are none to send, or once they have been sent.
        self._prompt_logprobs = readers[0].stream.prompt_logprobs

    @property
    def ended(self) -> bool:
        return not self._open

    @property
    def error(self) -> ServiceError | None:
        errors = (each.stream.error for each in self._all)
        return next((error for error in errors if error is not None), None)

    @property
    def endings(self) -> list[Ending]:
        """The endings of the completions that have ended, in order."""
        return [each.ending for each in self._all if each.ending is not None]

    async def next_deltas(self) -> list[tuple[CompletionReader, Delta]]:
        """Waits for news and returns at most one delta per completion, in order. Tokens that arrive
        while the caller is busy with one delta go into the next delta. A delta that would be too
        long leaves the rest to later deltas.

        Raises:
            ServiceError: the request failed.
        """
        first = self._all[0]
        if self._waits_for_prompt() and first.has_news() and first.stream.error is None:
            _fail_without_logprobs(first.stream)
        await first.stream.waiter.wait(self._has_news())
        if self._prompt_logprobs is not None and not self._has_news():
            return []  # woken for tokens, which wait for the prompt's log-probabilities
        deltas: list[tuple[CompletionReader, Delta]] = []
        for each in self._open:
            if each.has_news():
                if deltas and self.request.sampling.stop:
                    await asyncio.sleep(0)  # the search may take a quarter of a millisecond a token
                began_at = time.monotonic() if self._trace else 0.0
                deltas.append((each, each.next_delta()))
                if self._trace:
                    self._trace.add_detokenizing(began_at)
        for each, _ in deltas:
            if each.ending is not None:
                # After a stop string, this frees the engine's blocks before the client reads on.
                each.stream.close()
                self._open.remove(each)
                self._metrics.finished[REASONS[each.ending.reason]] += 1
        self._observe()
        if self._prompt_logprobs is not None:
            deltas[0][1].prompt_logprobs = self._prompt_logprobs.rows
            self._prompt_logprobs = None
        return deltas

    def close(self) -> None:
        """Drops the completions that have not ended."""
        for each in self._open:
            each.stream.close()
            failed = each.stream.error and not isinstance(each.stream.error, DeadlineError)
            self._metrics.finished[ERROR if failed else ABORT] += 1

    @property
    def embedding(self) -> NDArray[np.float32]:
        """The embedding of the prompt, not normalized, once the generation has ended.

        Raises:
            InternalError: the engine sent none.
        """
        if (found := self._all[0].stream.embedding) is None:
            log.error("an embedding is missing", request_id=self.request.request_id)
            raise InternalError("internal error")
        return found

    def totals(self) -> Totals:
        """The statistics so far. A completion that is resumed with all of its tokens receives no
        further token, and so no `Start`."""
        start = self._all[0].stream.start or Start(cached_prompt_tokens=0, queue_s=0.0)
        first_token_at = self._first_token_at()
        return Totals(
            prompt_tokens=len(self.request.prompt_ids),
            cached_prompt_tokens=start.cached_prompt_tokens,
            completion_tokens=sum(each.num_tokens for each in self._all),
            queue_s=start.queue_s,
            first_token_s=first_token_at - self._received_at if first_token_at else 0.0,
            total_s=time.monotonic() - self._received_at,
        )

    def _first_token_at(self) -> float | None:
        times = (each.stream.first_token_at for each in self._all)
        return min((at for at in times if at is not None), default=None)

    def _observe(self) -> None:
        if not self._has_tokens and (first_token_at := self._first_token_at()) is not None:
            self._has_tokens = True
            self._metrics.time_to_first_token.observe(first_token_at - self._received_at)
        if self.ended:
            self._metrics.latency.observe(time.monotonic() - self._received_at)

    def _has_news(self) -> bool:
        if self._waits_for_prompt():
            return self.error is not None
        # A plain loop, because a generator takes several times as long for one completion.
        for each in self._open:  # noqa: SIM110
            if each.has_news():
                return True
        return False

    def _waits_for_prompt(self) -> bool:
        """Whether the prompt's log-probabilities, which go with the first delta, are incomplete."""
        return self._prompt_logprobs is not None and not self._prompt_logprobs.complete


def replay(token_ids: Sequence[int], builder: CompletionBuilder) -> str:
    """Feeds the tokens that the client already has, up to a stop string. Returns their text."""
    texts = []
    for piece in in_pieces(token_ids, _MAX_TOKENS):
        texts.append(builder.feed(piece).text)
        if builder.stop_string is not None:
            break
    return "".join(texts)


def end_of_resumed(request: GenerationRequest, builder: CompletionBuilder) -> FinishReason | None:
    """How the tokens that the client already has complete a request; None if they do not."""
    tokens, sampling = request.resume_token_ids, request.sampling
    if builder.stop_string is not None:
        return FinishReason.STOP
    if tokens and tokens[-1] in sampling.eos_token_ids:
        return FinishReason.EOS
    if tokens and tokens[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None


def _fail_without_logprobs(stream: TokenStream) -> None:
    """Fails a stream whose log-probabilities arrived neither before their token nor with it."""
    log.error(
        "log-probabilities are missing; failing the request",
        request_id=stream.request.request_id,
        index=stream.index,
    )
    stream.error = InternalError("internal error")
