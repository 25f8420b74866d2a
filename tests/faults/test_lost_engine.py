"""Promise 11: an engine is lost, all its processes at once and for good, and its streams go on at
another."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest

from deploy.ports import free_service_port
from deploy.stack import Process
from deploy.supervisor import start_process, stop_process
from shared.pb.frontend_pb2 import GenerateRequest
from shared.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.faults.streams import REQUESTS, STORY, assert_undamaged, open_streams, undisturbed
from tests.faults.transcript import Transcript
from tests.stack import WAIT_S, RealStack, running_stack

pytestmark = pytest.mark.timeout(900)

_HTTP_TOKENS = 160

_ON_THE_LOST = ("seeded", "filters", "several")  # and long; no other is waited for meanwhile


@pytest.fixture(scope="module")
def stack() -> Iterator[RealStack]:
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 32}
    http = {"http_port": free_service_port()}
    with running_stack(engines=2, dtype="float32", kv_blocks=1024, **limits, **http) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack: RealStack) -> dict[str, Transcript]:
    return undisturbed(stack.address, REQUESTS)


class LostEngine:
    """An engine that nothing starts again before `restore`."""

    def __init__(self, stack: RealStack, number: int) -> None:
        self._directory = stack.directory
        self._processes = stack.stack.engine_processes(number)
        all_of_it = [each for process in self._processes for each in _family(stack, process)]
        for each in all_of_it:  # so that none notices what becomes of the others, or of itself
            each.suspend()
        stops = [threading.Thread(target=self._stop, args=[each]) for each in self._processes]
        for stop in stops:
            stop.start()
        for each in all_of_it:
            os.kill(each.pid, signal.SIGKILL)
        for stop in stops:
            stop.join()

    def _stop(self, process: Process) -> None:
        stop_process(self._directory, process)

    def restore(self) -> None:
        for process in self._processes:
            start_process(self._directory, process)


def _family(stack: RealStack, process: Process) -> list[psutil.Process]:
    """A service's keeper and its forks."""
    keeper = psutil.Process(stack.pid(process.service, process.index)).parent()
    assert keeper is not None
    return [keeper, *keeper.children(recursive=True)]


def _generate(stack: RealStack) -> list[int]:
    """A unary call, which takes as long as its whole completion."""
    with grpc.insecure_channel(stack.address) as channel:
        stub = InferenceServiceStub(channel)
        answer = stub.Generate(REQUESTS["seeded"], timeout=WAIT_S)
    return list(answer.completions[0].token_ids)


def _over_http(stack: RealStack) -> str:
    """The text of a greedy completion, streamed through the gateway."""
    body = {
        "model": stack.stack.model,
        "prompt": STORY,
        "max_tokens": _HTTP_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{stack.stack.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        events = [line[6:] for line in response if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_its_streams_go_on_at_another(stack: RealStack, expected: dict[str, Transcript]) -> None:
    text = _over_http(stack)
    requests: dict[str, GenerateRequest] = {}
    for number, (name, request) in enumerate(REQUESTS.items()):  # half of them on each engine
        requests[name] = GenerateRequest()
        requests[name].CopyFrom(request)
        requests[name].engine = str(number % 2)
    with ThreadPoolExecutor() as threads, open_streams(stack.address, requests) as streams:
        wholes = [threads.submit(_generate, stack) for _ in range(2)]
        texts = [threads.submit(_over_http, stack) for _ in range(2)]
        streams.wait_for_tokens(5, *_ON_THE_LOST)
        open_then = set(streams.open)
        lost = LostEngine(stack, 1)
        assert_undamaged(streams.wait_ended(), expected)
        assert [each.result() for each in texts] == [text, text]
        seeded = expected["seeded"].parts[0].token_ids
        assert [each.result() for each in wholes] == [seeded, seeded]
    assert set(_ON_THE_LOST) <= open_then
    assert {requests[name].engine for name in _ON_THE_LOST} == {"1"}
    # With one engine left, everything still runs.
    assert_undamaged(undisturbed(stack.address, REQUESTS), expected)
    lost.restore()
    stack.wait_serving()
    assert_undamaged(undisturbed(stack.address, requests), expected)


def test_both_in_turn(stack: RealStack, expected: dict[str, Transcript]) -> None:
    """Streams that have moved move on, also to where they were before."""
    with open_streams(stack.address, REQUESTS) as streams:
        for number in (0, 1):
            streams.wait_for_tokens(10 + 30 * number, "seeded", "greedy")
            lost = LostEngine(stack, number)
            streams.wait_for_tokens(20 + 30 * number, "seeded", "greedy")
            lost.restore()
            stack.wait_serving()
        assert_undamaged(streams.wait_ended(), expected)
