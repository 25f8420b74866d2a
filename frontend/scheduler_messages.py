"""Between the domain's types and the messages of protos/scheduler.proto."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import structlog

from frontend.token_stream import FinishReason, TokenStream
from shared.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
)
from shared.pb import scheduler_pb2 as pb

log = structlog.get_logger(__name__)

# The scheduler reads no timeout in zero; a deadline that has just passed is still a deadline.
_SHORTEST_TIMEOUT_S = 1e-3

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_CAUSE_EOS: FinishReason.EOS,
    pb.FINISH_CAUSE_LENGTH: FinishReason.LENGTH,
    pb.FINISH_CAUSE_STOP_TOKEN: FinishReason.STOP,
}


def submit_message(stream: TokenStream, *, resubmitted: bool = False) -> pb.FrontendMessage:
    """Submits a request with the tokens it has so far."""
    request, sampling = stream.request, stream.request.sampling
    timeout_s = 0.0
    if request.deadline is not None:
        timeout_s = max(request.deadline - time.monotonic(), _SHORTEST_TIMEOUT_S)
    return pb.FrontendMessage(
        submit=pb.Submit(
            request=stream.handle,
            request_id=request.request_id,
            prompt_ids=np.asarray(request.prompt_ids, "<i4").tobytes(),
            generated_ids=np.asarray(stream.tokens, "<i4").tobytes(),
            sampling=pb.TokenSampling(
                temperature=sampling.temperature,
                seed=sampling.seed,
                max_tokens=sampling.max_tokens,
                eos_token_ids=sampling.eos_token_ids,
                stop_token_ids=sampling.stop_token_ids,
            ),
            priority=request.priority,
            timeout_s=timeout_s,
            cache_salt=request.cache_salt,
            resubmitted=resubmitted,
        )
    )


def abort_message(stream: TokenStream) -> pb.FrontendMessage:
    """Ends a request before its time."""
    return pb.FrontendMessage(abort=pb.Abort(request=stream.handle))


def new_tokens(output: pb.StepOutput) -> Iterator[tuple[int, int, int]]:
    """(handle, offset, token id) of each token of a step.

    Raises:
        ValueError: the columns are not of the same length.
    """
    return zip(
        np.frombuffer(output.requests, "<u8").tolist(),
        np.frombuffer(output.offsets, "<i4").tolist(),
        np.frombuffer(output.token_ids, "<i4").tolist(),
        strict=True,
    )


def finish_of(finished: pb.Finished, request_id: str) -> FinishReason | ServiceError:
    """How a request ended: complete, or with an error for the client."""
    reason = _REASONS.get(finished.cause)
    if reason is not None:
        return reason
    if finished.cause == pb.FINISH_CAUSE_DEADLINE:
        return DeadlineError("the deadline passed before the completion was complete")
    if finished.cause == pb.FINISH_CAUSE_QUEUE_FULL:
        return QueueFullError(finished.message, finished.retry_after_s)
    if finished.cause == pb.FINISH_CAUSE_INVALID:
        return InvalidArgumentError("request", finished.message)
    log.error(
        "request failed in the engine",
        request_id=request_id,
        cause=finished.cause,
        reason=finished.message,
    )
    return InternalError("internal error")
