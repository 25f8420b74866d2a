"""Tracks the tokens that a request has received, and plans calls for the rest."""

from __future__ import annotations

import math
import secrets
import time
import uuid
from dataclasses import dataclass

from nano_vllm_grpc import wire
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.types import Chunk


@dataclass(frozen=True)
class Call:
    """A message to send. `index` is that of the only completion for which it asks, or None if the
    received chunks have theirs."""

    message: pb.GenerateRequest
    index: int | None = None


class ResumableRequest:
    """Remembers received tokens, so that several calls give the chunks of one uninterrupted call.

    No token is repeated or missing. `request_id` and `index` stay as they are. `usage` and
    `timings` are on the last chunk only.

    A completion that breaks off continues after its tokens. If there are several, each continues
    alone, and number i uses the seed + i. A missing seed is chosen here, so that all calls use it.
    Beams all arrive at the end, so their search is repeated and beams already received are skipped.

    `deadline`: of all calls together, by `time.monotonic`; infinity for none.
    """

    def __init__(self, message: pb.GenerateRequest, timeout_s: float | None) -> None:
        sampling = message.sampling
        message.request_id = message.request_id or uuid.uuid4().hex
        if not sampling.HasField("seed") and not sampling.beam_width:
            sampling.seed = secrets.randbits(64)
        self.whole = Call(message)  # the first to make
        self._count = sampling.beam_width or sampling.n or 1
        self._tokens = {0: list(message.resume_token_ids)}  # by index
        self._ended: set[int] = set()
        self._resumed = False
        self._sent_at = time.monotonic()
        self.deadline = math.inf if timeout_s is None else self._sent_at + timeout_s
        self._begun_at: float | None = None  # when the first chunk arrived

    def take(self, call: Call, message: pb.GenerateStreamResponse) -> Chunk | None:
        """Records a message. Returns the chunk to pass on, or None for a beam already received."""
        if self._begun_at is None:
            self._begun_at = time.monotonic()
        if call.index is not None:
            message.index = call.index
        if message.index in self._ended:
            return None
        self._tokens.setdefault(message.index, [])[message.token_offset :] = message.token_ids
        if message.finish_reason:
            self._ended.add(message.index)
        if self._resumed:
            self._set_totals(message, self._begun_at)
        return wire.decode_chunk(message)

    def resume(self, call: Call) -> list[Call]:
        """The calls to make once `call` has broken off; no calls if only its status is missing."""
        if self._begun_at is None:
            return [call]
        self._resumed = True
        if self.whole.message.sampling.beam_width:
            return [call] if len(self._ended) < self._count else []
        indices = range(self._count) if call.index is None else (call.index,)
        return [self._alone(index) for index in indices if index not in self._ended]

    def _alone(self, index: int) -> Call:
        """The call that continues completion number `index` after its received tokens."""
        message = pb.GenerateRequest()
        message.CopyFrom(self.whole.message)
        sampling = message.sampling
        sampling.seed = (sampling.seed + index) % 2**64
        sampling.ClearField("n")
        sampling.ClearField("prompt_logprobs")  # came with the first chunk
        message.resume_token_ids[:] = self._tokens.get(index, ())
        return Call(message, index)

    def _set_totals(self, message: pb.GenerateStreamResponse, begun_at: float) -> None:
        """Replaces a call's totals with the request's, whose times the client measured."""
        if len(self._ended) < self._count:
            message.ClearField("usage")
            message.ClearField("timings")
        elif message.HasField("usage"):
            message.usage.completion_tokens = sum(map(len, self._tokens.values()))
            message.timings.first_token_s = begun_at - self._sent_at
            message.timings.total_s = time.monotonic() - self._sent_at
