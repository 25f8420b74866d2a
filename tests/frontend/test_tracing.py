"""Traces that clients ask for are bounded by client."""

from __future__ import annotations

from contextvars import copy_context

from frontend.callers.call import Call
from frontend.callers.rates import CallerRates
from frontend.callers.tenants import Client
from frontend.callers.tracing import ASKED_PER_SECOND, traced
from shared.telemetry.tracing import Tracing


def test_a_client_that_asks_for_too_many_traces_gets_ten_a_second() -> None:
    tracing = Tracing("http://127.0.0.1:1", "frontend", 0, sample_ratio=0)
    asked = CallerRates(ASKED_PER_SECOND)

    def is_traced(client: str, at: float, flags: str = "01") -> bool:
        call = Call("Generate", "unix:", Client(client), began_at=at)
        metadata = (("traceparent", f"00-{'1' * 32}-{'2' * 16}-{flags}"),)

        def trace() -> bool:
            with traced(tracing, asked, call, metadata):
                return call.trace is not None

        return copy_context().run(trace)  # as each call has its own

    assert not any(is_traced("acme", 5.0, flags="00") for _ in range(20))
    assert sum(is_traced("acme", 5.0) for _ in range(20)) == 10
    assert is_traced("web", 5.0)
    assert sum(is_traced("acme", 5.5) for _ in range(20)) in (4, 5)
