"""`python -m bench --mode recovery`: kills a worker under traced streams, and records when each
token arrived and what the services did meanwhile. `tools.pictures` draws the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from rich.console import Console

from bench.kill import PROMPT_TOKENS, STREAMS, check_whole, killing
from bench.kill_servers import start_nano
from bench.peers.driver import ENTRIES
from bench.report import mode_parser
from bench.workload import Shape, read_tokens, text_workload
from deploy.model import model_name, resolve_model

ENTRY = "nano-int8-kv8"
_TOKENS = 384
_TOKENS_BEFORE = 32  # that a stream has received before the kill
_SHOWN_S = (-0.5, 1.5)  # from the kill


class Collector(TraceServiceServicer):
    """Keeps the spans that the services send."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> Any:
        for sent in request.resource_spans:
            names = {each.key: each.value.string_value for each in sent.resource.attributes}
            self.spans += [
                {
                    "service": names["service.name"].removeprefix("nanovllm-"),
                    "name": span.name,
                    "trace": span.trace_id.hex(),
                    "start_s": span.start_time_unix_nano / 1e9,
                    "end_s": span.end_time_unix_nano / 1e9,
                }
                for scope in sent.scope_spans
                for span in scope.spans
            ]
        return pb.ExportTraceServiceResponse()


@contextmanager
def serving(collector: TraceServiceServicer) -> Iterator[str]:
    """Serves a collector of spans -> its endpoint."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def record(model: Path, tokens: int = _TOKENS) -> dict[str, Any]:
    """Returns the times of tokens and spans, in seconds from the kill.

    Raises:
        BenchError: a stream ended early.
    """
    entry = next(each for each in ENTRIES if each.name == ENTRY)
    shape = Shape(STREAMS, PROMPT_TOKENS, PROMPT_TOKENS, tokens, tokens)
    requests = text_workload(shape, read_tokens(model))
    collector = Collector()
    with serving(collector) as endpoint:
        traced = {"otlp_endpoint": endpoint, "trace_sample_ratio": "1"}
        with start_nano(entry, model, tp=1, more_variables=traced) as server:
            for _ in range(2):  # the first kill warms caches up
                with killing(server, "worker", requests, _TOKENS_BEFORE) as (streams, killed):
                    killed_s = datetime.now(UTC).timestamp()  # by the clock of spans
                check_whole(streams)
    low, high = _SHOWN_S
    low = max(low, min(stream.sent for stream in streams) - killed)  # not those of the first kill
    spans = [
        {**span, "start_s": span["start_s"] - killed_s, "end_s": span["end_s"] - killed_s}
        for span in collector.spans
    ]
    return {
        "streams": [
            [at - killed for at, tokens in stream.arrivals for _ in range(tokens)]
            for stream in streams
        ],
        "spans": [span for span in spans if span["end_s"] > low and span["start_s"] < high],
        "server": server.facts,
    }


def parse_args(args: list[str]) -> argparse.Namespace:
    return mode_parser("recovery", __doc__).parse_args(args)


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the record.

    Raises:
        BenchError, LLMError: the server does not start, or a stream failed.
        LaunchError: there is no such model.
    """
    model = resolve_model(options.model).resolve()
    with console.status("killing the worker twice"):
        recorded = record(model)
    yield {"model": model_name(options.model, model), **recorded}
