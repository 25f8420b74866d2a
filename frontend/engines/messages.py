"""Translates between the domain's types and the messages of protos/scheduler.proto."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import cast

import numpy as np
import structlog

from frontend.callers.tenants import Tenant
from frontend.engines.token_stream import FinishReason, TokenStream
from frontend.logprobs import LogprobRow
from shared.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
)
from shared.pb import scheduler_pb2 as pb
from shared.sampling_params import BANNED, NUMBERS, Grammar

log = structlog.get_logger(__name__)

# Zero means no timeout to the scheduler, so a deadline that has just passed needs another value.
_SHORTEST_TIMEOUT_S = 1e-3

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_CAUSE_EOS: FinishReason.EOS,
    pb.FINISH_CAUSE_LENGTH: FinishReason.LENGTH,
    pb.FINISH_CAUSE_STOP_TOKEN: FinishReason.STOP,
}


def submit_message(
    stream: TokenStream,
    n: int = 0,
    *,
    resubmitted: bool = False,
    expected_cached: int = 0,
    num_engines: int = 1,
) -> pb.FrontendMessage:
    """The message that submits a completion with the tokens that it has so far.

    Args:
        n: the number of completions, of which this is the first; 0 for this one alone, or a beam
            search.
        resubmitted: whether it was accepted before, by this engine or another.
        expected_cached: tokens that the engine has in its cache, as far as is known.
        num_engines: the number of engines that share the client's limits.
    """
    request = stream.request
    timeout_s = 0.0
    if request.deadline is not None:
        timeout_s = max(request.deadline - time.monotonic(), _SHORTEST_TIMEOUT_S)
    return pb.FrontendMessage(
        submit=pb.Submit(
            request=stream.number,
            request_id=request.request_id,
            prompt_ids=np.asarray(request.prompt_ids, "<i4").tobytes(),
            generated_ids=np.asarray(stream.tokens, "<i4").tobytes(),
            sampling=_token_sampling(stream),
            priority=request.priority,
            timeout_s=timeout_s,
            cache_salt=request.cache_salt,
            never_store=not request.may_store,
            resubmitted=resubmitted,
            n=n,
            expected_cached_tokens=expected_cached,
            traceparent=stream.traceparent,
            client=_client(request.client, num_engines) if request.client else None,
        )
    )


def _client(client: Tenant, num_engines: int) -> pb.Client:
    """An engine's part of a client's limits. If one engine rejects a request, another takes it, as
    long as the client has not used up all parts."""
    return pb.Client(
        name=client.name,
        weight=client.weight,
        input_tokens_per_minute=-(-client.input_tokens_per_minute // num_engines),
        output_tokens_per_minute=-(-client.output_tokens_per_minute // num_engines),
    )


def _token_sampling(stream: TokenStream) -> pb.TokenSampling:
    sampling, prompt = stream.request.sampling, stream.prompt_logprobs
    message = pb.TokenSampling(
        seed=(sampling.seed + stream.index) % 2**64,
        max_tokens=sampling.max_tokens,
        eos_token_ids=sampling.eos_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        # If the prompt's first pass was lost, the prompt is scored again only if rows are missing.
        prompt_logprobs=None if prompt is None or prompt.complete else sampling.prompt_logprobs,
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty,
        grammar=_grammar(sampling.grammar),
        pooling=pb.Pooling.ValueType(sampling.pooling),
        yes_id=sampling.yes_id,
        no_id=sampling.no_id,
        **{name: getattr(sampling, name) for name in NUMBERS},
    )
    bias = dict(sampling.logit_bias)
    for word in sampling.bad_words:
        if len(word) == 1:
            bias[word[0]] = BANNED
        else:
            message.bad_words.append(np.array(word, "<i4").tobytes())
    if bias:
        message.bias_ids = np.array([*bias], "<i4").tobytes()
        message.bias_values = np.array([*bias.values()], "<f4").tobytes()
    return message


def _grammar(grammar: Grammar | None) -> pb.Grammar | None:
    if grammar is None:
        return None
    return pb.Grammar(kind=cast("pb.GrammarKind.ValueType", grammar.kind), text=grammar.text)


def abort_message(stream: TokenStream) -> pb.FrontendMessage:
    """The message that has the scheduler drop a completion."""
    return pb.FrontendMessage(abort=pb.Abort(request=stream.number))


def new_tokens(output: pb.StepOutput) -> Iterator[tuple[int, int, int]]:
    """Yields (stream number, offset, token id) for each token of a step.

    Raises:
        ValueError: the columns differ in length.
    """
    return zip(
        np.frombuffer(output.requests, "<u8").tolist(),
        np.frombuffer(output.offsets, "<i4").tolist(),
        np.frombuffer(output.token_ids, "<i4").tolist(),
        strict=True,
    )


def logprob_rows(message: pb.LogprobRows) -> list[LogprobRow]:
    """The rows of a message, in the order of their tokens.

    Raises:
        ValueError: the columns have the wrong shape.
    """
    shape = (-1, message.width)
    token_ids = np.frombuffer(message.token_ids, "<i4").reshape(shape).tolist()
    values = np.frombuffer(message.values, "<f4").reshape(shape).tolist()
    return list(zip(token_ids, values, strict=True))


def finish_of(finished: pb.Finished, request_id: str) -> FinishReason | ServiceError:
    """How a request ended: the reason if it is complete, or else the error for the client."""
    reason = _REASONS.get(finished.cause)
    if reason is not None:
        return reason
    if finished.cause == pb.FINISH_CAUSE_DEADLINE:
        return DeadlineError("the deadline passed before the completion was finished")
    if finished.cause == pb.FINISH_CAUSE_QUEUE_FULL:
        return QueueFullError(finished.message, finished.retry_after_s, finished.field)
    if finished.cause == pb.FINISH_CAUSE_INVALID:
        return InvalidArgumentError(finished.field or "request", finished.message)
    log.error(
        "request failed in the engine",
        request_id=request_id,
        cause=finished.cause,
        reason=finished.message,
    )
    return InternalError("internal error")
