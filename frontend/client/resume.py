"""What has come of a request, and what to send to get the rest after its stream broke."""

from __future__ import annotations

import secrets
import time
import uuid
from dataclasses import dataclass

from frontend.client import wire
from frontend.client.types import Chunk
from shared.pb import frontend_pb2 as pb


@dataclass(frozen=True)
class Call:
    """A message to send; `index` is that of the one completion it asks for, None where the chunks
    that come back say theirs."""

    message: pb.GenerateRequest
    index: int | None = None


class ResumableRequest:
    """Remembers the tokens that came, so that the chunks of all calls together are those of one
    that nothing interrupted: no token twice, none missing, `request_id` and `index` the same,
    `usage` and `timings` on the last one only.

    Broken off, a completion goes on after its tokens. Each of several does so alone: number i is
    the one that seed + i gives. A seed that is not given is chosen here, so that it stays the same.
    Beams come all at the end: the search is done again, and those that came already are left out.
    """

    def __init__(self, message: pb.GenerateRequest) -> None:
        sampling = message.sampling
        message.request_id = message.request_id or uuid.uuid4().hex
        if not sampling.HasField("seed") and not sampling.beam_width:
            sampling.seed = secrets.randbits(64)
        self._message = message
        self._count = sampling.beam_width or sampling.n or 1
        self._tokens = {0: list(message.resume_token_ids)}  # by index
        self._ended: set[int] = set()
        self._resumed = False
        self._sent_at = time.monotonic()
        self._begun_at: float | None = None  # when the first chunk came

    def whole(self) -> Call:
        return Call(self._message)

    def take(self, call: Call, message: pb.GenerateStreamResponse) -> Chunk | None:
        """The chunk to hand on, None for a beam that came before."""
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
        """What to send once `call` broke off; nothing if only its status is missing."""
        if self._begun_at is None:
            return [call]
        self._resumed = True
        if self._message.sampling.beam_width:
            return [call] if len(self._ended) < self._count else []
        indices = range(self._count) if call.index is None else (call.index,)
        return [self._alone(index) for index in indices if index not in self._ended]

    def _alone(self, index: int) -> Call:
        """Completion number `index` from where it is."""
        message = pb.GenerateRequest()
        message.CopyFrom(self._message)
        sampling = message.sampling
        sampling.seed = (sampling.seed + index) % 2**64
        sampling.ClearField("n")
        sampling.ClearField("prompt_logprobs")  # came with the first chunk
        message.resume_token_ids[:] = self._tokens.get(index, ())
        return Call(message, index)

    def _set_totals(self, message: pb.GenerateStreamResponse, begun_at: float) -> None:
        """A call's totals become those of the request: its times are the client's own."""
        if len(self._ended) < self._count:
            message.ClearField("usage")
            message.ClearField("timings")
        elif message.HasField("usage"):
            message.usage.completion_tokens = sum(map(len, self._tokens.values()))
            message.timings.first_token_s = begun_at - self._sent_at
            message.timings.total_s = time.monotonic() - self._sent_at
