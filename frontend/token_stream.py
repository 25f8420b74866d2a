"""The tokens of one request as they come from the scheduler."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.request import Request
from frontend.turns import Turns
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

    def __init__(self, handle: int, request: Request, turns: Turns) -> None:
        """`handle`: what the scheduler knows the request by; `turns`: that readers share."""
        self.handle = handle
        self.request = request
        self.tokens: list[int] = []
        self.first_token_at: float | None = None  # time.monotonic
        self.start: Start | None = None
        self.finish: FinishReason | None = None  # set once the completion is complete
        self.error: ServiceError | None = None
        self._turns = turns
        self._turn: asyncio.Future[None] | None = None  # of the reader, not asked for yet

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    async def read(self, seen: int) -> Sequence[int]:
        """The tokens after the first `seen`, once there are some or the completion is complete, and
        the reader's turn has come.

        Raises:
            ServiceError: the request failed.
        """
        turn = self._turn = asyncio.get_running_loop().create_future()
        if self.ended or len(self.tokens) > seen:
            self.wake()
        await turn
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
        if self._turn is not None:
            self._turns.ask(self._turn)
            self._turn = None

    def complete(self, reason: FinishReason) -> None:
        """The scheduler says that no token follows."""
        self.finish = reason
        self.wake()

    def fail(self, error: ServiceError) -> None:
        """The request ends with `error`."""
        self.error = error
        self.wake()
