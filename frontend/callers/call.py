"""The current call and its trace, available to all code that serves the call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from frontend.callers.tenants import Tenant
from shared.rpc.callers import network_of
from shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span
    from opentelemetry.util.types import AttributeValue


@dataclass(frozen=True, slots=True)
class Work:
    """A call's request to the model, and the result so far."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    finish_reasons: str  # of its completions; empty unless all have ended

    def with_other(self, other: Work) -> Work:
        """The work of a call that has another prompt, too."""
        reasons = {*self.finish_reasons.split(","), *other.finish_reasons.split(",")}
        return Work(
            self.request_id,
            self.model,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_prompt_tokens + other.cached_prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            "" if "" in reasons else ",".join(sorted(reasons)),
        )


class CallTrace:
    """The spans of a traced call."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._context = tracing.traceparent(span)
        self._generations: list[Span] = []
        self._detokenize: Span | None = None
        self._detokenize_s = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        span = self._tracing.begin(name, self._context)
        try:
            yield
        finally:
            span.end()

    def begin_generation(self) -> str:
        """Returns the trace context for the engine's part of the call."""
        self._generations.append(self._tracing.begin("generation", self._context))
        return self._tracing.traceparent(self._generations[-1])

    def add_detokenizing(self, began_at: float) -> None:
        """Adds the time since `began_at` to the single span for all detokenizing."""
        if self._detokenize is None:
            self._detokenize = self._tracing.begin("detokenize", self._context, began_at)
        self._detokenize_s += time.monotonic() - began_at

    def end(self, attributes: Mapping[str, AttributeValue], error: str) -> None:
        """Ends all spans. `error`: how the call failed; empty if it did not."""
        from opentelemetry.trace import StatusCode

        if self._detokenize is not None:
            self._detokenize.set_attribute("busy_seconds", self._detokenize_s)
            self._detokenize.end()
        for generation in self._generations:
            generation.end()
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


@dataclass(slots=True)
class Call:
    """A call by `client`, or by an anonymous caller if `client` is None."""

    method: str  # of the service, or "other"
    peer: str  # as gRPC writes it
    client: Tenant | None = None
    began_at: float = field(default_factory=time.monotonic)
    works: list[Callable[[], Work]] = field(default_factory=list)  # return the results so far
    trace: CallTrace | None = None
    has_place: bool = False  # whether it counts as one of its client's open calls

    def work(self) -> Work | None:
        """The work of all generations so far; None if there is none."""
        if not self.works:
            return None
        first, *others = self.works
        return reduce(lambda whole, other: whole.with_other(other()), others, first())

    @property
    def caller(self) -> str:
        """The name by which limits and turns are counted: the client's name or the peer's host."""
        return self.client.name if self.client else network_of(self.peer)


CALL: ContextVar[Call | None] = ContextVar("call", default=None)
