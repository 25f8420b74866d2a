"""The tokens of one completion as they arrive from the scheduler."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from frontend.engines.deaths import DeathRecord
from frontend.logprobs import CompletionLogprobs, PromptLogprobs
from frontend.request import GenerationRequest
from shared.errors import ServiceError


class FinishReason(enum.Enum):
    """Why a completion is complete."""

    EOS = enum.auto()
    LENGTH = enum.auto()
    STOP = enum.auto()


@dataclass(frozen=True, slots=True)
class Start:
    """The scheduler's report with a request's first token. `queue_s` is in seconds."""

    cached_prompt_tokens: int
    queue_s: float


_CALLS_AT_ONCE = 8


class WakeUps:
    """Wakes a few calls per iteration of the event loop, in the order of their news.

    A step of the engine has a token for every open request. If all chunks were written at once and
    the engine were faster than that, its steps would pile up unread and latency would grow without
    bound. A few chunks at a time take some tens of microseconds each, so steps are read as they
    arrive. A request that waits long gets the tokens of several steps in one chunk.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def add(self, call: asyncio.Future[None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._wake)
        self._waiting.append(call)

    def _wake(self) -> None:
        for _ in range(min(_CALLS_AT_ONCE, len(self._waiting))):
            call = self._waiting.popleft()
            if not call.done():  # else it was cancelled
                call.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._wake)


class Waiter:
    """Lets the call that reads a request's streams sleep until one of them has news."""

    def __init__(self, wake_ups: WakeUps) -> None:
        """`wake_ups`: shared by all calls."""
        self._wake_ups = wake_ups
        self._call: asyncio.Future[None] | None = None  # while the call sleeps without news

    async def wait(self, ready: bool) -> None:
        """Returns once the call may write. It waits for news unless `ready`."""
        call = self._call = asyncio.get_running_loop().create_future()
        if ready:
            self.wake()
        await call

    def wake(self) -> None:
        """Tells the call that there is news."""
        if self._call is not None:
            self._wake_ups.add(self._call)
            self._call = None


class Holder(Protocol):
    """The engine on which a completion is open."""

    def close(self, stream: TokenStream) -> None:
        """Drops the completion unless it has ended."""


class TokenStream:
    """A completion's tokens, added by its engine and read by the call that serves it."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        waiter: Waiter,
        index: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """`number`: its number at the scheduler; `index`: which of the request's completions it is;
        `prompt_logprobs`: given for the first one if the request asks for them."""
        self.number = number
        self.request = request
        self.waiter = waiter
        self.index = index
        self.traceparent = ""  # of the engine's spans
        self.group = [self]  # the request's completions
        self.holder: Holder | None = None  # the engine where it is
        self.arrived_at = 0.0  # when it was first given to an engine; time.monotonic
        self.sent = False  # whether a scheduler has got it, and has not rejected it
        self.withheld_s = 0.0  # from its arrival until then
        self.record = DeathRecord()
        self.move_goal = 0  # with this many tokens, it made progress since a lost engine
        self.rejected_by: set[Holder] = set()  # engines that had no room for it
        self.model_fingerprint = ""  # of the model that computed its tokens, once it left an engine
        self.tokens: list[int] = list(request.resume_token_ids)
        self.prompt_logprobs = prompt_logprobs
        self.logprobs: CompletionLogprobs | None = None
        if request.sampling.logprobs is not None:
            self.logprobs = CompletionLogprobs(len(self.tokens))
        self.first_token_at: float | None = None  # time.monotonic
        self.last_token_at: float | None = None
        self.start: Start | None = None
        self.embedding: NDArray[np.float32] | None = None  # comes with the first token
        self.finish: FinishReason | None = None  # set once the completion is complete
        self.score = 0.0  # for beam search
        self.error: ServiceError | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def check(self) -> None:
        """Raises the ServiceError that the request failed with, if any."""
        if self.error is not None:  # of several streams, whose calls' frames it must not join
            raise self.error.with_traceback(None)

    @property
    def stands_for_itself(self) -> bool:
        """Whether it is submitted on its own. Beams end together, so all of them are open, and the
        first is submitted for all."""
        return not self.request.sampling.beam_width or self.index == 0

    def close(self) -> None:
        """Has its engine drop it, unless it has ended."""
        if self.holder is not None:
            self.holder.close(self)
        self._unlink()

    def _unlink(self) -> None:
        """Drops circular references, which would hold memory until the garbage collector runs."""
        self.holder = None
        self.group = []

    def append(self, token_id: int, now: float) -> None:
        """Adds a token. Wake the waiter once all tokens of a step have been added."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.tokens.append(token_id)

    def complete(self, reason: FinishReason, score: float = 0.0) -> None:
        """Ends the stream: no token follows."""
        self.finish, self.score = reason, score
        self._unlink()
        self.waiter.wake()

    def fail(self, error: ServiceError) -> None:
        """Ends the stream with `error`."""
        self.error = error
        self._unlink()
        self.waiter.wake()
