"""Spans of requests, which OpenTelemetry's library sends to a collector.

Without an endpoint there is no `Tracing`, and the library is not imported.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span
    from opentelemetry.util.types import AttributeValue

log = structlog.get_logger(__name__)

_EXPORT_EVERY_S = 0.5  # a killed process loses the spans that it has not sent
_EXPORT_TIMEOUT_S = 3.0  # also when the process ends


class Tracing:
    """Makes a process's spans. Times are in seconds of `time.monotonic`.

    Args:
        sample_ratio: the share that is recorded of the traces that begin here. Other traces are
            recorded if their parents are.
    """

    def __init__(self, endpoint: str, service: str, index: int, sample_ratio: float) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator = TraceContextTextMapPropagator()
        resource = {"service.name": f"nanovllm-{service}", "service.instance.id": str(index)}
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio), resource=Resource.create(resource)
        )
        exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)
        provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=1000 * _EXPORT_EVERY_S)
        )
        self._tracer = provider.get_tracer("nanovllm")
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [_Forward(logging.WARNING)]
        logger.propagate = False

    def begin(
        self,
        name: str,
        traceparent: str = "",
        at: float | None = None,
        **attributes: AttributeValue,
    ) -> Span:
        """Begins a span at the time `at`, or now. `traceparent` is its parent's W3C trace context;
        if it is empty or invalid, the span begins a new trace."""
        return self._tracer.start_span(  # type: ignore[return-value]  # the interface's type
            name,
            self._context(traceparent),
            attributes=attributes,
            start_time=None if at is None else _nanoseconds(at),
        )

    def add(
        self, name: str, traceparent: str, began_at: float, **attributes: AttributeValue
    ) -> None:
        """Adds a span that ends now."""
        self.begin(name, traceparent, began_at, **attributes).end()

    def traceparent(self, span: Span) -> str:
        """The trace context for the children of a span."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def _context(self, traceparent: str) -> Context:
        from opentelemetry.context import Context

        # An empty context, so that the library does not take its current span as the parent.
        return self._propagator.extract({"traceparent": traceparent}, Context())


def preload(endpoint: str) -> None:
    """Imports the library before the process forks, if there is an endpoint."""
    if endpoint:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter  # noqa: F401


def open_tracing(
    endpoint: str, service: str, index: int = 0, sample_ratio: float = 0.0
) -> Tracing | None:
    """Opens tracing; returns None without an endpoint. Call it in the fork: it starts threads."""
    return Tracing(endpoint, service, index, sample_ratio) if endpoint else None


def _nanoseconds(at: float) -> int:
    now = time.time_ns()  # noqa: TID251  # collectors compare processes by the calendar
    return now - round(1e9 * (time.monotonic() - at))


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.warning("OpenTelemetry reports a problem", reason=record.getMessage())
