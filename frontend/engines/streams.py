"""Makes the streams of a frontend's requests for all engines."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.callers.call import CALL
from frontend.engines.token_stream import TokenStream, Waiter, WakeUps
from frontend.logprobs import PromptLogprobs
from frontend.request import GenerationRequest


class Streams:
    """The token streams of one frontend process."""

    def __init__(self) -> None:
        self.num_engines = 1
        self._next_number = 1
        self._wake_ups = WakeUps()

    def open(self, request: GenerationRequest) -> list[TokenStream]:
        """The streams of a new request's completions."""
        call = CALL.get()
        waiter = Waiter(self._wake_ups)
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
        return streams

    def number(self, streams: Sequence[TokenStream]) -> None:
        """Gives streams new, consecutive numbers, so that no engine gets a number twice."""
        for stream in streams:
            stream.number = self._next_number
            self._next_number += 1
