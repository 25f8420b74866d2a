"""The call that is being served, known to all that is done for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from frontend.callers.call_trace import CallTrace
from frontend.callers.tenants import Client
from shared.rpc.callers import network_of


@dataclass(frozen=True, slots=True)
class Work:
    """A generation's share of a call: what was asked of the model, and what came of it so far."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    finish_reasons: str  # those of its completions, empty unless all have ended


@dataclass(slots=True)
class Call:
    """A call by `client`, or by nobody known if that is None."""

    method: str  # of the service, or "other"
    peer: str  # as gRPC writes it
    client: Client | None = None
    began_at: float = field(default_factory=time.monotonic)
    work: Callable[[], Work] | None = None  # once there is a generation
    trace: CallTrace | None = None

    @property
    def caller(self) -> str:
        """The one that limits and turns are counted by: the client, or the peer's host."""
        return self.client.name if self.client else network_of(self.peer)


CALL: ContextVar[Call | None] = ContextVar("call", default=None)
