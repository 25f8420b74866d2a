"""Makes the streams of a frontend's requests for all engines, and bounds the log-probabilities that
the streams hold unread."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from frontend.callers.call import CALL
from frontend.engines.token_stream import TokenStream, Waiter
from frontend.logprobs import PromptLogprobs
from frontend.request import Request
from shared.errors import QueueFullError
from shared.rpc.turns import Turns

# Log-probabilities of completions that clients have not read yet; some 70 bytes each.
MAX_UNREAD_LOGPROBS = 1 << 22
_RETRY_AFTER_S = 0.5
# A step of the engine has a token for every open request. If all chunks were written at once and
# the engine were faster than that, its steps would pile up unread and latency would grow without
# bound. A few chunks at a time take some tens of microseconds each, so steps are read as they
# arrive. A request that waits long for its turn gets the tokens of several steps in one chunk.
_WRITES_AT_ONCE = 8


class Streams:
    """The token streams of one frontend process."""

    def __init__(self) -> None:
        self.num_engines = 1
        self._next_number = 1
        self._writes = Turns(_WRITES_AT_ONCE)
        self._scored: WeakSet[TokenStream] = WeakSet()  # until their calls end
        self._num_unread = 0  # log-probabilities; those read since the last count are included

    def open(self, request: Request) -> list[TokenStream]:
        """The streams of a new request's completions."""
        call = CALL.get()
        waiter = Waiter(self._writes, call.caller if call else "")
        prompt = None
        if request.sampling.prompt_logprobs is not None:
            prompt = PromptLogprobs(len(request.prompt_ids))
        streams = [TokenStream(0, request, waiter, 0, prompt)]
        for index in range(1, request.sampling.num_completions):
            streams.append(TokenStream(0, request, waiter, index))
        for stream in streams:
            stream.group = streams
        self.number(streams)
        if call and call.trace:
            traceparent = call.trace.begin_generation()
            for stream in streams:
                stream.traceparent = traceparent
        if request.sampling.logprobs is not None:
            self._scored.update(streams)
        return streams

    def number(self, streams: Sequence[TokenStream]) -> None:
        """Gives streams new, consecutive numbers, so that no engine gets a number twice."""
        for stream in streams:
            stream.number = self._next_number
            self._next_number += 1

    def count_unread(self, num_logprobs: int) -> None:
        """Counts log-probabilities that have arrived. If too many are unread, the completions with
        the most unread ones fail."""
        self._num_unread += num_logprobs
        if self._num_unread <= MAX_UNREAD_LOGPROBS:
            return
        unread = [
            (stream.logprobs.num_entries, stream)
            for stream in self._scored
            if stream.logprobs is not None
        ]
        unread.sort(key=lambda each: each[0])
        self._num_unread = sum(count for count, _ in unread)
        if self._num_unread > MAX_UNREAD_LOGPROBS:
            while self._num_unread > MAX_UNREAD_LOGPROBS // 2:
                count, stream = unread.pop()
                self._num_unread -= count
                stream.close()
                stream.logprobs = None
                stream.fail(
                    QueueFullError(
                        f"sampling.logprobs: {count} are unread, more than of any other "
                        f"request; the limit for all requests is {MAX_UNREAD_LOGPROBS}",
                        _RETRY_AFTER_S,
                        "sampling",
                    )
                )
