"""Traces calls: in the trace that a call's `traceparent` names, or in a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from frontend.callers.call import CALL, Call
from frontend.callers.call_trace import CallTrace
from shared.errors import ServiceError
from shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue


# Traces that a client may ask for per second, after as many at once: some 30 spans each, of which
# OpenTelemetry keeps 2,048 that are not sent yet.
_PER_SECOND = 10.0
_MAX_CALLERS = 1024  # remembered at a time


class AskedTraces:
    """Bounds by caller the calls that are traced because they ask for it: whoever sets the flag
    `sampled` on all of them would fill the collector and slow the engine for everybody."""

    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}  # when all of a caller's are its own again

    def permit(self, caller: str, now: float) -> bool:
        """Whether one more of a caller's calls may be traced."""
        if caller not in self._free_at and len(self._free_at) >= _MAX_CALLERS:
            self._free_at = {each: at for each, at in self._free_at.items() if at > now}
            if len(self._free_at) >= _MAX_CALLERS:
                return False
        free_at = max(self._free_at.get(caller, now), now) + 1 / _PER_SECOND
        if free_at > now + 1:
            return False
        self._free_at[caller] = free_at
        return True


def _unsampled(traceparent: str) -> str:
    """The trace context without its flags (W3C Trace Context: version, trace, parent, flags)."""
    return "-".join((*traceparent.split("-")[:3], "00"))


@contextmanager
def traced(
    tracing: Tracing | None, asked: AskedTraces, call: Call, metadata: Any
) -> Iterator[None]:
    """Has the call traced, if its client may have that or chance wants it, and its log lines say in
    which trace."""
    if tracing is None:
        yield
        return
    traceparent = next((value for key, value in metadata or () if key == "traceparent"), "")
    span = tracing.begin(call.method, traceparent)
    came_with_parent = span.is_recording() and span.parent is not None
    if came_with_parent and not asked.permit(call.caller, call.began_at):
        span = tracing.begin(call.method, _unsampled(traceparent))
    if traceparent or span.is_recording():
        structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")
    if not span.is_recording():
        yield
        return
    trace = call.trace = CallTrace(tracing, span)
    error = "INTERNAL"
    try:
        yield
        error = ""
    except ServiceError as failure:
        error = failure.code.name
        raise
    except asyncio.CancelledError:
        error = "CANCELLED"
        raise
    finally:
        trace.end(_attributes(call), error)


@contextmanager
def part_of_call(name: str) -> Iterator[None]:
    """Makes this a span of the call that is being served, if that is traced."""
    call = CALL.get()
    if call is None or call.trace is None:
        yield
        return
    with call.trace.part(name):
        yield


def _attributes(call: Call) -> dict[str, AttributeValue]:
    """Returns the span's attributes, by OpenTelemetry's names where its conventions have one."""
    work = call.work() if call.work else None
    if work is None:
        return {}
    return {
        "request_id": work.request_id,
        "gen_ai.request.model": work.model,
        "gen_ai.usage.input_tokens": work.prompt_tokens,
        "gen_ai.usage.output_tokens": work.completion_tokens,
        "gen_ai.response.finish_reasons": work.finish_reasons.split(","),
    }
