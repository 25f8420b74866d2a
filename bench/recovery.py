"""`python -m bench.recovery`: kills a worker under traced streams, and records when each token
arrived and what the services did meanwhile. `tools.pictures` draws the result.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from bench.kill_servers import LIMIT_S, Server, start_nano
from bench.machine import this_machine
from bench.peers.driver import ENTRIES
from bench.workload import BenchError, Shape, WorkloadRequest, read_tokens, text_workload
from deploy.errors import LaunchError
from deploy.model import model_name, resolve_model
from nano_vllm_grpc import LLMError

STREAMS, PROMPT_TOKENS, TOKENS = 4, 64, 384
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


def kill_worker(server: Server, requests: list[WorkloadRequest]) -> tuple[float, list[list[float]]]:
    """Kills the worker once every stream decodes -> the time of that, and of each stream's tokens.

    Raises:
        BenchError: a stream ended before the kill.
        LLMError: a stream failed.
    """
    arrivals: list[list[float]] = [[] for _ in requests]
    started = threading.Barrier(len(requests) + 1, timeout=LIMIT_S)

    def receive(request: WorkloadRequest, times: list[float]) -> None:
        waits = True
        for token_ids in server.stream(request):
            times += [_now_s()] * len(token_ids)
            if waits and len(times) >= _TOKENS_BEFORE:
                started.wait()
                waits = False

    with ThreadPoolExecutor(len(requests)) as pool:
        streams = [pool.submit(receive, *each) for each in zip(requests, arrivals, strict=True)]
        started.wait()
        if any(stream.done() for stream in streams):
            raise BenchError("a stream ended before the kill")
        pid, killed_s = server.pids["worker"](), _now_s()
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            stream.result()
    return killed_s, arrivals


def _now_s() -> float:
    return datetime.now(UTC).timestamp()


def record(model: Path, entry_name: str) -> dict[str, Any]:
    """Returns the times of tokens and spans, in seconds from the kill."""
    entry = next(each for each in ENTRIES if each.name == entry_name)
    text = read_tokens(model)
    shape = Shape(STREAMS, PROMPT_TOKENS, PROMPT_TOKENS, TOKENS, TOKENS)
    requests = text_workload(shape, text)
    collector = Collector()
    with serving(collector) as endpoint:
        traced = {"otlp_endpoint": endpoint, "trace_sample_ratio": "1"}
        with start_nano(entry, model, tp=1, more_variables=traced) as server:
            kill_worker(server, requests)  # the first kill warms caches up
            killed_s, arrivals = kill_worker(server, requests)
    low, high = _SHOWN_S
    spans = [
        {**span, "start_s": span["start_s"] - killed_s, "end_s": span["end_s"] - killed_s}
        for span in collector.spans
    ]
    return {
        "streams": [[at - killed_s for at in times] for times in arrivals],
        "spans": [span for span in spans if span["end_s"] > low and span["start_s"] < high],
        **server.facts,
    }


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--model", required=True, help="what MODEL takes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    names = [entry.name for entry in ENTRIES if entry.peer == "nano"]
    parser.add_argument("--entry", choices=names, default="nano-int8-kv8", help="%(default)s")
    options = parser.parse_args(args)
    try:
        model = resolve_model(options.model).resolve()
        recorded = record(model, options.entry)
    except (BenchError, LaunchError, LLMError, threading.BrokenBarrierError) as error:
        print(f"bench.recovery: {error}", file=sys.stderr)
        return 1
    result = {
        "mode": "recovery",
        "date": datetime.now(UTC).date().isoformat(),
        "model": model_name(options.model, model),
        **recorded,
        **asdict(this_machine()),
        "command": ["python", "-m", "bench.recovery", *args],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
