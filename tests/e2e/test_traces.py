"""Traces of requests through all processes and across a worker's death, at a collector of its own
that speaks OTLP over gRPC."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer
from opentelemetry.proto.trace.v1 import trace_pb2

from bench.recovery import serving
from deploy.ports import free_port
from nano_vllm_grpc.pb import frontend_pb2
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.stack import running_stack
from tests.waiting import wait_for

# A span that is not accepted in time is lost.
PATIENT = {"EXPORT_TIMEOUT_S": "100"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Span:
    """A span, and the process that sent it."""

    def __init__(self, process: str, sent: trace_pb2.Span) -> None:
        self.process = process
        self.trace = sent.trace_id.hex()
        self.id = sent.span_id.hex()
        self.parent = sent.parent_span_id.hex()
        self.name = sent.name
        self.attributes = _attributes(sent.attributes)
        self.start, self.end = sent.start_time_unix_nano, sent.end_time_unix_nano
        self.has_events = bool(sent.events)
        self.failed = sent.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        self.text = str(sent)


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> Any:
        for sent in request.resource_spans:
            resource = _attributes(sent.resource.attributes)
            process = f"{resource['service.name']}-{resource.get('service.instance.id', 0)}"
            for scope in sent.scope_spans:
                self.spans += [Span(process, each) for each in scope.spans]
        return pb.ExportTraceServiceResponse()

    def find(self, name: str, **attributes: Any) -> list[Span]:
        """The spans with this name, and these attributes among theirs, in order."""
        found = [
            span
            for span in self.spans
            if span.name == name and attributes.items() <= span.attributes.items()
        ]
        return sorted(found, key=lambda span: span.start)


def _attributes(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def running_collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    with serving(collector) as endpoint:
        yield collector, endpoint


def request(max_tokens: int) -> frontend_pb2.GenerateRequest:
    sampling = frontend_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return frontend_pb2.GenerateRequest(text="Once upon a time", sampling=sampling)


def chat(url: str, metadata: list[tuple[str, str]]) -> None:
    message = {"role": "user", "content": "Hi"}
    body = json.dumps({"model": "demo", "max_tokens": 4, "messages": [message]}).encode()
    headers = {"content-type": "application/json", **dict(metadata)}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        assert response.status == 200


def complete(collector: Collector) -> bool:
    """Whether the last traced step has come, and both ranks' execution of it: of every 16 steps one
    is traced, and the last of all computes position 152."""
    steps = [span for span in collector.find("step") if span.attributes["position"] > 136]
    return bool(steps) and sum(each.parent == steps[-1].id for each in collector.spans) == 2


def test_a_trace_goes_through_all_processes_and_a_workers_death() -> None:
    with (
        running_collector() as (collector, endpoint),
        running_stack(PATIENT, tp=2, otlp_endpoint=endpoint, trace_sample_ratio=1) as stack,
        grpc.insecure_channel(stack.address) as channel,
    ):
        stub = InferenceServiceStub(channel)
        metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
        unsampled = [("traceparent", f"00-{'1' * 32}-{'2' * 16}-00")]
        with pytest.raises(grpc.RpcError):
            stub.Generate(request(-1), metadata=metadata)
        stub.Generate(request(4), metadata=unsampled)
        stub.Tokenize(frontend_pb2.TokenizeRequest(text="Once"))
        stack.hold.after(20)  # until the kill
        stream = stub.GenerateStream(request(150), metadata=metadata)
        tokens = len(next(stream).token_ids)
        while tokens < 20:
            tokens += len(next(stream).token_ids)
        stack.kill("worker", 1)
        stack.hold.release()
        tokens += sum(len(response.token_ids) for response in stream)
        assert tokens == 150
        (root,) = wait_for(lambda: collector.find("GenerateStream"), "the call's span")
        wait_for(lambda: complete(collector), "the last spans of all processes")
        log = stack.stack.log("frontend-0").read_text()

    check_calls(collector, root)
    check_steps(collector)
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    ended = [line for line in lines if line["event"] == "request ended"]
    assert [line["trace_id"] for line in ended] == ["1" * 32, TRACE]


def check_calls(collector: Collector, root: Span) -> None:
    assert not any("Once" in span.text for span in collector.spans)  # no text of a client
    (own,) = collector.find("Tokenize")
    assert not own.parent
    assert {span.trace for span in collector.spans} == {TRACE, own.trace}
    (refused,) = collector.find("Generate")
    assert refused.failed
    assert root.process == "nanovllm-frontend-0"
    assert root.parent == PARENT
    assert not root.failed
    assert root.attributes["gen_ai.usage.output_tokens"] == 150
    (generation,) = collector.find("generation")
    tokenize = collector.find("tokenize")[-1]
    (detokenize,) = collector.find("detokenize")
    assert {generation.parent, tokenize.parent, detokenize.parent} == {root.id}
    assert 0 < detokenize.attributes["busy_seconds"] < (detokenize.end - detokenize.start) / 1e9


def check_steps(collector: Collector) -> None:
    (generation,) = collector.find("generation")
    (queue,) = collector.find("queue")
    (recovery,) = collector.find("recovery")
    steps = collector.find("step")
    assert {each.process for each in (queue, recovery, *steps)} == {"nanovllm-scheduler-0"}
    assert {each.parent for each in (queue, recovery, *steps)} == {generation.id}
    assert steps[0].attributes["tokens"] == 4
    assert steps[0].attributes["position"] == 0
    lost = [step for step in steps if step.has_events]
    assert all(step.end <= recovery.end for step in lost)
    after = [step for step in steps if step.start >= recovery.end]
    assert after[0].attributes["position"] >= 4 + 19, "an answered position is computed again"
    assert after[0].attributes["tokens"] == 1
    by_step = {step.id: step for step in steps}
    for execution in collector.find("execution"):
        step = by_step[execution.parent]
        assert step.start <= execution.start <= execution.end <= step.end
    ranks = {
        rank: {
            by_step[span.parent].attributes["number"]
            for span in collector.find("execution", rank=rank)
        }
        for rank in (0, 1)
    }
    assert ranks[0] & ranks[1] >= {step.attributes["number"] for step in after}


def test_a_trace_comes_over_http() -> None:
    with (
        running_collector() as (collector, endpoint),
        running_stack(
            PATIENT, otlp_endpoint=endpoint, trace_sample_ratio=0, http_port=free_port()
        ) as stack,
    ):
        stack.wait_serving()
        url = f"{stack.stack.url}/v1/chat/completions"
        chat(url, [])
        chat(url, [("traceparent", f"00-{TRACE}-{PARENT}-01")])
        (generation,) = wait_for(lambda: collector.find("generation"), "the generation's span")
        wait_for(lambda: collector.find("execution"), "a worker's span")
    assert {span.trace for span in collector.spans} == {TRACE}, "the other is not sampled"
    parents = {span.id: span.parent for span in collector.spans}
    assert parents[generation.parent] == PARENT
