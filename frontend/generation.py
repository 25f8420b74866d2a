"""One completion from its token stream to the chunks that a client is sent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from frontend.completion import CompletionBuilder, Delta
from frontend.token_stream import FinishReason, Start, TokenStream


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known once a completion is complete; times in seconds since the request came."""

    reason: FinishReason
    stop_reason: str
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float


class Generation:
    """One request under way."""

    def __init__(self, stream: TokenStream, table: Mapping[int, bytes], received_at: float) -> None:
        """`table`: the bytes of each token; `received_at`: when the request came, on the clock of
        `time.monotonic`."""
        self.stream = stream
        self.ending: Ending | None = None  # set with the last delta
        self._builder = CompletionBuilder(table, stream.request.sampling)
        self._received_at = received_at

    async def next_delta(self) -> Delta:
        """What the completion grew by; the last delta sets `ending`. Tokens that come while the
        caller is busy with one delta join the next.

        Raises:
            ServiceError: the request failed.
        """
        stream, builder = self.stream, self._builder
        delta = builder.feed(await stream.read(builder.num_tokens))
        if stream.finish is None and builder.stop_string is None:
            return delta
        delta.text += builder.finish()
        self.ending = self._make_ending()
        return delta

    def elapsed_s(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self._received_at

    def _make_ending(self) -> Ending:
        stream, builder = self.stream, self._builder
        # A request that was given all its tokens anew has none that could bring its start.
        start = stream.start or Start(cached_prompt_tokens=0, queue_s=0.0)
        if builder.stop_string is not None:
            reason, stop_reason = FinishReason.STOP, builder.stop_string
        else:
            assert stream.finish is not None
            reason = stream.finish
            stop_reason = str(stream.tokens[-1]) if reason is FinishReason.STOP else ""
        first_token_at = stream.first_token_at
        return Ending(
            reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=len(stream.request.prompt_ids),
            cached_prompt_tokens=start.cached_prompt_tokens,
            completion_tokens=builder.num_tokens,
            queue_s=start.queue_s,
            first_token_s=first_token_at - self._received_at if first_token_at else 0.0,
            total_s=self.elapsed_s(),
        )
