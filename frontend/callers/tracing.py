"""Traces calls, in the trace that a call's `traceparent` names or in a new trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import structlog

from frontend.callers.call import CALL, Call, CallTrace
from shared.errors import ServiceError
from shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue


@contextmanager
def traced(tracing: Tracing | None, call: Call, traceparent: str) -> Iterator[None]:
    """Traces a call if its client asks for it or if it is sampled at random. Log lines of the call
    name its trace."""
    if tracing is None:
        yield
        return
    span = tracing.begin(call.method, traceparent)
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


def part_of_call(name: str) -> AbstractContextManager[None]:
    """Records the context as a span of the current call, if the call is traced."""
    call = CALL.get()
    return call.trace.part(name) if call and call.trace else nullcontext()


def _attributes(call: Call) -> dict[str, AttributeValue]:
    """Returns the span's attributes, named by OpenTelemetry's conventions where possible."""
    work = call.work()
    if work is None:
        return {}
    return {
        "request_id": work.request_id,
        "gen_ai.request.model": work.model,
        "gen_ai.usage.input_tokens": work.prompt_tokens,
        "gen_ai.usage.output_tokens": work.completion_tokens,
        "gen_ai.response.finish_reasons": work.finish_reasons.split(","),
    }
