"""The tokens of one request as they come from the scheduler."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.request import Request
from shared.errors import ServiceError


class FinishReason(enum.Enum):
    """Why a completion is complete."""

    EOS = enum.auto()
    LENGTH = enum.auto()
    STOP = enum.auto()


@dataclass(frozen=True, slots=True)
class Start:
    """What the scheduler says with a request's first token; `queue_s` in seconds."""

    cached_prompt_tokens: int
    queue_s: float


class TokenStream:
    """Filled by the scheduler client, read by the one call that serves the request."""

    def __init__(self, handle: int, request: Request) -> None:
        """`handle`: what the scheduler knows the request by."""
        self.handle = handle
        self.request = request
        self.tokens: list[int] = []
        self.first_token_at: float | None = None  # time.monotonic
        self.start: Start | None = None
        self.finish: FinishReason | None = None  # set once the completion is complete
        self.error: ServiceError | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    async def read(self, seen: int) -> Sequence[int]:
        """The tokens after the first `seen`, once there are some or the completion is complete.

        Raises:
            ServiceError: the request failed.
        """
        while not self.ended and len(self.tokens) == seen:
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        return self.tokens[seen:]

    def append(self, token_id: int) -> None:
        """Adds a token; `wake` lets the reader know."""
        if not self.tokens:
            self.first_token_at = time.monotonic()
        self.tokens.append(token_id)

    def wake(self) -> None:
        """Tells the reader that there is more."""
        self._changed.set()

    def complete(self, reason: FinishReason) -> None:
        """The scheduler says that no token follows."""
        self.finish = reason
        self.wake()

    def fail(self, error: ServiceError) -> None:
        """The request ends with `error`."""
        self.error = error
        self.wake()
